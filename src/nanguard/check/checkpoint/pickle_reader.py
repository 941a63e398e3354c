"""An inert reader of pickles: opcodes become plain values, and nothing in the file is run.

Costs are bounded by the file's own size: every opcode does a constant amount of work, keys are not
hashed, nothing recurses, long strings stay in the file.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.byte_ranges import (
    Blob,
    DamagedError,
    TooLargeError,
    UnreadableError,
    read,
)
from nanguard.check.checkpoint.pickled_calls import Makeable
from nanguard.check.checkpoint.tensors import (
    Call,
    Global,
    LongLine,
    Persistent,
    PickleDict,
    Span,
)

if TYPE_CHECKING:
    from collections.abc import Callable


WINDOW = 1 << 18
MAX_STEPS = 4_000_000
# Of lists, dictionaries, calls and remembered values together: what takes memory.
MAX_MADE = 2_000_000
LONGEST_TEXT = 1 << 24
MAX_TEXT = 1 << 26
MAX_NAMES = 20_000
MAX_PICKLE_LINE = 1 << 16
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
        calls: Everything that loading would make by calling something.
        beyond: The first instruction that torch does not follow with ``weights_only=True``.
    """

    value: object
    end: int
    names: dict[str, Global] = field(default_factory=dict)
    outside: list[Persistent] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    beyond: bytes | None = None


def read_pickle(blob: Blob, start: int = 0) -> Pickled:
    """Reads one pickle.

    Args:
        blob: Where it is.
        start: The offset at which it begins.

    Raises:
        DamagedError: It ends early, or is none.
        TooLargeError: It has more parts than is sensible.
    """
    return PickleReader(blob, start).run()


class PickleReader:
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
        self.calls: list[Call] = []
        self.opcodes = OPCODES
        self.beyond: bytes | None = None
        self.makeable = Makeable()
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
                made = (self.names, self.outside, self.calls, self.beyond)
                return Pickled(self.stack.pop(), self.at, *made)
            if code not in _OF_TORCH and self.beyond is None:
                self.beyond = code
            self.opcodes[code](self)
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
        found = self.long_line()
        if isinstance(found, LongLine):
            raise TooLargeError(f"a name in the pickle has {found.size:,} bytes")
        return found.decode("utf-8", "replace")

    def long_line(self) -> bytes | LongLine:
        """Returns the rest of a line, or how long it is: a whole array may be one."""
        begin = self.at - self.window_at
        end = self.window.find(b"\n", begin)
        if end < 0:
            end = self._end_of_line()
            if end - self.at > MAX_PICKLE_LINE:
                found = LongLine(end - self.at)
                self.at = end + 1
                return found
            self.window = read(self.blob, self.at, max(WINDOW, end - self.at + 1))
            self.window_at, begin, end = self.at, 0, end - self.at
        self.at += end - begin + 1
        return self.window[begin:end]

    def _end_of_line(self) -> int:
        """Returns where the line ends that begins here; each byte is looked at once."""
        at = self.at
        while at < self.blob.size:
            piece = read(self.blob, at, WINDOW)
            found = piece.find(b"\n")
            if found >= 0:
                return at + found
            if not piece:
                break
            at += len(piece)
        raise DamagedError(f"a line of the pickle has no end at byte {self.at}")

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


# Bytes longer than this stay in the file.
LONGEST_BYTES = 1 << 10


def _skip(r: PickleReader, size: int) -> None:
    r.take(size)


def _mark(r: PickleReader) -> None:
    r.count()
    r.marks.append(r.stack)
    r.stack = []


def _pop(r: PickleReader) -> None:
    if r.stack:
        r.stack.pop()
    else:
        r.marked()


def _extend(r: PickleReader, items: list[object]) -> None:
    target = r.stack[-1]
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, Call) and r.makeable.with_items(target):
        target.items = target.items or []
        target.items.extend(items)
    else:
        raise _senseless(r)


def _add(r: PickleReader, items: list[object]) -> None:
    target = r.stack[-1]
    if not (isinstance(target, Call) and r.makeable.with_elements(target, items)):
        raise _senseless(r)
    target.items = target.items or []
    target.items.extend(items)


def _set(r: PickleReader, items: list[object]) -> None:
    target = r.stack[-1]
    if not isinstance(target, (PickleDict, Call)) or not r.makeable.with_pairs(target):
        raise _senseless(r)
    target.pairs = target.pairs or []
    target.pairs.extend(_pairs(r, items))


