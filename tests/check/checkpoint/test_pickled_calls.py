"""What torch can make of a pickle: the same as torch itself says, and nothing is made."""

from __future__ import annotations

import struct
import warnings
import zipfile
from typing import TYPE_CHECKING

import pytest
import torch

from nanguard.check.checkpoint.byte_ranges import DamagedError, MemoryBlob, TooLargeError
from nanguard.check.checkpoint.checkpoint import read_part
from nanguard.check.checkpoint.pickle_reader import read_pickle
from nanguard.check.scan import Scan

if TYPE_CHECKING:
    from pathlib import Path

ORDERED = b"ccollections\nOrderedDict\n)R"


def text(word: str) -> bytes:
    data = word.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def called(name: str, *args: bytes, by: bytes = b"R") -> bytes:
    """Returns instructions that call something."""
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + b"(" + b"".join(args) + b"t" + by


def storage(kind: str = "Float", count: int = 4, place: bytes = text("cpu")) -> bytes:
    number = b"K" + bytes([count])
    return b"(" + text("storage") + f"ctorch\n{kind}Storage\n".encode() + text("0") + place + (
        number + b"tQ"
    )  # fmt: skip


def rebuilt(name: str, *args: bytes) -> bytes:
    return called(f"torch._utils._rebuild_{name}", *args)


