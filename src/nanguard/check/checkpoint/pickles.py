"""An inert reader of pickles: opcodes become plain values, and nothing in the file is run.

Costs are bounded by the file's own size: every opcode does a constant amount of work, keys are not
hashed, nothing recurses, long strings stay in the file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from nanguard.check.checkpoint.blob import Blob, read
from nanguard.check.checkpoint.inert import (
    DamagedError,
    Global,
    Persistent,
    Span,
    TooLargeError,
    UnreadableError,
)
from nanguard.check.checkpoint.opcodes import OPCODES

WINDOW = 1 << 18
MAX_STEPS = 4_000_000
# Of lists, dictionaries, calls and remembered values together: what takes memory.
MAX_MADE = 2_000_000
LONGEST_TEXT = 1 << 24
MAX_TEXT = 1 << 26
MAX_NAMES = 20_000
MAX_LINE = 1 << 16
MAX_MEMO = 1 << 32

# Names that Python 2 wrote.
_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "cPickle": "pickle"}


@dataclass(slots=True)
class Pickled:
    """What a pickle holds.

    Attributes:
        value: The object, inert.
        end: The offset behind it.
        names: Every class and function that loading would look up, in order.
        outside: Every reference to something outside the pickle.
    """

    value: object
    end: int
    names: dict[str, Global] = field(default_factory=dict)
    outside: list[Persistent] = field(default_factory=list)


def read_pickle(blob: Blob, start: int = 0) -> Pickled:
    """Reads one pickle.

    Args:
        blob: Where it is.
        start: The offset at which it begins.

    Raises:
        DamagedError: It ends early, or is none.
        TooLargeError: It has more parts than is sensible.
    """
    return Reader(blob, start).run()


class Reader:
    """The state of reading one pickle."""

    def __init__(self, blob: Blob, start: int) -> None:
        self.blob = blob
        self.window = b""
        self.window_at = start
        self.at = start
        self.stack: list[object] = []
        self.marks: list[list[object]] = []
        self.memo: dict[int, object] = {}
        self.names: dict[str, Global] = {}
        self.outside: list[Persistent] = []
        self.text = 0
        self.made = 0

    def run(self) -> Pickled:
        """Follows the opcodes up to the end."""
        try:
            return self._follow()
        except UnreadableError as error:
            error.names = self.names
            raise
        except (KeyError, IndexError, ValueError, struct.error, OverflowError) as error:
            found = DamagedError(f"the pickle makes no sense at byte {self.at}")
            found.names = self.names
            raise found from error

    def _follow(self) -> Pickled:
        for _ in range(MAX_STEPS):
            code = self.take(1)
            if code == b".":
                return Pickled(self.stack.pop(), self.at, self.names, self.outside)
            OPCODES[code](self)
        raise TooLargeError(f"the pickle has more than {MAX_STEPS:,} parts")

    def take(self, size: int) -> bytes:
        """Returns the next bytes."""
        begin = self.at - self.window_at
        if begin + size > len(self.window):
            self.window = read(self.blob, self.at, max(WINDOW, size))
            self.window_at, begin = self.at, 0
            if len(self.window) < size:
                raise DamagedError(f"the pickle ends at byte {self.at + len(self.window)}")
        self.at += size
        return self.window[begin : begin + size]

    def line(self) -> str:
        """Returns the rest of a line, as the oldest protocol has them."""
        begin = self.at - self.window_at
        end = self.window.find(b"\n", begin)
        if end < 0:
            self.window, self.window_at, begin = read(self.blob, self.at, MAX_LINE), self.at, 0
            end = self.window.find(b"\n")
            if end < 0:
                raise DamagedError(f"a line of the pickle has no end at byte {self.at}")
        self.at += end - begin + 1
        return self.window[begin:end].decode("utf-8", "replace")

    def unsigned(self, size: int) -> int:
        """Returns the next bytes as a number."""
        return int.from_bytes(self.take(size), "little")

    def skipped(self, size: int, longest: int) -> bytes | Span:
        """Returns bytes, or where they are if there are many."""
        if size > self.blob.size - self.at:
            raise DamagedError(f"the pickle is cut off: {size:,} bytes at byte {self.at}")
        if size <= longest:
            return self.take(size)
        span = Span(self.at, size)
        self.at += size
        return span

    def push_text(self, size: int) -> None:
        """Puts a string on the stack."""
        found = self.skipped(size, LONGEST_TEXT)
        self.text += 0 if isinstance(found, Span) else size
        if self.text > MAX_TEXT:
            raise TooLargeError("the pickle holds more text than a checkpoint has any need for")
        self.push(found if isinstance(found, Span) else found.decode("utf-8", "surrogatepass"))

    def push(self, value: object) -> None:
        """Puts a value on the stack."""
        self.stack.append(value)

    def push_new(self, value: object) -> None:
        """Puts a value on the stack that takes memory of its own."""
        self.count()
        self.stack.append(value)

    def count(self) -> None:
        """Notes that something was made that takes memory."""
        self.made += 1
        if self.made > MAX_MADE:
            raise TooLargeError(f"the pickle holds more than {MAX_MADE:,} objects")

    def refer(self, key: object) -> None:
        """Puts a reference to something outside the pickle on the stack."""
        kind = key[0] if isinstance(key, tuple) and key else key
        # Torch refers to storages, by a number in files of old, and to the source of modules.
        if kind not in ("storage", "module", b"storage", b"module") and not isinstance(key, int):
            raise DamagedError(f"the pickle refers to {str(kind)[:40]!r}, which nobody knows")
        self.outside.append(Persistent(key))
        self.push(self.outside[-1])

    def marked(self) -> list[object]:
        """Returns what was put on the stack since the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def remember(self, index: int) -> None:
        """Keeps the topmost value for later."""
        if not 0 <= index < MAX_MEMO:
            raise DamagedError(f"the pickle makes no sense at byte {self.at}")
        self.count()
        self.memo[index] = self.stack[-1]

    def look_up(self, module: object, name: object) -> Global:
        """Returns the name of a class or function, and notes that it was asked for."""
        if len(self.names) > MAX_NAMES:
            raise TooLargeError(f"the pickle asks for more than {MAX_NAMES:,} classes")
        where, what = str(module)[:300], str(name)[:300]
        made = Global(_MODULES.get(where, where), what)
        return self.names.setdefault(made.full, made)