def _pairs(r: PickleReader, items: list[object]) -> list[tuple[object, object]]:
    """Returns keys with their values; no dictionary has half a pair, or a list for a key."""
    if len(items) % 2 or not all(map(r.makeable.as_key, items[::2])):
        raise _senseless(r)
    return list(zip(items[::2], items[1::2], strict=True))


def _senseless(r: PickleReader) -> DamagedError:
    """Returns the error for what every reader of pickles fails on."""
    return DamagedError(f"the pickle makes no sense at byte {r.at}")


def _set_one(r: PickleReader) -> None:
    value = r.stack.pop()
    _set(r, [r.stack.pop(), value])


def _build(r: PickleReader) -> None:
    state, target = r.stack.pop(), r.stack[-1]
    if not r.makeable.with_state(target, state):
        raise _senseless(r)
    if isinstance(target, Call):
        target.state = state


def _call(r: PickleReader, function: object, args: object, *, bare: bool = False) -> None:
    if not r.makeable.by_call(function, args, bare=bare):
        name = function.full if isinstance(function, (Global, Call)) else ""
        what = f"{name} cannot be made of what the pickle says" if name else "what cannot be called"
        raise DamagedError(f"{what} at byte {r.at}")
    r.calls.append(Call(function, args))
    r.push_new(r.calls[-1])


def _made_of_python(r: PickleReader, name: str, *args: object) -> None:
    """Puts an object of Python's own on the stack that has an instruction to itself."""
    r.push_new(Call(Global("builtins", name), args))


def _reduce(r: PickleReader) -> None:
    args = r.stack.pop()
    _call(r, r.stack.pop(), args)


def _new(r: PickleReader) -> None:
    args = r.stack.pop()
    _call(r, r.stack.pop(), args, bare=True)


def _new_with_names(r: PickleReader) -> None:
    named, args = r.stack.pop(), r.stack.pop()
    _call(r, r.stack.pop(), (args, named), bare=True)


def _instance(r: PickleReader) -> None:
    module, name = r.line(), r.line()
    _call(r, r.look_up(module, name), tuple(r.marked()))


def _object(r: PickleReader) -> None:
    items = r.marked()
    _call(r, items[0], tuple(items[1:]))


def _global(r: PickleReader) -> None:
    module = r.line()
    r.push(r.look_up(module, r.line()))


def _stack_global(r: PickleReader) -> None:
    name = r.stack.pop()
    r.push(r.look_up(r.stack.pop(), name))


def _table(r: PickleReader) -> None:
    r.push_new(PickleDict(_pairs(r, r.marked())))


def _tuple_of(r: PickleReader, size: int) -> None:
    if len(r.stack) < size:
        raise _senseless(r)
    items = tuple(r.stack[-size:])
    del r.stack[-size:]
    _push_tuple(r, items)


def _push_tuple(r: PickleReader, items: tuple[object, ...]) -> None:
    r.makeable.note_tuple(items)
    r.push_new(items)


def _integer_line(r: PickleReader) -> None:
    text = r.line().rstrip("L")
    r.push({"00": False, "01": True}[text] if text in ("00", "01") else int(text))


def _text_line(r: PickleReader) -> None:
    found = r.long_line()
    r.push(found if isinstance(found, LongLine) else found.decode("raw-unicode-escape"))


def _quoted_line(r: PickleReader) -> None:
    found = r.long_line()
    text = found if isinstance(found, LongLine) else found.decode("utf-8", "replace")
    r.push(text.strip("'\"") if isinstance(text, str) else text)


def _long(r: PickleReader, size: int) -> None:
    data = r.skipped(size, LONGEST_BYTES)
    r.push(data if isinstance(data, Span) else int.from_bytes(data, "little", signed=True))


def _signed(r: PickleReader) -> None:
    r.push(int.from_bytes(r.take(4), "little", signed=True))


def _double(r: PickleReader) -> None:
    r.push(struct.unpack(">d", r.take(8))[0])


def _extension(r: PickleReader, size: int) -> None:
    r.push(r.look_up("copyreg", f"extension {r.unsigned(size)}"))


def _bytes_of(width: int) -> Callable[[PickleReader], None]:
    return lambda r: r.push(r.skipped(r.unsigned(width), LONGEST_BYTES))


