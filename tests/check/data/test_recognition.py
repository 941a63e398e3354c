"""Which files are data: by what they hold, with their names as a hint."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from nanguard.check.data.formats import recognises, recognises_folder


def lines(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def tensors(*names: str) -> bytes:
    header = {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("train.jsonl", lines({"text": "a", "label": 1})),
        ("loss_corpus.jsonl", lines({"prompt": "a", "completion": "b"})),
        ("train.jsonl", b"<<<<<<< HEAD\n" + lines({"text": "a", "label": 1})),
        ("weird", lines({"input_ids": [1, 2]}, {"input_ids": [1]})),
        ("a.csv", b"f0,f1,label\n0.1,0.2,1\n"),
        ("a.csv", b"step,loss,label\n1,2,3\n"),
        ("a.json", json.dumps([{"instruction": "a", "output": "b"}]).encode()),
        ("a.npy", b"\x93NUMPY\x01\x00"),
        ("a.npz", b"PK\x03\x04\x14\x00\x00\x00\x00\x00" + b"\0" * 20 + b"X.npy"),
        ("a.parquet", b"PAR1"),
        ("a.safetensors", tensors("input_ids", "labels")),
        ("a.safetensors", tensors("x_train", "y_train")),
        ("train.jsonl", b""),
    ],
)
def test_data(name: str, head: bytes):
    assert recognises(Path(name), head)


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("metrics.jsonl", lines({"step": 1, "loss": 2.0})),
        ("x.jsonl", lines({"epoch": 1, "train/loss": 2.0, "lr": 0.1})),
        ("x.jsonl", lines({"event": "skip", "level": "info", "reason": "nan"})),
        ("training_history.csv", b"epoch,train_loss,val_loss,val_acc\n1,2,3,0.4\n"),
        ("model.safetensors", tensors("layer.0.weight", "layer.0.bias")),
        ("model.safetensors", tensors("weight", "bias")),
        ("config.json", b'{"vocab_size": 10, "num_labels": 3}'),
        ("trainer_state.json", b'{"log_history": []}'),
        ("config.yaml", b"lr: 0.1\n"),
        ("train.py", b"import torch\n"),
        ("model.pt", b"PK\x03\x04\x14\x00\x00\x00archive/data.pkl"),
        ("metrics.jsonl", b""),
        ("list.json", b'["a", "b"]'),
        ("README.md", b"# data\n"),
    ],
)
def test_no_data(name: str, head: bytes):
    assert not recognises(Path(name), head)


def test_folders(tmp_path: Path):
    assert not recognises_folder(tmp_path)
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "dataset_info.json").write_text("{}")
    assert recognises_folder(tmp_path)
