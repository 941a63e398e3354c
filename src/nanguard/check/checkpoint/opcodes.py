"""What each opcode of a pickle does to the stack of an inert reader."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.inert import Call, DamagedError, Global, Span, Table

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanguard.check.checkpoint.pickles import Reader

# Bytes longer than this stay in the file.
LONGEST_BYTES = 1 << 10


def _skip(r: Reader, size: int) -> None:
    r.take(size)


def _pop_marked(r: Reader) -> None:
    r.marked()


def _mark(r: Reader) -> None:
    r.count()
    r.marks.append(r.stack)
    r.stack = []


def _pop(r: Reader) -> None:
    if r.stack:
        r.stack.pop()
    else:
        r.marked()


def _extend(r: Reader, items: list[object]) -> None:
    target = r.stack[-1]
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, Call):
        target.items = target.items or []
        target.items.extend(items)
    else:
        raise _senseless(r)


def _set(r: Reader, items: list[object]) -> None:
    target = r.stack[-1]
    if not isinstance(target, (Table, Call)):
        raise _senseless(r)
    target.pairs = target.pairs or []
    target.pairs.extend(_pairs(r, items))


def _pairs(r: Reader, items: list[object]) -> list[tuple[object, object]]:
    """Returns keys with their values; no dictionary has half a pair, or a list for a key."""
    if len(items) % 2 or any(isinstance(key, (list, Table)) for key in items[::2]):
        raise _senseless(r)
    return list(zip(items[::2], items[1::2], strict=True))


def _senseless(r: Reader) -> DamagedError:
    """Returns the error for what every reader of pickles fails on."""
    return DamagedError(f"the pickle makes no sense at byte {r.at}")


def _set_one(r: Reader) -> None:
    value = r.stack.pop()
    _set(r, [r.stack.pop(), value])


def _build(r: Reader) -> None:
    state, target = r.stack.pop(), r.stack[-1]
    if isinstance(target, Call):
        target.state = state
    elif not isinstance(target, Global):
        raise _senseless(r)


def _call(r: Reader, function: object, args: object) -> None:
    if not isinstance(function, (Global, Call)) or not isinstance(args, (tuple, Call)):
        raise _senseless(r)
    # The class of a storage stands for the type of its numbers, and is never called.
    if function.full.startswith("torch.") and function.full.endswith("Storage"):
        raise _senseless(r)
    r.push_new(Call(function, args))


def _reduce(r: Reader) -> None:
    args = r.stack.pop()
    _call(r, r.stack.pop(), args)


def _new_with_names(r: Reader) -> None:
    named, args = r.stack.pop(), r.stack.pop()
    _call(r, r.stack.pop(), (args, named))


def _instance(r: Reader) -> None:
    module, name = r.line(), r.line()
    _call(r, r.look_up(module, name), tuple(r.marked()))


def _object(r: Reader) -> None:
    items = r.marked()
    _call(r, items[0], tuple(items[1:]))


def _global(r: Reader) -> None:
    module = r.line()
    r.push(r.look_up(module, r.line()))


def _stack_global(r: Reader) -> None:
    name = r.stack.pop()
    r.push(r.look_up(r.stack.pop(), name))


def _table(r: Reader) -> None:
    r.push_new(Table(_pairs(r, r.marked())))


def _tuple_of(r: Reader, size: int) -> None:
    if len(r.stack) < size:
        raise _senseless(r)
    items = tuple(r.stack[-size:])
    del r.stack[-size:]
    r.push_new(items)


def _integer_line(r: Reader) -> None:
    text = r.line().rstrip("L")
    r.push({"00": False, "01": True}[text] if text in ("00", "01") else int(text))


def _quoted_line(r: Reader) -> None:
    r.push(r.line().strip("'\""))


def _long(r: Reader, size: int) -> None:
    data = r.skipped(size, LONGEST_BYTES)
    r.push(data if isinstance(data, Span) else int.from_bytes(data, "little", signed=True))


def _signed(r: Reader) -> None:
    r.push(int.from_bytes(r.take(4), "little", signed=True))


def _double(r: Reader) -> None:
    r.push(struct.unpack(">d", r.take(8))[0])


def _extension(r: Reader, size: int) -> None:
    r.push(r.look_up("copyreg", f"extension {r.unsigned(size)}"))


def _bytes_of(width: int) -> Callable[[Reader], None]:
    return lambda r: r.push(r.skipped(r.unsigned(width), LONGEST_BYTES))


def _text_of(width: int) -> Callable[[Reader], None]:
    return lambda r: r.push_text(r.unsigned(width))


def _constant(value: object) -> Callable[[Reader], None]:
    return lambda r: r.push(value)


OPCODES: dict[bytes, Callable[[Reader], None]] = {
    b"\x80": lambda r: _skip(r, 1),
    b"\x95": lambda r: _skip(r, 8),
    b"(": _mark,
    b"0": _pop,
    b"1": _pop_marked,
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
    b"V": lambda r: r.push(r.line()),
    b"T": _bytes_of(4),
    b"U": _bytes_of(1),
    b"B": _bytes_of(4),
    b"C": _bytes_of(1),
    b"\x8e": _bytes_of(8),
    b"\x96": _bytes_of(8),
    b"X": _text_of(4),
    b"\x8c": _text_of(1),
    b"\x8d": _text_of(8),
    b"\x97": _constant(None),
    b"\x98": lambda r: None,
    b"]": lambda r: r.push_new([]),
    b"}": lambda r: r.push_new(Table()),
    b")": _constant(()),
    b"\x8f": lambda r: r.push_new([]),
    b"l": lambda r: r.push_new(r.marked()),
    b"t": lambda r: r.push_new(tuple(r.marked())),
    b"\x91": lambda r: r.push_new(r.marked()),
    b"d": _table,
    b"\x85": lambda r: _tuple_of(r, 1),
    b"\x86": lambda r: _tuple_of(r, 2),
    b"\x87": lambda r: _tuple_of(r, 3),
    b"a": lambda r: _extend(r, [r.stack.pop()]),
    b"e": lambda r: _extend(r, r.marked()),
    b"\x90": lambda r: _extend(r, r.marked()),
    b"s": _set_one,
    b"u": lambda r: _set(r, r.marked()),
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _reduce,
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
