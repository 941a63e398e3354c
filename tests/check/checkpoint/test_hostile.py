"""Files that lie: bounded costs, a finding or a reason, never an error of ours."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch._weights_only_unpickler import _get_allowed_globals

from nanguard.check.checkpoint import byte_ranges, torch_file
from nanguard.check.checkpoint.checkpoint import CheckpointFile, read_part
from nanguard.check.checkpoint.tensors import ALLOWED, DISTRIBUTED
from nanguard.check.checkpoint.torch_file import beyond_weights_only, runs_code
from nanguard.check.scan import Scan


def part_of(path: Path, data: bytes | None = None) -> CheckpointFile:
    if data is not None:
        path.write_bytes(data)
    return read_part(path, Scan())


def repacked(path: Path, method: int, **change: bytes) -> None:
    with zipfile.ZipFile(path) as old:
        files = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(path, "w", method) as new:
        for name, data in files.items():
            new.writestr(name, change.get(name.rsplit("/", 1)[-1], data))


def test_everything_torch_allows_is_allowed_and_nothing_else():
    theirs = set(_get_allowed_globals())
    assert theirs <= ALLOWED
    assert ALLOWED - theirs <= DISTRIBUTED


@pytest.mark.parametrize(
    "name",
    [
        "os.system",
        "posix.system",
        "builtins.eval",
        "subprocess.Popen",
        "torch.hub.load",
        "runpy.run_path",
    ],
)
def test_functions_that_run_anything(name: str):
    assert runs_code(name)
    for file in ("model.pt", "training_args.bin", "rng_state.pth", ".metadata"):
        assert beyond_weights_only([name], file) == [name]


def test_an_archive_that_was_compressed_again_is_read(tmp_path: Path):
    path = tmp_path / "m.pt"
    torch.save({"w": torch.tensor([1.0, float("nan")])}, path)
    repacked(path, zipfile.ZIP_DEFLATED)
    assert part_of(path).poisoned[0].name == "w"


def test_a_zip_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "m.pt"
    torch.save({"w": torch.zeros(5000)}, path)
    repacked(path, zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(byte_ranges, "MAX_UNPACKED", 10_000)
    assert "which torch never does" in str(part_of(path).not_checked)
    monkeypatch.setattr(byte_ranges, "MAX_UNPACKED", 10**6)
    monkeypatch.setattr(torch_file, "MAX_UNPACKED_IN_ALL", 10_000)
    assert "which torch never does" in str(part_of(path).not_checked)


def test_a_header_that_lies_about_a_size(tmp_path: Path):
    path = tmp_path / "m.pt"
    torch.save({"w": torch.zeros(100)}, path)
    data = path.read_bytes()
    at = data.rfind(b"PK\1\2", 0, data.rfind(b"data/0"))
    lie = data[: at + 20] + struct.pack("<II", 10**9, 10**9) + data[at + 28 :]
    assert part_of(path, lie).damage


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"w":' * 50_000,
        b"[]",
        b'{"w": 3}',
        b'{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [1e3], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [4611686018427387905, 4], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, '
        b'"v": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_headers_of_safetensors_that_make_no_sense(tmp_path: Path, header: bytes):
    data = struct.pack("<Q", len(header)) + header + bytes(4)
    assert part_of(tmp_path / "m.safetensors", data).damage


def test_a_header_longer_than_any(tmp_path: Path):
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 30) + b"{")
        file.truncate(1 << 31)
    assert "the header has" in str(part_of(path).not_checked)


def test_types_nobody_knows_are_counted(tmp_path: Path):
    header = json.dumps({"w": {"dtype": "F3", "shape": [8], "data_offsets": [0, 3]}}).encode()
    part = part_of(tmp_path / "m.safetensors", struct.pack("<Q", len(header)) + header + bytes(3))
    assert part.unread == 1
    assert not part.damage


def test_a_shape_with_more_elements_than_there_are_atoms(tmp_path: Path):
    path = tmp_path / "m.pt"
    torch.save({"w": torch.zeros(1).expand(2**40)}, path)
    part = part_of(path)
    assert not part.damage
    assert part.tensors[0].shape == (2**40,)


def test_folders_devices_and_missing_files_are_told(tmp_path: Path):
    assert part_of(tmp_path / "nothing.pt").not_checked
    assert part_of(tmp_path).not_checked
    assert part_of(Path("/dev/zero")).not_checked == "This is no regular file."


@pytest.mark.parametrize("tail", [b"", b"\xff", b"]" * 5_000_000])
def test_what_runs_before_the_damage_is_told(tmp_path: Path, tail: bytes):
    part = part_of(tmp_path / "m.pkl", b"\x80\x02cos\nsystem\nX\x01\0\0\0a\x85R" + tail)
    assert part.needs == ["os.system"]
    assert part.damage or part.not_checked


def test_code_in_a_cut_file_of_the_older_format(tmp_path: Path):
    path = tmp_path / "m.pth"
    state = {"w": torch.zeros(1000), "f": print}
    torch.save(state, path, _use_new_zipfile_serialization=False)
    part = part_of(path, path.read_bytes()[:-100])
    assert part.needs == ["builtins.print"]
    assert part.damage


def test_code_in_any_pickle_of_the_older_format(tmp_path: Path):
    path = tmp_path / "m.pth"
    torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    data, code = path.read_bytes(), b"cos\nsystem\nX\x01\0\0\0a\x85R0"
    magic = data.index(b"\x80\x02M")
    for at in (2, magic + 2, data.index(b"\x80\x02}") + 2, data.rindex(b"\x80\x02]") + 2):
        assert part_of(path, data[:at] + code + data[at:]).needs[0] == "os.system"


def test_code_in_the_oldest_protocol(tmp_path: Path):
    part = part_of(tmp_path / "m.pt", b"cos\nsystem\n(S'ls'\ntR.")
    assert part.needs == ["os.system", "the pickle instruction STRING"]


def test_instructions_that_torch_does_not_follow_are_named(tmp_path: Path):
    path = tmp_path / "m.pt"
    torch.save({"w": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    at = data.index(b"\x80\x02}") + 2
    dropped = part_of(path, data[:at] + b"N0" + data[at:])
    assert dropped.needs == ["the pickle instruction POP"]
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    assert not part_of(path, data).needs


def test_bytes_behind_an_archive_are_damage(tmp_path: Path):
    path = tmp_path / "m.pt"
    torch.save({"w": torch.zeros(3)}, path)
    data = path.read_bytes()
    assert not part_of(path, data).damage
    assert "5,000 bytes lie behind the end" in part_of(path, data + bytes(5000)).damage[0]


def test_nothing_is_imported_or_run(tmp_path: Path):
    path = tmp_path / "m.pkl"
    path.write_bytes(b"\x80\x02cthis_module_is_not_there\nrun\n)R.")
    assert part_of(path).needs == ["this_module_is_not_there.run"]
    assert "this_module_is_not_there" not in sys.modules


def test_reading_needs_neither_torch_nor_numpy_to_be_imported():
    code = (
        "import sys, nanguard.check.checkpoint.checkpoint_reader, nanguard.check.rule as c;"
        "c.rules_for('checkpoint'); assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_part_can_be_sent_elsewhere(tmp_path: Path):
    path = tmp_path / "m.pt"
    torch.save({"w": torch.tensor([1.0, float("inf")])}, path)
    part = part_of(path)
    assert pickle.loads(pickle.dumps(part)) == part
