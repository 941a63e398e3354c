"""A configuration file rewritten for an attempt: a copy with the new values, all else as it was."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.check.config.document import read_document
from nanguard.check.config.edits import replace_node
from nanguard.check.config.keys import setting_for
from nanguard.check.config.leaves import Tree
from nanguard.check.config.run import read_project
from nanguard.check.config.settings import number_of
from nanguard.check.history import keep
from nanguard.check.outcome import Change, Repair
from nanguard.errors import SourceError, UsageError
from nanguard.findings import Edit, Fix, Kind, Severity
from nanguard.run.recovering.templates import filled_in, placeholders
from nanguard.source.edits import apply, whole_diff
from nanguard.source.files import CONFIG_LIMIT, decode, read_bytes
from nanguard.source.text import Text

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from nanguard.check.config.document import Document
    from nanguard.check.config.node import Node

ENDINGS = (".yaml", ".yml", ".json", ".jsonc", ".toml")
RECOVERED = Kind("RUN020", "recovered-run", Severity.INFO)
_PLAIN = re.compile(r"[A-Za-z_/.][\w./@+-]*")


@dataclass(frozen=True, slots=True)
class Key:
    """A key of a configuration whose value changes from attempt to attempt.

    Attributes:
        dotted: The key, with those of the sections around it.
        template: What it is set to.
    """

    dotted: str
    template: str

    @classmethod
    def of(cls, text: str, option: str, name: str) -> Key:
        """Reads ``training.lr``, or ``resume.milestone={step}``.

        Raises:
            UsageError: There is no such placeholder, or none at all.
        """
        dotted, equals, template = text.partition("=")
        template = template if equals else f"{{{name}}}"
        where = f"nanguard run {option} {text}"
        if not placeholders(template, where) or not dotted:
            raise UsageError(
                f"{text!r} does not say which key is set to what.",
                where=where,
                do=f"Write {option} section.key, or {option} 'section.key={{{name}}}'.",
            )
        return cls(dotted, template)


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The configuration of the command.

    Attributes:
        path: The file, as the command names it.
        keys: What is set in it, by what it is for.
    """

    path: str
    keys: Mapping[str, Key]

    def check(self, command: Sequence[str]) -> None:
        """Looks whether an attempt could be told through this file, before there is one.

        Raises:
            UsageError: It could not.
        """
        if not any(_names(word, self.path) for word in command):
            raise UsageError(
                f"the command does not name {self.path}, so that a copy of it would not be read.",
                where="nanguard run --config",
                do="Write the file as the command does, for example: --config config.yaml -- "
                "python train.py --config config.yaml",
            )
        document = self.read()
        for purpose, key in self.keys.items():
            node = node_at(document, key.dotted)
            if node is None or node.kind != "scalar" or node.style == "block":
                raise UsageError(
                    f"{self.path} has no single value at {key.dotted}.",
                    where=f"nanguard run --{purpose}-key",
                    do=f"Write the key into the file, for example with the value null, or name "
                    f"another one: --{purpose}-key section.key",
                )

    def number(self, dotted: str) -> float | None:
        """Returns the number that stands at a key; None if there is none."""
        node = node_at(self.read(), dotted)
        return None if node is None else number_of(node.value)

    def write(
        self, values: Mapping[str, str], purposes: Collection[str], why: str, folder: Path
    ) -> str:
        """Writes the copy for an attempt; returns its name.

        Args:
            values: What placeholders stand for.
            purposes: Which keys are set; the others stay as they are.
            why: What the attempt is for.
            folder: Where a copy goes that cannot stand beside the file.

        Raises:
            SourceError: The file, or a key of it, is not there any more.
            OSError: The copy cannot be written.
        """
        document = self.read()
        edits, changes = [], []
        for key in (key for purpose, key in self.keys.items() if purpose in purposes):
            node = node_at(document, key.dotted)
            value = filled_in(key.template, values)
            if node is None:  # it was there at the start
                raise SourceError(
                    f"the key {key.dotted} is gone.", where=self.path, do="Put it back."
                )
            edits.append(_edit(node, value, document.format))
            finding = RECOVERED(why, path=self.path, line=node.line, where=key.dotted)
            changes.append(Change(finding, Fix(f"{key.dotted}: {value}")))
        repaired = apply(document.text.content, edits)
        return self._save(document, repaired, tuple(changes), values["attempt"], folder)

    def into(self, command: Sequence[str], copy: str) -> list[str]:
        """Returns a command that reads a copy of the file."""
        return [_renamed(word, self.path, copy) for word in command]

    def _save(
        self,
        document: Document,
        repaired: str,
        changes: tuple[Change, ...],
        attempt: str,
        folder: Path,
    ) -> str:
        data = decode(self.path, read_bytes(self.path, CONFIG_LIMIT), python=False).encode(repaired)
        own = Path(self.path)
        name = f"{own.stem}_attempt{attempt}"
        try:
            copy = _written(own.parent, name, own.suffix, data)
        except OSError:  # a folder that is only read from
            copy = _written(folder, name, own.suffix, data)
        diff = whole_diff(self.path, copy, document.text.content, repaired)
        repair = Repair(self.path, copy, changes, diff, written=True)
        keep(Path.cwd() / ".nanguard" / "configs", repair, data)
        return copy

    def read(self) -> Document:
        """Reads the file."""
        decoded = decode(self.path, read_bytes(self.path, CONFIG_LIMIT), python=False)
        return read_document(Text(self.path, decoded.content))


