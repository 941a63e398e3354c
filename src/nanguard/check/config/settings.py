"""One setting of a run: its value, and where it stands."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanguard.check.config.document import Document
    from nanguard.check.config.node import Entry, Node

# Digits are read in one way only: "\d+\.?\d*" would try every place to cut a long number in two.
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_SCIENTIFIC = re.compile(r"[-+]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)[eE][-+]?\d+")
NUMBERS = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?")
_ON = frozenset(("true", "yes", "on", "1", "enabled", "enable"))
_OFF = frozenset(("false", "no", "off", "0", "none", "disabled", "null", "never"))


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """One setting of a run.

    Attributes:
        name: What the setting is called in every family.
        key: Its key in the file, dotted.
        sections: The names of the sections around it in normal form, outermost first.
        document: The file it stands in.
        entry: Its key and value as they are written.
        node: The value that counts: where the entry refers to another place, what stands there.
        parent: The mapping it is an entry of.
        home: The file the value that counts stands in.
    """

    name: str
    key: str
    sections: tuple[str, ...]
    document: Document
    entry: Entry
    node: Node
    parent: Node
    home: Document

    @property
    def path(self) -> str:
        """The file."""
        return self.document.path

    @property
    def line(self) -> int:
        """The line of the key, counted from 1."""
        return self.entry.line

    @property
    def column(self) -> int:
        """The column of the key, counted from 1."""
        return self.document.text.position(self.entry.start)[1]

    @property
    def span(self) -> tuple[int, int]:
        """The offsets of the value that counts."""
        return self.node.start, self.node.end

    @property
    def value(self) -> Any:
        """What the value means to the program that reads the file; a list for a sequence."""
        if self.node.kind == "sequence":
            return [item.value for item in self.node.items]
        return self.node.value if self.node.kind == "scalar" else None

    @property
    def written(self) -> str:
        """The value as it is written."""
        return self.node.raw if self.node.kind == "scalar" else str(self.value)

    @property
    def text(self) -> str:
        """The value as lower-case text; empty for what is none."""
        value = self.value
        return value.strip().lower() if isinstance(value, str) else ""

    @property
    def read_as_text(self) -> bool:
        """Whether the value is written as a number that YAML 1.1 reads as text."""
        return reads_as_text(self.node)

    @property
    def number(self) -> float | None:
        """The value as a number, also where it is text or a list of one; None if it is none."""
        value = self.value
        return number_of(value[0] if isinstance(value, list) and len(value) == 1 else value)

    @property
    def numbers(self) -> list[float]:
        """The numbers of a list, or of a text such as ``(0.9, 0.95)``."""
        value = self.value
        if isinstance(value, list):
            found = [number_of(item) for item in value]
            return [item for item in found if item is not None]
        if isinstance(value, str):
            return [float(item) for item in NUMBERS.findall(value)]
        return []

    @property
    def truth(self) -> bool | None:
        """The value as yes or no; None if it is neither."""
        value = self.value
        if isinstance(value, bool):
            return value
        if isinstance(value, (int, float)):
            return bool(value) if value in (0, 1) else None
        text = self.text
        return True if text in _ON else False if text in _OFF and text else None

    @property
    def is_null(self) -> bool:
        """Whether the value is left empty or null."""
        value = self.value
        return value is None or (
            isinstance(value, str) and value.strip().lower() in ("none", "null")
        )


def number_of(value: Any) -> float | None:
    """Returns a value as a number, also where it is written as text; None if it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in ("inf", "+inf", "infinity", ".inf"):
            return math.inf
        if _NUMBER.fullmatch(text):
            return float(text.replace("_", ""))
    return None


def reads_as_text(node: Node) -> bool:
    """Returns whether a YAML scalar is written as a number that YAML 1.1 reads as text."""
    return (
        node.kind == "scalar"
        and node.style == "plain"
        and isinstance(node.value, str)
        and node.tag is None
        and _SCIENTIFIC.fullmatch(node.raw.strip()) is not None
    )
