"""Files of torch that torch refuses are damaged, and are not resumed from."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest
import torch

from nanguard.check.checkpoint.checkpoint import read_part
from nanguard.check.scan import Scan
from nanguard.run.recovering.audit import Auditor, CheckpointVerdict
from nanguard.run.recovering.places import Places

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
