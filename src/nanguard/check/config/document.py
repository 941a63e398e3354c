"""A configuration file as it was written, and whether it is about training."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal

from nanguard.check.config.node import MAX_SIZE, Node
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanguard.source.text import Text

Format = Literal["yaml", "json", "toml"]
_ENDINGS: dict[str, Format] = {
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "json",
    ".jsonc": "json",
    ".toml": "toml",
}


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A configuration file.

    Attributes:
        text: What it holds.
        format: The language it is written in.
        roots: The root of each document in it; more than one only in YAML.
    """

    text: Text
    format: Format
    roots: tuple[Node, ...]

    @property
    def path(self) -> str:
        """The file, as the user named it."""
        return self.text.path


def read_document(text: Text) -> Document:
    """Reads a configuration file.

    The language is told by the ending of the name, and by the text where the ending says nothing.

    Raises:
        SourceError: The text is broken, too large, or nested too deep.
    """
    if len(text.content) > MAX_SIZE:
        raise SourceError(
            f"the file has {len(text.content)} characters; configurations have at most {MAX_SIZE}",
            where=text.path,
            do="Leave it out: it is not a training configuration.",
        )
    kind = _ENDINGS.get(PurePath(text.path).suffix.lower()) or _by_content(text.content)
    return Document(text, kind, tuple(_reader(kind)(text)))


def looks_like_training(document: Document) -> bool:
    """Returns whether a file configures a training run, judged by what it holds."""
    from nanguard.check.config.leaves import Tree
    from nanguard.check.config.recognition import facts_of, is_training

    trees = (Tree(root, document) for root in document.roots if root.kind == "mapping")
    return any(is_training(facts_of(*tree.read())) for tree in trees)


def _by_content(content: str) -> Format:
    return "json" if content.lstrip("\ufeff \t\r\n")[:1] in ("{", "[") else "yaml"


def _reader(kind: Format) -> Callable[[Text], list[Node]]:
    if kind == "json":
        from nanguard.check.config.json_reader import read_json

        return read_json
    if kind == "toml":
        from nanguard.check.config.toml_reader import read_toml

        return read_toml
    from nanguard.check.config.yaml_reader import read_yaml

    return read_yaml
