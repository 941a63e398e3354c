"""The inert reader: the same data as pickle's own, nothing run, costs bounded."""

from __future__ import annotations

import collections
import datetime
import pickle
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest

from nanguard.check.checkpoint import pickle_reader
from nanguard.check.checkpoint.byte_ranges import DamagedError, MemoryBlob, TooLargeError
from nanguard.check.checkpoint.checkpoint_reader import open_sources
from nanguard.check.checkpoint.pickle_reader import MAX_PICKLE_LINE, WINDOW, read_pickle
from nanguard.check.checkpoint.rules.checkpoint_files import TruncatedCheckpoint
from nanguard.check.checkpoint.tensors import Call, LongLine, PickleDict, Span
from nanguard.check.checkpoint.torch_file import read_torch
from nanguard.check.scan import Scan
from tests.cost import cpu_seconds

if TYPE_CHECKING:
    from pathlib import Path


def blob(data: bytes) -> MemoryBlob:
    return MemoryBlob("x.pkl", data)


def plain(value):
    """Returns an inert value as plain Python, where it is data."""
    if isinstance(value, PickleDict):
        return {plain(key): plain(item) for key, item in value.pairs}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    return value


DATA = {
    "step": 7,
    "lr": [1e-3, -2.5, 0.0],
    "big": 2**70,
    "small": -(2**33),
    "flags": (True, False, None),
    "text": "größe",
    "raw": b"\x00\xff",
    3: {"nested": {"deep": ((), [], {})}},
    "one": (1,),
    "two": (1, 2),
    "many": tuple(range(300)),
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_data_is_read_as_pickle_reads_it(protocol: int):
    data = dict(DATA) if protocol > 2 else {k: v for k, v in DATA.items() if k != "raw"}
    found = read_pickle(blob(pickle.dumps(data, protocol)))
    assert plain(found.value) == data


@pytest.mark.parametrize("protocol", [0, 1])
def test_the_oldest_protocols(protocol: int):
    data = {"a": [1, 2.5, None, True], "b": ("x", -3), "c": {}}
    assert plain(read_pickle(blob(pickle.dumps(data, protocol))).value) == data


def test_shared_and_recursive_values_stay_shared():
    one: list = []
    one.append(one)
    found = read_pickle(blob(pickle.dumps([one, one]))).value
    assert found[0] is found[1]
    assert found[0][0] is found[0]


def test_objects_become_names_and_arguments():
    when = datetime.datetime(2020, 1, 2)
    found = read_pickle(blob(pickle.dumps(collections.OrderedDict(a=when))))
    assert list(found.names) == ["collections.OrderedDict", "datetime.datetime"]
    assert isinstance(found.value, Call)
    assert found.value.pairs[0][0] == "a"
    assert found.value.pairs[0][1].full == "datetime.datetime"


def test_long_bytes_stay_in_the_file():
    data = pickle.dumps({"w": bytes(5000)}, 4)
    span = read_pickle(blob(data)).value.pairs[0][1]
    assert isinstance(span, Span)
    assert data[span.offset : span.offset + span.size] == bytes(5000)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80",
        b"\x80\x02",
        b"\x80\x02}",
        b"\x80\x02X\xff\xff\xff\x7fab.",
        b"\x80\x02R.",
        b"\x80\x02h\x05.",
        b"\x80\x02\xff.",
        b"\x80\x02t.",
        b"\x80\x02\x86.",
        b"cos\nsystem",
        b"I12x\n.",
        b"I" + b"9" * 10_000 + b"\n.",
        b"\x80\x02\x8b\xff\xff\xff\x7f\x00.",
        b"p99999999999999999999\n.",
        b"\x80\x04\x8c\x02\xff\xfe.",
    ],
)
def test_damage_is_told(data: bytes):
    with pytest.raises(DamagedError):
        read_pickle(blob(data))


def test_memo_indices_cost_nothing():
    data = b"\x80\x02]" + b"r\xff\xff\xff\xff" + b"j\xff\xff\xff\xff" + b"."
    assert read_pickle(blob(data)).value == []


def colliding(count: int) -> bytes:
    """Returns a dict whose keys have all the same hash."""
    clash = sys_hash_modulus()
    keys = b"".join(
        b"\x8a\x0b" + (n * clash).to_bytes(11, "little") + b"N" for n in range(1, count + 1)
    )
    return b"\x80\x02}(" + keys + b"u."


