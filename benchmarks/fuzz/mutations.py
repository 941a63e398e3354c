"""Changes files at random, as bytes, as text, and as what they are: JSON, archives, safetensors.

Everything is drawn from one ``random.Random``, so that an input is known by its seed.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickletools
import re
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

from nanguard.check.log.binary_logs import masked_crc

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    Way = Callable[[bytes, Sequence[bytes], random.Random], bytes]

# No input is made larger than this; what is slow for its size shows well below.
LARGEST = 256 << 10
_NUMBERS = [
    "nan", "inf", "-inf", "NaN", "Infinity", "-0", "0", "1e999", "-1e999", "1e-999", "0x10",
    "1_000", "+1", "01", "1.7976931348623157e309", "9223372036854775808", "-9223372036854775809",
    "18446744073709551616", "65504", "65505", "2147483648", "1e5", "5e-324",
    "9" * 4000, "0" * 4000, f"0.{'0' * 400}1", f"1e{'9' * 20}", "\u0663",
]  # fmt: skip
_WORDS = [
    "null", "true", "false", "yes", "no", "~", "!!python/object:os.system", "&a", "*a", "<<", "-",
    ":", "?", "|", ">", "[", "]", "{", "}", "---\n", "...\n", ",", ";", "epoch", "loss", "step",
    "lr", "learning_rate", "nan", "inf", "label", "fp16", "bf16", "amp", "optimizer", "data",
    "<<:", "=:", "{}", "[]", "''", '""', "\t", "\r", "\r\n", "\\", "\\u0000", "\\ud800", "#", "@",
    "%", "$", "${x}", "${oc.env:HOME}", "%(x)s", "{0}", "torch.log(", "def", "class", "lambda",
    "async", "await", "yield", "return", "global", "nonlocal", "del", ":", "\x1b[31m",
]  # fmt: skip
_ODD = [
    b"\0", b"\0" * 512, b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xff", b"\xe2\x80\xa8",
    b"\xe2\x80\xae", b"\r", b"\x1a", b"\x1b]0;x\x07", b"[" * 3000, b"{\"a\":" * 1500, b"(" * 2000,
    b"- " * 3000, b"a" * 60000, b"\"", b"'", b"\"\"\"", b"epoch" + b"0" * 4000, b"1:" * 3000,
    b"\xf0\x9f\x92\xa5", b"9" * 20000, b"\n" * 5000, b" " * 20000, b"\t" * 5000, b"." * 5000,
]  # fmt: skip
_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 1e308, 5e-324, float("nan"),
    float("inf"), "", "nan", "\ud800", "\0", "a" * 5000, [], {}, [[]], [None], {"": None}, "1e-5",
    10**400, [0] * 300, {"a": {"b": {"c": []}}}, "../../etc/passwd", "<script>", "0", 1e-45,
]  # fmt: skip

_TOKENS = (
    re.compile(rb"[A-Za-z_]\w*"),
    re.compile(rb"\b\d[\w.]*(?:[+-]\d+)?"),
    re.compile(rb"[-+*/%<>=!&|^~@]+"),
    # Only from where a name begins: a name of 60,000 letters would be tried from each of them.
    re.compile(rb"(?<![\w.])[\w.]{1,60}\([^()\n]*\)"),
    re.compile(rb"(?<=[:=] )[^\n#]+"),
)


def mutated(data: bytes, others: Sequence[bytes], form: str, rng: random.Random) -> bytes:
    """Returns a changed file.

    Args:
        data: The file.
        others: Other files of its kind, to take pieces from.
        form: What it is made of: ``bytes``, ``text``, ``words`` (code and
            configurations), ``json``, ``lines`` (JSON in each line), ``zip``, ``safetensors``,
            ``events`` (of TensorBoard) or ``blocks`` (of W&B).
        rng: What every choice comes from.
    """
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        ways = FORMS[form]
        data = rng.choice(ways)(data, others, rng)[:LARGEST]
    return data


def _at(data: bytes | bytearray, rng: random.Random) -> int:
    """Returns a place; the beginning and the end of a file are where its structure is."""
    where = rng.random()
    if where < 0.25:
        return rng.randrange(min(len(data), 64) + 1)
    if where < 0.5:
        return max(0, len(data) - rng.randrange(256))
    return rng.randrange(len(data) + 1)


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    begin = _at(data, rng)
    return begin, min(len(data), begin + rng.choice((1, 2, 4, 8, 16, 64, 256, 1024, 8192)))


def _flip(data: bytes, _others: Sequence[bytes], rng: random.Random) -> bytes:
    out = bytearray(data or b"\0")
    for _ in range(rng.choice((1, 1, 2, 8))):
        out[min(_at(out, rng), len(out) - 1)] ^= 1 << rng.randrange(8)
    return bytes(out)


def _overwrite(data: bytes, _others: Sequence[bytes], rng: random.Random) -> bytes:
    size = rng.choice((1, 2, 4, 8))
    top = (1 << (8 * size)) - 1
    value = rng.choice((0, 1, 2, top, top - 1, top >> 1, (top >> 1) + 1, rng.randrange(top + 1)))
    at = min(_at(data, rng), max(0, len(data) - size))
    return data[:at] + value.to_bytes(size, rng.choice(("little", "big"))) + data[at + size :]


def _delete(data: bytes, _others: Sequence[bytes], rng: random.Random) -> bytes:
    begin, end = _span(data, rng)
    return data[:begin] + data[end:]


def _repeat(data: bytes, _others: Sequence[bytes], rng: random.Random) -> bytes:
    begin, end = _span(data, rng)
    # Seldom often: what is large takes most of the time, and one in a dozen finds what is slow.
    times = rng.choice((1, 1, 1, 1, 2, 2, 2, 2, 10, 10, 10, 200))
    return data[:end] + data[begin:end] * times + data[end:]


def _cut(data: bytes, _others: Sequence[bytes], rng: random.Random) -> bytes:
    at = _at(data, rng)
    return data[:at] if rng.random() < 0.8 else data[at:]


def _insert(data: bytes, _others: Sequence[bytes], rng: random.Random) -> bytes:
    at = _at(data, rng)
    odd = rng.choice(_ODD) if rng.random() < 0.7 else rng.randbytes(rng.choice((1, 4, 32)))
    if len(odd) > 1000 and rng.random() < 0.7:
        odd = odd[: rng.choice((30, 300))]
    return data[:at] + odd + data[at:]


def _splice(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    other = rng.choice(others)
    (begin, end), at = _span(other, rng), _at(data, rng)
    return data[:at] + other[begin:end] + data[at + rng.choice((0, end - begin)) :]


def _empty(data: bytes, _others: Sequence[bytes], rng: random.Random) -> bytes:
    """Returns a file with a hole of zeros, as a machine that lost power leaves them."""
    begin, end = _span(data, rng)
    return data[:begin] + bytes(end - begin) + data[end:]


def _lines(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Moves, doubles, drops or mixes lines."""
    rows = data.splitlines(keepends=True) or [b""]
    at, to = rng.randrange(len(rows)), rng.randrange(len(rows))
    what = rng.randrange(5)
    if what == 0:
        rows[at], rows[to] = rows[to], rows[at]
    elif what == 1:
        rows.insert(to, rows[at])
    elif what == 2:
        del rows[at : at + rng.choice((1, 1, 3, 20))]
    elif what == 3:
        rows[at] = rng.choice((b"  ", b"\t", b"    ")) + rows[at]
    else:
        rows.insert(at, rng.choice(rng.choice(others).splitlines(keepends=True) or [b"\n"]))
    return b"".join(rows)


