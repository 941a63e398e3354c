"""What a pickle calls, and with what: compared with what ``torch.load`` makes of it."""

from __future__ import annotations

import io
import zipfile

import pytest
import torch

from nanguard.check.checkpoint.byte_ranges import DamagedError, MemoryBlob
from nanguard.check.checkpoint.torch_file import beyond_weights_only, read_torch

LATIN = b"X\6\0\0\0latin1"


def archive(value: bytes) -> bytes:
    """Returns what torch saves of a tensor, with one more value beside it, written as opcodes."""
    saved, changed = io.BytesIO(), io.BytesIO()
    torch.save({"a": torch.ones(3)}, saved)
    with zipfile.ZipFile(saved) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            data = old.read(name)
            if name.endswith("data.pkl"):
                data = data[:-1] + b"X\1\0\0\0k" + value + b"s."
            new.writestr(name, data)
    return changed.getvalue()


def refuses(data: bytes) -> bool:
    """Returns whether a check says that torch cannot load a file as it does by default."""
    try:
        found = read_torch(MemoryBlob("model.pt", data))
    except DamagedError:
        return True
    return bool(found.tree.damage or beyond_weights_only(found.names, "model.pt"))


@pytest.mark.parametrize(
    ("value", "loads"),
    [
        (b"N", True),
        (b"ccollections\nOrderedDict\n)R", True),
        (b"ccollections\nOrderedDict\n)R}b", True),
        (b"ccollections\nOrderedDict\n)RK\1b", False),
        (b"c__builtin__\nset\n]K\1a\x85R", True),
        (b"c__builtin__\nset\n](]e\x85R", False),
        (b"ctorch\nfloat32\n", True),
        (b"ctorch\nfloat32\n)R", False),
        (b"ctorch\ndevice\nX\3\0\0\0cpu\x85R", True),
        (b"ctorch\ndevice\n)R", False),
        (b"ctorch._utils\n_rebuild_parameter\n)R", False),
        (b"c_codecs\nencode\nX\2\0\0\0ab" + LATIN + b"\x86R", True),
        (b"c_codecs\nencode\nX\2\0\0\0abX\6\0\0\0latinX\x86R", False),
        (b"c_codecs\nencode\n)R", False),
        (b"U\2ab", True),
        (b"U\2\xff\xfe", False),
        (b"X\7\0\0\0storageQ", False),
        (b"K\1Q", False),
        (b")Q", False),
    ],
)
def test_what_torch_cannot_make_is_not_called_whole(value: bytes, loads: bool):
    data = archive(value)
    if loads:
        torch.load(io.BytesIO(data), weights_only=True)
    else:
        with pytest.raises(Exception):  # noqa: B017, PT011 - each fails in a way of its own
            torch.load(io.BytesIO(data), weights_only=True)
    assert refuses(data) is not loads