SIZE, STEP, NO, YES, ZERO = b"K\4\x85", b"K\1\x85", b"\x89", b"\x88", b"K\0"
TENSOR = rebuilt("tensor_v2", storage(), ZERO, SIZE, STEP, NO, ORDERED)
WHOLE = rebuilt("tensor_v2", storage("Int"), ZERO, SIZE, STEP, NO, ORDERED)
EMPTY = (ZERO, b"K\0\x85", STEP)
SCALE = b"ctorch\nper_tensor_affine\n"
INT4, QINT8, FLOAT = (f"ctorch\n{name}\n".encode() for name in ("int4", "qint8", "float32"))
COO = called("torch.serialization._get_layout", text("torch.sparse_coo"))
PLACES = rebuilt("tensor_v2", storage("Int"), ZERO, b"K\2K\2\x86", b"K\2K\1\x86", NO, ORDERED)
PAIR = rebuilt("tensor_v2", storage("Int"), ZERO, b"K\2\x85", STEP, NO, ORDERED)
NESTED_KEY = b"K\1" + b"\x85" * 40
# Each is made into a checkpoint of one value.
VALUES = {
    "a tensor": TENSOR,
    "a parameter": rebuilt("parameter", TENSOR, YES, ORDERED),
    "a parameter of whole numbers": rebuilt("parameter", WHOLE, NO, ORDERED),
    "a parameter of whole numbers that is trained": rebuilt("parameter", WHOLE, YES, ORDERED),
    "the same inside of another": rebuilt(
        "parameter", rebuilt("parameter", WHOLE, NO, ORDERED), YES, ORDERED
    ),
    "a parameter of nothing": rebuilt("parameter", b"N", YES, ORDERED),
    "a parameter of a number": rebuilt("parameter", b"K\1", YES, ORDERED),
    "a gradient by a number": rebuilt("tensor_v2", storage(), ZERO, SIZE, STEP, b"K\0", ORDERED),
    "a shape of truth": rebuilt("tensor_v2", storage(), ZERO, b"\x88\x85", STEP, NO, ORDERED),
    "a shape of parts": rebuilt("tensor_v2", storage(), ZERO, b"G?\xf0" + bytes(6) + b"\x85", STEP,
                                NO, ORDERED),
    "an enormous step": rebuilt("tensor_v2", storage(), ZERO, b"K\0\x85",
                                b"\x8a\x09" + bytes(7) + b"\x80\0\x85", NO, ORDERED),
    "more steps than sizes": rebuilt("tensor_v2", storage(), ZERO, SIZE, b"K\1K\1\x86", NO,
                                     ORDERED),
    "more elements than can be counted": rebuilt(
        "tensor_v2", storage(), ZERO, b"\x8a\x08" + bytes(7) + b"\x40K\x08\x86", b"K\0K\0\x86", NO,
        ORDERED,
    ),
    "quantised numbers as plain ones": rebuilt("tensor_v2", storage("QInt8", 16), *EMPTY, NO,
                                               ORDERED),
    "quantised": rebuilt("qtensor", storage("QInt8", 16), ZERO, SIZE, STEP,
                         SCALE + b"G?\xf0" + bytes(6) + b"K\0\x87", NO, ORDERED),
    "quantised by a place that is no number": rebuilt(
        "qtensor", storage("QInt8", 16), ZERO, SIZE, STEP,
        SCALE + (b"G?\xf0" + bytes(6)) * 2 + b"\x87", NO, ORDERED,
    ),
    "negated": rebuilt("tensor_v2", storage(), ZERO, SIZE, STEP, NO, ORDERED,
                       b"}" + text("neg") + b"\x88s"),
    "conjugated, and real": rebuilt("tensor_v2", storage(), ZERO, SIZE, STEP, NO, ORDERED,
                                    b"}" + text("conj") + b"\x88s"),
    "negated by a number": rebuilt("tensor_v2", storage(), ZERO, SIZE, STEP, NO, ORDERED,
                                   b"}K\1\x88s"),
    "a type of four bits": rebuilt("tensor_v3", storage("Byte", 16), ZERO, SIZE, STEP, NO, ORDERED,
                                   INT4),
    "a type that is called": INT4 + b")R",
    "no memory": rebuilt("meta_tensor_no_storage", FLOAT, SIZE, STEP, NO),
    "no memory, quantised": rebuilt("meta_tensor_no_storage", QINT8, SIZE, STEP, NO),
    "copied to a device that nobody knows": rebuilt(
        "device_tensor_from_cpu_tensor", TENSOR, FLOAT, text("gibberish"), NO
    ),
    "sparse": rebuilt("sparse_tensor", COO, b"(" + PLACES + PAIR + b"K\2K\2\x86t"),
    "sparse, with a value too many": rebuilt(
        "sparse_tensor", COO, b"(" + PLACES + WHOLE + b"K\2K\2\x86t"
    ),
    "a device": called("torch.device", text("cuda:3")),
    "a device that nobody knows": called("torch.device", text("gibberish")),
    "a device with a zero before its number": called("torch.device", text("cuda:01")),
    "a device twice numbered": called("torch.device", text("cuda:0"), b"K\1"),
    "a layout": COO,
    "a layout that nobody knows": called("torch.serialization._get_layout", text("torch.x")),
    "a size": called("torch.Size", b"K\1K\2\x86"),
    "a size of texts": called("torch.Size", text("a") + b"\x85"),
    "a size without a number": called("torch.Size", b"N"),
    "bytes": called("_codecs.encode", text("\u00ff"), text("latin1")),
    "bytes that have no such sign": called("_codecs.encode", text("\u0100"), text("latin1")),
    "bytes by no such name": called("_codecs.encode", text("a"), text("nowhere")),
    "a set": called("builtins.set", b"]K\1a"),
    "a set of lists": called("builtins.set", b"]]a"),
    "a set that is made bare": called("builtins.set", by=b"\x81"),
    "a tensor that is made bare": called("torch._utils._rebuild_tensor", by=b"\x81"),
    "a complex number": called("builtins.complex", b"K\1", b"K\2"),
    "a complex text": called("builtins.complex", text("x")),
    "counted": called("collections.Counter", b"]K\1a"),
    "counted lists": called("collections.Counter", b"]]a"),
    "ordered pairs": called("collections.OrderedDict", b"]K\1K\2\x86a"),
    "ordered triples": called("collections.OrderedDict", b"]K\1K\2K\3\x87a"),
    "ordered, with a state": ORDERED + b"}b",
    "ordered, with a state of nothing": ORDERED + b"Nb",
    "a list with a state": b"]}b",
    "more added to a set": called("builtins.set", by=b"R") + b"K\1a",
    "a key in a key": b"}" + NESTED_KEY + b"K\1s",
    "a list deep in a key": b"}" + b"(" + b"K\1" * 20 + b"]t" + b"\x85" * 12 + b"K\1s",
    "a key that counts": b"}" + called("collections.Counter") + b"K\1s",
    "a storage": storage(),
    "a storage on a device without a name": storage(place=b"K\1"),
    "a storage without a type": b"(" + text("storage") + b"ctorch.storage\nTypedStorage\n"
    + text("0") + text("cpu") + b"K\4tQ",
    "a storage of less than nothing": b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0")
    + text("cpu") + b"J\xff\xff\xff\xfftQ",
    "a module with its source": b"(" + text("module") + FLOAT + text("x.py") + text("") + b"tQ",
    "a tensor that is a key": b"}"
    + rebuilt("tensor_v2", storage(), b"K\3", SIZE, STEP, NO, ORDERED) + b"K\1s",
}  # fmt: skip


