"""The index of a sharded snapshot is a pickle; a stranger's must not run."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from nanguard.cli.entry import run
from nanguard.errors import SnapshotError
from nanguard.snapshots.sharded import _checked_index, _CheckedReader

if TYPE_CHECKING:
    from pathlib import Path

METADATA = "torch.distributed.checkpoint.metadata"


def write(folder: Path, index: Any) -> Path:
    (folder / ".metadata").write_bytes(index if isinstance(index, bytes) else pickle.dumps(index))
    return folder


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_torch_writes_can_be_read(tmp_path: Path):
    saved = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    dcp.save(saved, checkpoint_id=tmp_path)
    index = _checked_index(tmp_path)
    assert {name: tuple(kind.size) for name, kind in index.state_dict_metadata.items()} == {
        "a": (2, 3),
        "b": (4,),
    }
    loaded = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    dcp.load(loaded, storage_reader=_CheckedReader(tmp_path))
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_members_of_an_enumeration_as_python_3_11_0_writes_them(tmp_path, monkeypatch, capsys):
    kind = metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(kind, "__reduce_ex__", lambda self, _: (getattr, (kind, self.name)))
    dcp.save({"a": torch.ones(4)}, checkpoint_id=tmp_path)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    assert _checked_index(tmp_path).state_dict_metadata["a"].size == (4,)
    assert run(["check", str(tmp_path)]) == 0
    assert "unsafe-pickle" not in capsys.readouterr().out


def test_attributes_of_anything_else_are_refused(tmp_path: Path):
    for owner, name in ((METADATA, "Metadata"), (METADATA, "_MEM_FORMAT_ENCODING")):
        taken = b"\x80\x04" + named("builtins", "getattr") + named(owner, name)
        write(tmp_path, taken + text("__init_subclass__") + b"\x86R.")
        with pytest.raises(SnapshotError, match="has no place in an index"):
            _checked_index(tmp_path)


class Evil:
    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def test_an_index_that_calls_something_is_refused(tmp_path: Path):
    write(tmp_path, Evil(f"touch {tmp_path / 'pwned'}"))
    with pytest.raises(SnapshotError, match="system has no place in an index"):
        _checked_index(tmp_path)
    assert not (tmp_path / "pwned").exists()


def test_an_index_that_borrows_a_helper_of_the_right_module_is_refused(tmp_path: Path):
    """``dataclass`` compiles the names of fields; it lives where the classes of an index do."""
    evil = f"a=__import__('os').system('touch {tmp_path / 'pwned'}'),*k"
    kind = named(METADATA, "BytesStorageMetadata")
    fields = b"N}(" + text("__annotations__") + b"}(" + text(evil[:255]) + named("torch", "Size")
    index = b"\x80\x04" + named(METADATA, "dataclass") + kind + fields + b"uu\x86b" + b"\x85R."
    with pytest.raises(SnapshotError, match="dataclass has no place in an index"):
        _checked_index(write(tmp_path, index))
    assert not (tmp_path / "pwned").exists()


def test_an_index_that_changes_a_class_is_refused(tmp_path: Path):
    change = b"N}(" + text("planner_data") + text("mine") + b"u\x86b"
    index = b"\x80\x04" + named(METADATA, "Metadata") + change + b"."
    with pytest.raises(SnapshotError, match="fills something"):
        _checked_index(write(tmp_path, index))
    assert Metadata.planner_data is None


def test_an_index_that_points_outside_is_refused(tmp_path: Path):
    where = {MetadataIndex("a"): _StorageInfo("../../elsewhere", 0, 10)}
    write(tmp_path, Metadata({}, storage_data=where))
    with pytest.raises(SnapshotError, match="names a file outside"):
        _checked_index(tmp_path)


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps([1]), b"\x80\x04" + b"(" * 9])
def test_a_broken_index_is_a_damaged_snapshot(content: bytes, tmp_path: Path):
    with pytest.raises(SnapshotError, match="its index cannot be read"):
        _checked_index(write(tmp_path, content))