def test_keys_that_collide_cost_nothing():
    assert len(read_pickle(blob(colliding(60_000))).value.pairs) == 60_000
    few, many = (blob(colliding(count)) for count in (4_000, 64_000))
    # 16 times as many take 16 times as long, and 256 times if each is compared with all others.
    assert cpu_seconds(lambda: read_pickle(many)) < 80 * cpu_seconds(lambda: read_pickle(few))


def sys_hash_modulus() -> int:
    import sys

    return sys.hash_info.modulus


@pytest.mark.parametrize("opcode", [b"\x85", b"]a", b"\x81"])
def test_deep_nests_do_not_recurse(opcode: bytes):
    if opcode == b"]a":
        data = b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b"."
    elif opcode == b"\x85":
        data = b"\x80\x02N" + b"\x85" * 100_000 + b"."
    else:
        data = b"\x80\x02c__main__\nA\n" + b")\x81" * 100_000 + b"."
    assert read_torch(blob(data)).tree.tensors == []


def test_a_tree_of_shared_parts_is_walked_once():
    parts = b"]" + b"".join(
        b"q" + bytes([n]) + b"]h" + bytes([n]) + b"ah" + bytes([n]) + b"a" for n in range(80)
    )
    # Walked part by part there would be 2**80 of them: to come back at all is the proof.
    assert read_torch(blob(b"\x80\x02" + parts + b".")).tree.tensors == []


def test_too_many_parts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pickle_reader, "MAX_STEPS", 1000)
    with pytest.raises(TooLargeError, match="more than 1,000 parts"):
        read_pickle(blob(b"\x80\x02" + b"]" * 5000 + b"."))


@pytest.mark.parametrize(
    "flood", [b"]", b"}", b"(", b"\x94", b"\x85", b"]q\x01", b"c__main__\nA\n)\x81"]
)
def test_too_many_objects(monkeypatch: pytest.MonkeyPatch, flood: bytes):
    monkeypatch.setattr(pickle_reader, "MAX_MADE", 1000)
    with pytest.raises(TooLargeError, match="more than 1,000 objects"):
        read_pickle(blob(b"\x80\x04N" + flood * 2000 + b"."))


def test_too_much_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pickle_reader, "MAX_TEXT", 1000)
    one = b"X" + struct.pack("<I", 600) + b"a" * 600
    with pytest.raises(TooLargeError, match="text"):
        read_pickle(blob(b"\x80\x02" + one + one + b"."))


@pytest.mark.parametrize("size", [10, MAX_PICKLE_LINE + 1, 3 * WINDOW + 7])
def test_a_line_of_the_oldest_protocol_may_be_as_long_as_an_array(size: int):
    data = pickle.dumps(["a" * size, 3], protocol=0)
    found = read_pickle(blob(data))
    first, second = found.value
    assert second == 3
    assert first == "a" * size or (isinstance(first, LongLine) and size <= first.size <= size + 2)


def test_a_long_line_that_is_cut_off_is_damage():
    data = pickle.dumps("a" * (WINDOW * 2), protocol=0)[:-20]
    with pytest.raises(DamagedError, match="has no end at byte 1"):
        read_pickle(blob(data))


@pytest.mark.parametrize(("size", "unread"), [(40_000, 0), (400_000, 1)])
def test_a_long_array_of_the_oldest_protocol_is_whole_and_may_be_said_not_to_be_read(size, unread):
    data = pickle.dumps(np.linspace(0, 1, size).astype("f4"), protocol=0)
    tree = read_torch(blob(data)).tree
    assert (tree.damage, tree.unread, len(tree.tensors)) == ([], unread, 1 - unread)


@pytest.mark.parametrize(("name", "severity"), [("faces.pkl", "info"), ("model.pkl", "error")])
def test_a_pickle_of_data_that_is_cut_off_is_no_checkpoint(
    name: str, severity: str, tmp_path: Path
):
    (tmp_path / name).write_bytes(pickle.dumps({"images": np.ones((30, 40), "f4")})[:-900])
    (source,) = open_sources([tmp_path / name], Scan())
    (finding,) = TruncatedCheckpoint().check(source)
    assert finding.severity.value == severity
    assert finding.message.startswith("The pickle") is (severity == "info")
