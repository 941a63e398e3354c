"""What the user asks of a recovery, read and found possible before anything is started."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.check.config.document import ConfigTree, read_document
from nanguard.check.config.keys import setting_for
from nanguard.check.config.node import number_text, replace_node
from nanguard.check.config.run_config import number_of, read_project
from nanguard.check.fixing import keep
from nanguard.check.outcome import ConfigChange, FileRepair
from nanguard.errors import SourceError, UsageError
from nanguard.findings import Edit, Fix, Kind, Severity
from nanguard.run.recovering.audit import counted
from nanguard.run.recovering.ladder import Means
from nanguard.run.recovering.templates import Template, filled_in, placeholders
from nanguard.source.edits import apply, whole_diff
from nanguard.source.text import CONFIG_LIMIT, Text, decode, read_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from nanguard.check.config.document import Document
    from nanguard.check.config.node import Node
    from nanguard.run.recovering.audit import Judged

# For each purpose, the placeholders of which its template needs one.
PURPOSES = {
    "resume": ("checkpoint", "step"),
    "lr": ("lr",),
    "skip": ("skip",),
    "seed": ("seed",),
}
_SHELLS = ("sh", "bash", "zsh", "dash", "ksh", "fish")


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartOptions:
    """The options of ``nanguard run --recover``.

    Attributes:
        checkpoints: A folder or pattern; None to find them.
        arguments: Templates of arguments, by purpose.
        config: A configuration file of the command's; None if there is none to rewrite.
        keys: Keys of that file, by purpose.
        lr: The learning rate of the first attempt; None to read it from the command.
        lr_cut: The factor of one cut.
        max_restarts: How many restarts there may be.
        backoff: Seconds before the first restart; each further one waits twice as long.
    """

    checkpoints: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    config: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    lr: float | None = None
    lr_cut: float = 0.5
    max_restarts: int = 3
    backoff: float = 1.0


@dataclass(frozen=True, slots=True)
class Changes:
    """What an attempt does differently.

    Attributes:
        attempt: Its number, counted from 1.
        checkpoint: What it resumes from; empty for the beginning.
        step: The step of that checkpoint.
        lr: The learning rate; None to leave it.
        skip: How many steps of data it passes over; 0 for none.
        seed: The seed; None to leave it.
    """

    attempt: int
    checkpoint: str = ""
    step: int | None = None
    lr: float | None = None
    skip: int = 0
    seed: int | None = None

    def values(self) -> dict[str, str]:
        """Returns what placeholders stand for."""
        return {
            "attempt": str(self.attempt),
            "checkpoint": self.checkpoint,
            "step": "" if self.step is None else str(self.step),
            "lr": "" if self.lr is None else number_text(self.lr),
            "skip": str(self.skip),
            "seed": "" if self.seed is None else str(self.seed),
        }

    def purposes(self) -> set[str]:
        """Returns what there is to pass on."""
        wanted = {"resume"} if self.checkpoint else set()
        wanted |= {"lr"} if self.lr is not None else set()
        wanted |= {"skip"} if self.skip else set()
        return wanted | ({"seed"} if self.seed is not None else set())

    def in_words(self) -> str:
        """Returns the changes as a part of a sentence."""
        from_where = f"from {self.checkpoint}" if self.checkpoint else "as at first"
        if self.checkpoint and self.step is not None:
            from_where += f" (step {self.step})"
        parts = [from_where]
        if self.lr is not None:
            parts.append(f"learning rate {number_text(self.lr)}")
        if self.skip:
            parts.append(f"{counted(self.skip, 'step')} of data skipped")
        if self.seed is not None:
            parts.append(f"seed {self.seed}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Teller:
    """The ways to tell a command what to do differently.

    Attributes:
        command: The command, as the user wrote it.
        templates: Arguments, by purpose.
        config: The file that is rewritten; None for none.
        lr: The learning rate of the first attempt; None if it cannot be changed.
        seed: The seed of the first attempt.
    """

    command: tuple[str, ...]
    templates: Mapping[str, Template]
    config: ConfigFile | None
    lr: float | None
    seed: int

    @classmethod
    def of(cls, command: Sequence[str], restart: RestartOptions) -> Teller:
        """Finds the ways.

        Raises:
            UsageError: One cannot work as written.
        """
        templates = {
            purpose: Template.of(text, f"--{purpose}-arg", PURPOSES[purpose])
            for purpose, text in restart.arguments.items()
        }
        config = _config(command, restart)
        given = {*templates, *({} if config is None else config.keys)}
        if "resume" not in given:
            raise UsageError(
                "nothing says how to pass the command the checkpoint to resume from.",
                where="nanguard run --recover",
                do='Give, for example, --resume-arg "--resume {checkpoint}", or --config FILE '
                "--resume-key KEY.",
            )
        if templates and Path(command[0]).name in _SHELLS and "-c" in command[1:3]:
            raise UsageError(
                "arguments cannot be put into the text behind -c.",
                where=f"nanguard run --recover -- {command[0]} -c ...",
                do="Write the command itself behind the two dashes, or put the text into a script.",
            )
        lr = (
            _starting_rate(command, restart, templates.get("lr"), config) if "lr" in given else None
        )
        return cls(tuple(command), templates, config, lr, _seed(command, templates, config))

    @property
    def means(self) -> Means:
        """What can be changed from attempt to attempt."""
        given = {*self.templates, *(() if self.config is None else self.config.keys)}
        return Means(lr="lr" in given, skip="skip" in given, seed="seed" in given)

    def resumes_from(self) -> str | None:
        """Returns the checkpoint that the command itself resumes from, if it says one."""
        template = self.templates.get("resume")
        found = None if template is None else template.value_in(self.command, "checkpoint")
        return found if found and Path(found).exists() else None

    def can_name(self, checkpoint: Judged | None) -> bool:
        """Returns whether a checkpoint can be passed on; one of no known step has no ``{step}``."""
        if checkpoint is None or checkpoint.step is not None:
            return True
        template, config = self.templates.get("resume"), self.config
        words = [word for group in template.groups for word in group.words] if template else []
        if config is not None and "resume" in config.keys:
            words.append(config.keys["resume"].template)
        return not any("{step}" in word for word in words)

    def command_for(self, changes: Changes, why: str, folder: Path) -> tuple[list[str], str | None]:
        """Returns the command of an attempt, and the configuration that was written for it.

        Args:
            changes: What it does differently.
            why: What the attempt is for.
            folder: Where a configuration goes that cannot stand beside its original.

        Raises:
            SourceError: The configuration, or a key of it, is not there any more.
            OSError: It cannot be written.
        """
        values, purposes = changes.values(), changes.purposes()
        words, copy = list(self.command), None
        if self.config is not None and purposes & set(self.config.keys):
            copy = self.config.write(values, purposes, why, folder)
            words = self.config.into(words, copy)
        for purpose, template in self.templates.items():
            if purpose in purposes:
                words = template.into(words, values)
        return words, copy


def _config(command: Sequence[str], restart: RestartOptions) -> ConfigFile | None:
    if restart.config is None:
        if restart.keys:
            purpose = next(iter(restart.keys))
            raise UsageError(
                f"--{purpose}-key names a key, and no file it stands in.",
                where="nanguard run --recover",
                do="Give the file of the command, too: --config FILE",
            )
        return None
    keys = {
        purpose: Key.of(text, f"--{purpose}-key", PURPOSES[purpose][0])
        for purpose, text in restart.keys.items()
    }
    if "lr" not in keys and "lr" not in restart.arguments:
        found = rate_key(restart.config)
        if found is not None:
            keys["lr"] = Key.of(found, "--lr-key", "lr")
    config = ConfigFile(restart.config, keys)
    config.check(command)
    return config


def _starting_rate(
    command: Sequence[str],
    restart: RestartOptions,
    template: Template | None,
    config: ConfigFile | None,
) -> float:
    """Returns the learning rate of the first attempt.

    Raises:
        UsageError: Nothing says what it is.
    """
    looked: list[str] = []
    found = restart.lr
    if found is None and template is not None:
        looked.append("the command")
        found = number_of(template.value_in(command, "lr"))
    if found is None and config is not None and "lr" in config.keys:
        looked.append(f"{config.path} at {config.keys['lr'].dotted}")
        found = config.number(config.keys["lr"].dotted)
    key = None if template is None else template.key_of("lr")
    for path in _configs_in(command) if template is not None else ():
        if found is None:
            looked.append(path)
            found = learning_rate_in(path, key)
    if found is None or not (math.isfinite(found) and found > 0):
        raise UsageError(
            f"the learning rate of the command is not known (looked at: {', '.join(looked)}).",
            where="nanguard run --recover",
            do="Say with which one it begins, for example: --lr 1e-4",
        )
    return found


def _configs_in(command: Sequence[str]) -> list[str]:
    """Returns the configuration files that a command names."""
    words = [word.partition("=")[2] if "=" in word else word for word in command[1:]]
    return [word for word in words if word.endswith(ENDINGS) and os.path.isfile(word)]  # noqa: PTH113 - as written


def _seed(
    command: Sequence[str], templates: Mapping[str, Template], config: ConfigFile | None
) -> int:
    template = templates.get("seed")
    found = None if template is None else number_of(template.value_in(command, "seed"))
    if found is None and config is not None and "seed" in config.keys:
        found = config.number(config.keys["seed"].dotted)
    return int(found) if found is not None and math.isfinite(found) else 0


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
        """Looks whether this file could pass changes on to an attempt, before there is one.

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
            changes.append(ConfigChange(finding, Fix(f"{key.dotted}: {value}")))
        repaired = apply(document.text.content, edits)
        return self._save(document, repaired, tuple(changes), values["attempt"], folder)

    def into(self, command: Sequence[str], copy: str) -> list[str]:
        """Returns a command that reads a copy of the file."""
        return [_renamed(word, self.path, copy) for word in command]

    def _save(
        self,
        document: Document,
        repaired: str,
        changes: tuple[ConfigChange, ...],
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
        repair = FileRepair(self.path, copy, changes, diff, written=True)
        keep(Path.cwd() / ".nanguard" / "configs", repair, data)
        return copy

    def read(self) -> Document:
        """Reads the file."""
        decoded = decode(self.path, read_bytes(self.path, CONFIG_LIMIT), python=False)
        return read_document(Text(self.path, decoded.content))


def learning_rate_in(path: str, dotted: str | None) -> float | None:
    """Returns the learning rate that a configuration sets; None if that is not clear.

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
    """Returns the key of the learning rate in a configuration; None if that is not clear."""
    document = ConfigFile(path, {}).read()
    for run in read_project([document]):
        setting = run.stages[0].get("lr") if len(run.stages) == 1 else None
        if setting is not None and setting.number is not None:
            return setting.key
    roots = [root for root in document.roots if root.kind == "mapping"]
    leaves = [leaf for root in roots for leaf in ConfigTree(root, document).read()[0]]
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
