"""What a pickle holds, as plain values: nothing in it is looked up, called or hashed."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """The name of a class or function that loading the pickle would look up."""

    module: str
    name: str

    @property
    def full(self) -> str:
        """The name with its module."""
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class PickleDict:
    """A dictionary as its pairs; keys are never hashed, since a file chooses them."""

    pairs: list[tuple[object, object]] = field(default_factory=list)

    def get(self, key: str) -> object:
        """Returns the last value of a key; None where there is none."""
        for name, value in reversed(self.pairs):
            if name == key:
                return value
        return None


@dataclass(slots=True, eq=False)
class Call:
    """What loading would make by calling something.

    Attributes:
        function: What would be called.
        args: With what.
        state: What the result would be given afterwards.
        items: What would be appended to it, if anything.
        pairs: What would be set in it, if anything.
    """

    function: object
    args: object
    state: object = None
    items: list[object] | None = None
    pairs: list[tuple[object, object]] | None = None

    @property
    def full(self) -> str:
        """The full name of what would be called; empty where that is not a name."""
        return self.function.full if isinstance(self.function, Global) else ""


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """Something outside the pickle that it refers to: the storage of a tensor."""

    key: object


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Bytes or text too long to keep: where they are in the file.

    Attributes:
        offset: Where they begin.
        size: How many bytes.
    """

    offset: int
    size: int


@dataclass(frozen=True, slots=True, eq=False)
class LongLine:
    """A line of text too long to keep; what it stands for is escaped, and is not worked out.

    Attributes:
        size: How many bytes it has.
    """

    size: int