def written(path: Path, value: bytes) -> None:
    """Writes a checkpoint of one value; its only storage has 16 bytes."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in (
            ("data.pkl", b"\x80\2" + value + b"."),
            ("byteorder", b"little"),
            ("data/0", struct.pack("<4i", 0, 1, 1, 0)),
            ("version", b"3\n"),
        ):
            archive.writestr(zipfile.ZipInfo(f"model/{name}"), data)


def torch_refuses(path: Path) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(path, weights_only=True, map_location="cpu")
    except Exception:
        return True
    return False


# What torch refuses unless it puts everything on a CPU, and what it cannot use afterwards.
STRICTER = {
    "a storage on a device without a name",
    "copied to a device that nobody knows",
    "quantised numbers as plain ones",
}


# The right ones of each sort: without them, all could be refused for another reason.
READ = {
    "a tensor", "a parameter", "a parameter of whole numbers", "a parameter of nothing",
    "quantised", "negated", "a type of four bits", "no memory", "sparse", "a device", "a layout",
    "a size",
    "bytes", "a set", "a complex number", "counted", "ordered pairs", "ordered, with a state",
    "a storage",
}  # fmt: skip


@pytest.mark.parametrize("case", VALUES)
def test_what_torch_refuses_is_named_and_what_it_reads_is_not(tmp_path: Path, case: str):
    path = tmp_path / "model.pt"
    written(path, VALUES[case])
    part = read_part(path, Scan())
    assert bool(part.damage or part.needs) == (torch_refuses(path) or case in STRICTER)
    assert not part.not_checked
    if case in READ:
        assert not part.damage


def test_a_key_may_be_deep_and_not_without_end():
    deep = b"K\1" + b"\x85" * 5000
    with pytest.raises(DamagedError):
        read_pickle(MemoryBlob("x.pt", b"\x80\2}" + deep + b"K\1s."))


def test_a_part_that_is_used_again_and_again_is_not_looked_at_without_end():
    many = b"](" + b"K\1" * 60_000 + b"eq\0"
    again = b"".join(called("builtins.set", b"h\0") for _ in range(2_000))
    with pytest.raises(TooLargeError, match="the same parts"):
        read_pickle(MemoryBlob("x.pt", b"\x80\2" + many + again + b"."))


@pytest.mark.parametrize("size", [1, 4075, 4096, 65535])
def test_an_archive_of_torch_has_nothing_behind_its_end(tmp_path: Path, size: int):
    """Torch reads it at some lengths of a note and of the file, and fails at others."""
    path = tmp_path / "model.pt"
    torch.save({"w": torch.ones(3)}, path)
    whole = path.read_bytes()
    for end in (struct.pack("<H", size), b"\0\0"):
        path.write_bytes(whole[:-2] + end + b"n" * size)
        assert f"{size:,} bytes lie behind the end" in read_part(path, Scan()).damage[0]
