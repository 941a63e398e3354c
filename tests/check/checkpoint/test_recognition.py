"""Which files and folders are checkpoints, and what their names say."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from nanguard.check.checkpoint.checkpoint_reader import recognises, recognises_folder
from nanguard.check.checkpoint.run_checkpoints import (
    LEGACY,
    is_step_folder,
    shard_of,
    step_in,
    template,
)
from nanguard.check.checkpoint.tensor_roles import TensorRole, role_of, role_of_file


def tensors(*names: str) -> bytes:
    header = {n: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in names}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


def zip_of(name: str) -> bytes:
    return b"PK\3\4" + bytes(22) + struct.pack("<HH", len(name), 0) + name.encode() + bytes(50)


@pytest.mark.parametrize(
    ("name", "head", "is_one"),
    [
        ("model.pt", zip_of("model/data.pkl"), True),
        ("model", zip_of("archive/data.pkl"), True),
        ("photos.zip", zip_of("photos/1.jpg"), False),
        ("train.npz", zip_of("x.npy"), False),
        ("report.docx", zip_of("[Content_Types].xml"), False),
        ("old", LEGACY + b"\x80\x02M\xe9\x03.", True),
        ("weights.pkl", b"\x80\x04\x95", True),
        ("cache.dat", b"\x80\x04\x95", False),
        ("model.pt", b"cos\nsystem\n(S'ls'\ntR.", True),
        ("model.pkl", b"(dp0\nVx\np1\n", True),
        ("model.bin", b"(ios\nsystem\np0\n", True),
        ("words.pt", b"casa\nbola\nporta\n", False),
        ("model.safetensors", tensors("a.weight"), True),
        ("renamed.weights", tensors("a.weight"), True),
        ("train.safetensors", tensors("input_ids", "labels"), False),
        ("data.safetensors", tensors("x", "y"), False),
        ("emb.safetensors", tensors("embeddings"), True),
        ("head.safetensors", tensors("weight", "y"), True),
        ("model.safetensors", b"", True),
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n", True),
        ("last.ckpt", b"", True),
        ("last.pt", bytes(100), True),
        ("europarl.en.pt", "Reinício da sessão\n".encode(), False),
        ("notes.ckpt", b"not a checkpoint", False),
        ("data.bin", b"\x01\x02\x00\x03", False),
        ("data.bin", b"", False),
        ("pytorch_model.bin", b"", True),
        ("weights.pt", b"\x89HDF\r\n\x1a\n\0\0", False),
        ("config.json", b'{"model_type": "gpt2"}', False),
        ("model.safetensors.index.json", b'{"metadata": {}, "weight_map": {}}', True),
        ("tokenizer.json", b'{"version": "1.0"}', False),
        (".metadata", b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\n", True),
        (".metadata", b"name: x\n", False),
        ("data.tar", b"folder/" + bytes(93), False),
    ],
)
def test_files(name: str, head: bytes, is_one: bool):
    assert recognises(Path(name), head) is is_one


@pytest.mark.parametrize(
    ("files", "is_one"),
    [
        (["checkpoint-10/model.safetensors"], True),
        (["step_1.safetensors", "step_2.safetensors"], True),
        (["step_1.safetensors"], False),
        (["model.safetensors", "train.py"], False),
        (["model-00001-of-00002.safetensors"], True),
        (["epoch_1/images.txt", "epoch_2/images.txt"], False),
        (["runs/a.safetensors"], False),
        ([], False),
    ],
)
def test_folders(tmp_path: Path, files: list[str], is_one: bool):
    for name in files:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(tensors("a.weight") if name.endswith(".safetensors") else b"text")
    assert recognises_folder(tmp_path) is is_one


def test_no_folder_is_none(tmp_path: Path):
    assert not recognises_folder(tmp_path / "missing")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-1500", 1500),
        ("epoch=3-step=400.ckpt", 400),
        ("epoch=12-val_loss=0.23.ckpt", 12),
        ("model_0005000.pth", 5000),
        ("iter_4000.pth", 4000),
        ("global_step20", 20),
        ("resnet50_epoch_3.pth", 3),
        ("bn_epoch12.pth.tar", 12),
        ("ckpt-7.pt", 7),
        ("100.pt", 100),
        ("resnet50.pth", None),
        ("unet_fp32.safetensors", None),
        ("state_rank_3.pt", None),
        ("optimizer_1.bin", None),
        ("rng_state_0.pth", None),
        ("fold_2.pt", None),
        ("model.safetensors", None),
    ],
)
def test_steps_in_names(name: str, step: int | None):
    assert step_in(name) == step


def test_other_things_names_say():
    assert shard_of("model-00002-of-00005.safetensors") == ("model", 2, 5)
    assert shard_of("model-2-of-5.bin") is None
    assert template("epoch=3-val_loss=0.23.ckpt") == template("epoch=12-val_loss=1.2.ckpt")
    assert is_step_folder("checkpoint-5")
    assert is_step_folder("tmp-checkpoint-5")
    assert not is_step_folder("model_2")
    assert not is_step_folder("checkpoints")


@pytest.mark.parametrize(
    ("keys", "role"),
    [
        (("state_dict", "fc.weight"), TensorRole.WEIGHT),
        (("fc.weight",), TensorRole.WEIGHT),
        (("opt_model.decoder.weight",), TensorRole.WEIGHT),
        (("model", "optimizer_head.weight"), TensorRole.WEIGHT),
        (("schema.weight",), TensorRole.WEIGHT),
        (("best_model", "fc.weight"), TensorRole.WEIGHT),
        (("d_optimizer", "0", "exp_avg"), TensorRole.OPTIMIZER),
        (("optimizer.state.fc.exp_avg",), TensorRole.OPTIMIZER),
        (("fc.weight.exp_avg_sq",), TensorRole.OPTIMIZER),
        (("ema", "fc.weight"), TensorRole.EMA),
        (("state_dict", "model_ema.fc.weight"), TensorRole.EMA),
        (("modelEMA", "fc.weight"), TensorRole.EMA),
        (("swa_state_dict", "fc.weight"), TensorRole.EMA),
        (("grad_scaler", "scale"), TensorRole.SCALER),
        (("lr_scheduler", "best"), TensorRole.RECORD),
        (("callbacks", "EarlyStopping", "best_score"), TensorRole.RECORD),
        (("history", "loss"), TensorRole.RECORD),
    ],
)
def test_roles(keys: tuple[str, ...], role: TensorRole):
    assert role_of(keys, dimensions=1, optimizer=False, file=None) is role


@pytest.mark.parametrize(
    ("path", "role"),
    [
        ("run/optimizer.pt", TensorRole.OPTIMIZER),
        ("run/zero_pp_rank_0_mp_rank_00_optim_states.pt", TensorRole.OPTIMIZER),
        ("run/scaler.pt", TensorRole.SCALER),
        ("run/scheduler.pt", TensorRole.RECORD),
        ("unet_ema/model.safetensors", TensorRole.EMA),
        ("cinema/model.safetensors", None),
        ("run/mp_rank_00_model_states.pt", None),
    ],
)
def test_roles_of_files(path: str, role: TensorRole | None):
    assert role_of_file(Path(path)) is role