def _word(data: bytes, _others: Sequence[bytes], rng: random.Random) -> bytes:
    """Replaces a word or a number, or puts one in."""
    begin = _at(data, rng)
    while begin > 0 and _is_word(data[begin - 1]):
        begin -= 1
    end = begin
    while end < len(data) and _is_word(data[end]):
        end += 1
    pool = _NUMBERS if rng.random() < 0.5 else _WORDS
    return data[:begin] + rng.choice(pool).encode("utf-8", "surrogatepass") + data[end:]


def _same_sort(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Replaces a name, a number or a sign by another one, so that a text mostly stays whole."""
    pattern = rng.choice(_TOKENS)
    mine = [found.span() for found in pattern.finditer(data)]
    theirs: list[bytes] = pattern.findall(rng.choice(others))
    if not mine or not theirs:
        return _lines(data, others, rng)
    begin, end = rng.choice(mine)
    return data[:begin] + rng.choice(theirs) + data[end:]


def _is_word(byte: int) -> bool:
    return byte in b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_.-+"


def _tree(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Changes a value, a key or a branch of JSON."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return _word(data, others, rng)
    holder: list[Any] = [tree]
    _change_in(holder, rng)
    indent = rng.choice((None, 1))
    try:
        text = json.dumps(holder[0], indent=indent)
    except RecursionError:  # deeper than Python writes
        return data
    return text.encode("utf-8", "surrogatepass")


def _change_in(holder: Any, rng: random.Random) -> None:
    """Walks down at random, and changes something where it stops."""
    keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
    key = rng.choice(keys)
    inside = holder[key]
    if isinstance(inside, (dict, list)) and inside and rng.random() < 0.85:
        _change_in(inside, rng)
        return
    what = rng.randrange(6)
    if what == 0 and isinstance(holder, dict):
        holder[rng.choice(_WORDS)] = holder.pop(key)
    elif what == 1 and len(holder) > 1:
        del holder[key]
    elif what == 2:
        holder[key] = [inside] * rng.choice((1, 2, 50))
    elif what == 3:
        for _ in range(rng.choice((1, 3, 120))):
            inside = {"a": inside} if rng.random() < 0.5 else [inside]
        holder[key] = inside
    else:
        holder[key] = rng.choice(_VALUES)


def _json_line(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    rows = data.splitlines(keepends=True) or [b"{}"]
    at = rng.randrange(len(rows))
    rows[at] = _tree(rows[at], others, rng).replace(b"\n", b" ") + b"\n"
    return b"".join(rows)


def _member(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Changes one file of an archive and writes the archive anew, with checksums that are right."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # noqa: BLE001 - it is broken already, in any way
        return _flip(data, others, rng)
    if not members:
        return data
    # The pickle is where the structure is, and mostly the smallest of many.
    chosen = [at for at, (name, _) in enumerate(members) if name.endswith((".pkl", ".npy"))]
    at = rng.choice(chosen) if chosen and rng.random() < 0.6 else rng.randrange(len(members))
    name, content = members[at]
    what = rng.random()
    if what < 0.4 and name.endswith(".pkl"):
        members[at] = (name, _pickle(content, [content], rng))
    elif what < 0.8:
        members[at] = (name, rng.choice(_BYTES)(content, [content], rng))
    elif what < 0.88:
        del members[at]
    elif what < 0.94:
        members.append(members[at])
    else:
        members[at] = (rng.choice((name + "x", "", "../" + name, name.upper(), "a/b/c")), content)
    return _archive(members, rng)


# Small values, and calls, as pickles hold them, to put in the place of others.
_PICKLED = [
    b"N", b"\x88", b"\x89", b"K\0", b"K\1", b"K\x03", b"M\xff\xff", b"J\xff\xff\xff\xff",
    b"\x8a\x08" + b"\xff" * 7 + b"\x7f", b"\x8a\x09" + b"\xff" * 8 + b"\0", b"G" + bytes(8),
    b"G\x7f\xf8" + bytes(6), b")", b"]", b"}", b"X\0\0\0\0", b"X\3\0\0\0cpu", b"X\1\0\0\0x",
    b"X\7\0\0\0storage", b"X\6\0\0\0latin1", b"U\3cpu", b"(K\1K\2t", b"K\2\x85", b"(K\1K\2e",
    b"X\3\0\0\0neg\x88", b"}X\3\0\0\0neg\x88s", b"}X\4\0\0\0conj\x88s", b"}K\1K\2s", b"]K\1a",
]  # fmt: skip
_CALLED = [
    "torch._utils\n_rebuild_tensor", "torch._utils\n_rebuild_tensor_v2",
    "torch._utils\n_rebuild_tensor_v3", "torch._utils\n_rebuild_parameter",
    "torch._utils\n_rebuild_parameter_with_state", "torch._utils\n_rebuild_qtensor",
    "torch._utils\n_rebuild_sparse_tensor", "torch._utils\n_rebuild_nested_tensor",
    "torch._utils\n_rebuild_meta_tensor_no_storage", "torch._utils\n_rebuild_wrapper_subclass",
    "torch._utils\n_rebuild_device_tensor_from_numpy", "torch._tensor\n_rebuild_from_type_v2",
    "torch._utils\n_rebuild_device_tensor_from_cpu_tensor", "torch.nn.parameter\nParameter",
    "torch\nSize", "torch\ndevice", "torch.serialization\n_get_layout", "torch\nTensor",
    "torch\nFloatTensor", "torch.sparse\nFloatTensor", "torch\nfloat32", "torch\nint4",
    "torch\nqint8", "torch\nper_tensor_affine", "torch\nper_channel_affine", "_codecs\nencode",
    "collections\nOrderedDict", "collections\nCounter", "__builtin__\nset", "builtins\ncomplex",
    "builtins\nbytearray", "torch\nFloatStorage", "torch\nIntStorage", "torch\nBoolStorage",
    "torch\nQInt8Storage", "torch\nComplexFloatStorage", "torch.storage\nUntypedStorage",
    "torch.storage\nTypedStorage", "torch.cuda\nHalfStorage", "torch\nbfloat16",
]  # fmt: skip
_JOINED = [b"R", b"\x81", b"Q", b"b", b"a", b"e", b"s", b"u", b"t", b"(", b"\x85", b"\x86", b"\x87"]


def opcodes_changed(data: bytes, rng: random.Random) -> bytes:
    """Changes some instructions of the pickles at the beginning of a file.

    Args:
        data: The file.
        rng: What every choice comes from.

    Raises:
        ValueError: There are none.
    """
    parts, end = _instructions(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        at, what = rng.randrange(len(parts)), rng.randrange(8)
        value = rng.choice(_PICKLED)
        if what == 0:
            value = b"c" + rng.choice(_CALLED).encode() + b"\n"
        elif what == 1:
            value = b"c" + rng.choice(_CALLED).encode() + b"\n" + rng.choice(_PICKLED) + b"\x85R"
        elif what == 2:
            value = rng.choice(_JOINED)
        elif what == 3:
            value = rng.choice(parts)
        elif what == 4:
            value = value + b"0" if rng.random() < 0.1 else value * 2
        same = [n for n, part in enumerate(parts) if part[:1] == parts[at][:1]]
        if what == 5:
            value = parts[rng.choice(same)]
        elif what == 6:
            at = rng.choice([n for n, part in enumerate(parts) if part[:1] not in b"q(X."] or [at])
        parts[at : at + rng.choice((0, 1, 1, 1, 1, 2))] = [value] if what != 7 else []
        if not parts:
            break
    return b"".join(parts) + data[end:]


def _instructions(data: bytes) -> tuple[list[bytes], int]:
    """Returns the instructions of the pickles at the beginning of a file, and where they end."""
    file, parts, begin = io.BytesIO(data), [], 0
    with contextlib.suppress(ValueError):
        while begin < len(data):
            places = [at for _, _, at in pickletools.genops(file) if at is not None]
            ends = [*places[1:], file.tell()]
            parts += [data[a:b] for a, b in zip(places, ends, strict=True)]
            begin = file.tell()
    if not parts:
        raise ValueError("there are no pickles")
    return parts, begin


def _pickle(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    try:
        return opcodes_changed(data, rng)
    except ValueError:
        return _flip(data, others, rng)


def _archive(members: list[tuple[str, bytes]], rng: random.Random) -> bytes:
    out = io.BytesIO()
    method = zipfile.ZIP_DEFLATED if rng.random() < 0.1 else zipfile.ZIP_STORED
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in members:
            if name not in archive.NameToInfo:
                archive.writestr(zipfile.ZipInfo(name), content[:LARGEST], method)
    return out.getvalue()


def _header(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Changes the header of safetensors, and mostly keeps its length right."""
    if len(data) < 8:
        return _flip(data, others, rng)
    size = struct.unpack_from("<Q", data)[0]
    if size > len(data) - 8:
        return _overwrite(data, others, rng)
    header = _tree(data[8 : 8 + size], others, rng)
    said = len(header) if rng.random() < 0.9 else rng.choice((0, size, len(header) + 1, 2**63))
    return struct.pack("<Q", said) + header + data[8 + size :]


def _event(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Changes one event of a file of TensorBoard, mostly with checksums that are right."""
    places, at = [], 0
    while at + 12 <= len(data):
        size = struct.unpack_from("<Q", data, at)[0]
        if size > len(data) - at - 16:
            break
        places.append((at, at + 16 + size))
        at += 16 + size
    if not places:
        return _flip(data, others, rng)
    begin, end = rng.choice(places)
    record = rng.choice(_BYTES)(data[begin + 12 : end - 4], [data[begin:end]], rng)[:4096]
    length = struct.pack("<Q", len(record))
    sums = [struct.pack("<I", masked_crc(part)) for part in (length, record)]
    if rng.random() < 0.1:
        sums[rng.randrange(2)] = rng.randbytes(4)
    return data[:begin] + length + sums[0] + record + sums[1] + data[end:]


def _block(data: bytes, others: Sequence[bytes], rng: random.Random) -> bytes:
    """Changes one record of a file of W&B, mostly with a checksum that is right."""
    places, at = [], 7
    while at + 7 <= len(data):
        size = struct.unpack_from("<H", data, at + 4)[0]
        if at + 7 + size > len(data):
            break
        places.append((at, at + 7 + size))
        at += 7 + size
    if not places:
        return _flip(data, others, rng)
    begin, end = rng.choice(places)
    record = rng.choice(_BYTES)(data[begin + 7 : end], [data[begin:end]], rng)[:4096]
    kind = data[begin + 6 : begin + 7] if rng.random() < 0.9 else bytes([rng.randrange(6)])
    checksum = zlib.crc32(kind + record) if rng.random() < 0.9 else rng.randrange(1 << 32)
    head = struct.pack("<IH", checksum, len(record)) + kind
    return data[:begin] + head + record + data[end:]


_BYTES: list[Way] = [_flip, _flip, _overwrite, _overwrite, _delete, _repeat, _cut, _insert, _empty]
_TEXT: list[Way] = [_word, _word, _word, _lines, _lines, _insert, _splice, _delete, _repeat, _cut]
FORMS: dict[str, list[Way]] = {
    "bytes": [*_BYTES, _splice],
    "text": [*_TEXT, _flip],
    "words": [*[_same_sort] * 10, *_TEXT],
    "json": [_tree, _tree, _tree, _tree, *_TEXT],
    "lines": [_json_line, _json_line, _json_line, *_TEXT, _flip],
    "pickles": [*[_pickle] * 12, *_BYTES, _splice],
    "zip": [_member, _member, _member, *_BYTES, _splice],
    "events": [_event, _event, _event, _event, _event, _event, *_BYTES, _splice],
    "blocks": [_block, _block, _block, _block, _block, _block, *_BYTES, _splice],
    "safetensors": [_header, _header, *_BYTES, _splice],
}
