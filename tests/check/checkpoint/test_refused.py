"""Files of torch that torch refuses are damaged, and are not resumed from."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from nanguard.check.checkpoint.checkpoint import read_part
from nanguard.check.scan import Scan
from nanguard.run.recovering.audit import Auditor, CheckpointVerdict, Places

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STATE = {"model": {"w": torch.ones(4, 4)}, "step": 3}
END, ENTRY = b"PK\6\6", b"PK\1\2"


def changed(data: bytes, at: int, new: bytes) -> bytes:
    """Returns bytes with some of them written over."""
    return data[:at] + new + data[at + len(new) :]


ARCHIVES: dict[str, Callable[[bytes], bytes]] = {
    "files promised": lambda data: changed(data, data.rfind(END) + 24, struct.pack("<QQ", 99, 99)),
    "parts": lambda data: changed(data, data.rfind(END) + 16, b"\1"),
    "encrypted": lambda data: changed(data, data.find(ENTRY) + 8, b"\1"),
    "strongly encrypted": lambda data: changed(data, data.rfind(ENTRY) + 8, b"\x40"),
    "size": lambda data: changed(data, data.find(ENTRY) + 24, b"\x7f\x7f"),
    "byte order": lambda data: data.replace(b"little", b"lidtle"),
}


@pytest.mark.parametrize("case", ARCHIVES)
def test_archives_that_torch_refuses_are_damaged(tmp_path: Path, case: str):
    path = tmp_path / "model.pt"
    torch.save(STATE, path)
    assert not read_part(path, Scan()).damage
    data = path.read_bytes()
    path.write_bytes(ARCHIVES[case](data))
    assert read_part(path, Scan()).damage
    with pytest.raises((RuntimeError, ValueError)):
        torch.load(path, weights_only=True)


def repacked(path: Path, name: str, content: Callable[[bytes], bytes]) -> None:
    """Writes an archive anew with other content in one of its files."""
    with zipfile.ZipFile(path) as archive:
        files = {one.filename: archive.read(one) for one in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for file, data in files.items():
            archive.writestr(zipfile.ZipInfo(file), content(data) if file.endswith(name) else data)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("/version", b"0", "version of its format is 0, and torch reads 1 to 10"),
        ("/version", b"11", "version of its format is 11"),
        ("/version", b"9" * 40, "version of its format is 9999"),
        ("/version", b"x", "version of its format is no number"),
        ("/version", b"10\n", ""),
        ("/byteorder", b"little\r", "the order of its bytes is"),
        ("/.storage_alignment", b"6 4", "alignment of its storages is no number"),
        ("/.storage_alignment", b"9" * 40, ""),
        ("/.format_version", b"x", ""),
    ],
)
def test_numbers_in_an_archive_are_those_that_torch_reads(
    tmp_path: Path, name: str, content: bytes, said: str
):
    path = tmp_path / "model.pt"
    torch.save(STATE, path)
    repacked(path, name, lambda _: content)
    assert said in "".join(read_part(path, Scan()).damage)
    if said:
        with pytest.raises((RuntimeError, ValueError, IndexError)):
            torch.load(path, weights_only=True)
    else:
        assert not read_part(path, Scan()).damage
        torch.load(path, weights_only=True)


def test_a_storage_that_no_tensor_uses_is_read_all_the_same(tmp_path: Path):
    path = tmp_path / "model.pt"
    torch.save([torch.ones(4), torch.ones(3)], path)
    # The second tensor stays on the stack below what the pickle ends with.
    repacked(path, "/data.pkl", lambda data: data[:-1] + b"]q\xff.")
    assert not read_part(path, Scan()).damage
    torch.load(path, weights_only=True)
    repacked(path, "/data/1", lambda data: data + bytes(8))
    assert "data/1 has 20 bytes of 12" in read_part(path, Scan()).damage[0]
    with pytest.raises(RuntimeError, match="record size"):
        torch.load(path, weights_only=True)


def test_an_operation_of_a_later_protocol_is_damage(tmp_path: Path):
    path = tmp_path / "model.pt"
    torch.save({**STATE, "rng": b"12"}, path, pickle_protocol=4)
    assert not read_part(path, Scan()).damage
    torch.save(STATE, path)
    repacked(path, "/data.pkl", lambda data: data[:-1] + b"\x94.")
    assert "makes no sense" in read_part(path, Scan()).damage[0]
    with pytest.raises(pickle.UnpicklingError, match="Unsupported operand 148"):
        torch.load(path, weights_only=True)


def test_an_archive_that_bytes_were_put_into_is_damaged(tmp_path: Path):
    path = tmp_path / "model.pt"
    torch.save(STATE, path)
    repacked(path, "/version", lambda data: data)
    assert not read_part(path, Scan()).damage
    data = path.read_bytes()
    at = data.find(ENTRY)
    path.write_bytes(data[:at] + b"xx" + data[at:])
    said = f"directory of the archive is at byte {at + 2:,} and should be at {at:,}"
    assert said in read_part(path, Scan()).damage[0]
    with pytest.raises(RuntimeError, match="invalid header"):
        torch.load(path, weights_only=True)


def test_a_part_of_a_storage_has_a_key_a_begin_and_a_size(tmp_path: Path):
    path = tmp_path / "model.pt"
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    assert data.count(b"Nt") == 1  # the storage is no part of another
    path.write_bytes(data.replace(b"Nt", b"K\5t"))
    assert "does not say which part" in read_part(path, Scan()).damage[0]
    with pytest.raises(TypeError, match="cannot unpack"):
        torch.load(path, weights_only=True)


@pytest.mark.parametrize("archived", [True, False])
@pytest.mark.parametrize("parameter", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16, torch.complex64])
def test_whole_numbers_that_want_a_gradient_are_damaged(
    tmp_path: Path, dtype: torch.dtype, parameter: bool, archived: bool
):
    path = tmp_path / "model.pt"
    value = torch.ones(3, dtype=dtype)
    held = nn.Parameter(value, requires_grad=False) if parameter else value
    torch.save({"flag": held}, path, _use_new_zipfile_serialization=archived)
    assert not read_part(path, Scan()).damage
    whole = not dtype.is_floating_point and not dtype.is_complex
    if archived:
        repacked(path, "/data.pkl", wanting_gradient)
    else:
        path.write_bytes(wanting_gradient(path.read_bytes()))
    if whole:
        assert "cannot be made of what the pickle says" in read_part(path, Scan()).damage[0]
        with pytest.raises(RuntimeError, match="can require gradients"):
            torch.load(path, weights_only=True)
    else:
        assert not read_part(path, Scan()).damage
        assert torch.load(path, weights_only=True)["flag"].requires_grad


def wanting_gradient(pickled: bytes) -> bytes:
    """Returns a pickle whose last False, which stands before the hooks, is True."""
    at = pickled.rindex(b"\x89")
    return pickled[:at] + b"\x88" + pickled[at + 1 :]


def test_the_older_format_with_another_number_is_damaged(tmp_path: Path):
    path = tmp_path / "model.pt"
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    assert not read_part(path, Scan()).damage
    path.write_bytes(changed(path.read_bytes(), 6, b"\0"))
    assert "not with that of torch" in read_part(path, Scan()).damage[0]
    with pytest.raises(RuntimeError, match="magic number"):
        torch.load(path, weights_only=True)


def write(folder: Path, *, index: str = "", behind: bytes = b"") -> None:
    """Writes a checkpoint of one shard; with an index that is given, with bytes behind numbers."""
    folder.mkdir(parents=True)
    name = "model-00001-of-00001.safetensors"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a.weight": entry}).encode()
    numbers = struct.pack("<2f", 1, 2)
    (folder / name).write_bytes(struct.pack("<Q", len(header)) + header + numbers + behind)
    listed = json.dumps({"weight_map": {"a.weight": name}})
    (folder / "model.safetensors.index.json").write_text(index or listed)


@pytest.mark.parametrize("damage", [{"index": '{"weight_map": {"a.wei'}, {"behind": b"\1\1"}])
def test_a_damaged_checkpoint_is_not_resumed_from(
    tmp_path: Path, damage: dict[str, str | bytes], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for step in (10, 20):
        write(tmp_path / f"out/checkpoint-{step}")
    write(tmp_path / "out/checkpoint-30", **damage)  # type: ignore[arg-type]
    found = Auditor(Places.of("out", ["t.py"], 0.0)).look(1)
    assert [one.step for one in found.good] == [20]
    assert [one.verdict for one in found.all if one.step == 30] == [CheckpointVerdict.DAMAGED]