def learning_rate_in(path: str, dotted: str | None) -> float | None:
    """Returns the learning rate that a configuration sets; None if it cannot be told.

    Args:
        path: The file.
        dotted: The key, if it is known.
    """
    found = ConfigFile(path, {})
    try:
        if dotted is not None:
            number = found.number(dotted.lstrip("-+"))
            if number is not None:
                return number
        key = rate_key(path)
        return None if key is None else found.number(key)
    except (SourceError, OSError):
        return None


def rate_key(path: str) -> str | None:
    """Returns the key of the learning rate in a configuration; None if that cannot be told."""
    document = ConfigFile(path, {}).read()
    for run in read_project([document]):
        setting = run.stages[0].get("lr") if len(run.stages) == 1 else None
        if setting is not None and setting.number is not None:
            return setting.key
    roots = [root for root in document.roots if root.kind == "mapping"]
    leaves = [leaf for root in roots for leaf in Tree(root, document).read()[0]]
    named = [leaf for leaf in leaves if setting_for(leaf.key, leaf.sections) == "lr"]
    return ".".join(named[0].path) if len(named) == 1 else None


def node_at(document: Document, dotted: str) -> Node | None:
    """Returns the value of a key; None if there is no such key."""
    if len(document.roots) != 1:
        return None
    node: Node | None = document.roots[0]
    for name in dotted.split("."):
        node = node.get(name) if node is not None and node.kind == "mapping" else None
    return node


def _edit(node: Node, value: str, kind: str) -> Edit:
    number = number_of(value)
    if number is not None and math.isfinite(number):
        whole: Any = int(value) if value.lstrip("-").isdecimal() else number
        return replace_node(node, whole, kind)
    text = value if kind == "yaml" and _PLAIN.fullmatch(value) else json.dumps(value)
    return Edit(node.start, node.end, f" {text}" if node.start == node.end else text)


def _written(folder: Path, name: str, suffix: str, data: bytes) -> str:
    """Writes a new file; if there is one of that name, its own gets a number at its end."""
    for number in itertools.count(1):
        path = folder / f"{name}{'' if number == 1 else f'-{number}'}{suffix}"
        # It holds what the user's own file holds, secrets included.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with contextlib.suppress(FileExistsError):
            with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
                file.write(data)
            break
    return str(path)


def _names(word: str, path: str) -> bool:
    return word == path or word.endswith(f"={path}")


def _renamed(word: str, path: str, target: str) -> str:
    return word.removesuffix(path) + target if _names(word, path) else word