def _old_text(r: PickleReader) -> None:
    """Puts bytes on the stack that Python 2 took for text, and torch, by default, for UTF-8."""
    found = r.skipped(r.unsigned(1), LONGEST_BYTES)
    if isinstance(found, bytes) and found.decode("utf-8", "ignore").encode() != found:
        r.beyond = r.beyond or b"U"
    r.push(found)


def _text_of(width: int) -> Callable[[PickleReader], None]:
    return lambda r: r.push_text(r.unsigned(width))


def _buffer(r: PickleReader) -> None:
    raise DamagedError(f"the pickle refers to memory outside of the file at byte {r.at}")


# The opcodes that came with a protocol; no writer uses them in a pickle of an earlier one.
_SINCE = {3: b"BC", 4: b"\x8c\x8d\x8e\x8f\x90\x91\x92\x93\x94\x95", 5: b"\x96\x97\x98"}


def _protocol(r: PickleReader) -> None:
    said = r.unsigned(1)
    later = b"".join(codes for since, codes in _SINCE.items() if since > said)
    r.opcodes = {code: what for code, what in OPCODES.items() if code not in later}


def _constant(value: object) -> Callable[[PickleReader], None]:
    return lambda r: r.push(value)


# What torch follows with ``weights_only=True``: what it writes itself, in protocol 2.
_OF_TORCH = frozenset(
    bytes([code]) for code in b"\x80(N\x88\x89JKM\x8aGUX]})\x8ft\x85\x86\x87aesucR\x81bqrhjQ"
)
OPCODES: dict[bytes, Callable[[PickleReader], object]] = {
    b"\x80": _protocol,
    b"\x95": lambda r: _skip(r, 8),
    b"(": _mark,
    b"0": _pop,
    b"1": PickleReader.marked,
    b"N": _constant(None),
    b"\x88": _constant(value=True),
    b"\x89": _constant(value=False),
    b"I": _integer_line,
    b"L": _integer_line,
    b"J": _signed,
    b"K": lambda r: r.push(r.unsigned(1)),
    b"M": lambda r: r.push(r.unsigned(2)),
    b"\x8a": lambda r: _long(r, r.unsigned(1)),
    b"\x8b": lambda r: _long(r, r.unsigned(4)),
    b"F": lambda r: r.push(float(r.line())),
    b"G": _double,
    b"S": _quoted_line,
    b"V": _text_line,
    b"T": _bytes_of(4),
    b"U": _old_text,
    b"B": _bytes_of(4),
    b"C": _bytes_of(1),
    b"\x8e": _bytes_of(8),
    b"\x96": _bytes_of(8),
    b"X": _text_of(4),
    b"\x8c": _text_of(1),
    b"\x8d": _text_of(8),
    b"\x97": _buffer,
    b"\x98": _buffer,
    b"]": lambda r: r.push_new([]),
    b"}": lambda r: r.push_new(PickleDict()),
    b")": _constant(()),
    b"\x8f": lambda r: _made_of_python(r, "set"),
    b"l": lambda r: r.push_new(r.marked()),
    b"t": lambda r: _push_tuple(r, tuple(r.marked())),
    b"\x91": lambda r: _made_of_python(r, "frozenset", r.marked()),
    b"d": _table,
    b"\x85": lambda r: _tuple_of(r, 1),
    b"\x86": lambda r: _tuple_of(r, 2),
    b"\x87": lambda r: _tuple_of(r, 3),
    b"a": lambda r: _extend(r, [r.stack.pop()]),
    b"e": lambda r: _extend(r, r.marked()),
    b"\x90": lambda r: _add(r, r.marked()),
    b"s": _set_one,
    b"u": lambda r: _set(r, r.marked()),
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _new,
    b"\x92": _new_with_names,
    b"i": _instance,
    b"o": _object,
    b"b": _build,
    b"p": lambda r: r.remember(int(r.line())),
    b"q": lambda r: r.remember(r.unsigned(1)),
    b"r": lambda r: r.remember(r.unsigned(4)),
    b"\x94": lambda r: r.remember(len(r.memo)),
    b"g": lambda r: r.push(r.memo[int(r.line())]),
    b"h": lambda r: r.push(r.memo[r.unsigned(1)]),
    b"j": lambda r: r.push(r.memo[r.unsigned(4)]),
    b"P": lambda r: r.refer(r.line()),
    b"Q": lambda r: r.refer(r.stack.pop()),
    b"\x82": lambda r: _extension(r, 1),
    b"\x83": lambda r: _extension(r, 2),
    b"\x84": lambda r: _extension(r, 4),
}
