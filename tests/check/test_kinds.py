"""What a file is, told by what it holds."""

from __future__ import annotations

import pytest

from nanguard.check import paths
from nanguard.check.paths import FileKind, by_name, kind_of, scanned_as


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [
        ("a.py", b"x = 1\n", FileKind.PYTHON),
        ("tool", b"#!/usr/bin/env python3\nx = 1\n", FileKind.PYTHON),
        ("tool", b"#!/usr/bin/env -S python3.11 -u\nx = 1\n", FileKind.PYTHON),
        ("tool", b"#!/bin/bash\npython train.py\n", FileKind.OTHER),
        ("<stdin>", b"import torch\nprint(torch)\n", FileKind.PYTHON),
        ("<stdin>", b"lr: 0.1\noptimizer: adam\n", FileKind.CONFIG),
        ("<stdin>", b"[train]\nlr = 0.1\n", FileKind.CONFIG),
        ("<stdin>", b'{"learning_rate": 1}\n', FileKind.CONFIG),
        ("<stdin>", b'{"a": 1}\n{"a": 2}\n', FileKind.DATA),
        ("config.txt", b"lr: 0.1\noptimizer: adam\n", FileKind.CONFIG),
        ("letter.txt", b"Dear all,\n\nplease find enclosed\n", FileKind.OTHER),
        ("x.json", b'{"cells": [{"cell_type": "code"}], "nbformat": 4}', FileKind.NOTEBOOK),
        ("trainer_state.json", b'{"log_history": []}', FileKind.LOG),
        ("x.json", b'{"epoch": 1, "log_history": []}', FileKind.LOG),
        ("out.txt", b"step 1 loss 2\nstep 2 loss 2\nstep 3 loss 1\n", FileKind.LOG),
        ("x.yaml", b"a: 1\n\0", FileKind.BINARY),
        ("x", b"\x93NUMPY\x01", FileKind.DATA),
        ("pytorch_model.bin", b"\x80\x02}q\x00", FileKind.CHECKPOINT),
        ("x.npz", b"PK\x03\x04", FileKind.DATA),
        ("events.out.tfevents.1", b"\x18\0", FileKind.LOG),
        ("x.yaml", "\ufefflr: 1".encode("utf-16"), FileKind.CONFIG),
        ("x.md", b"# Title", FileKind.OTHER),
        ("empty", b"", FileKind.OTHER),
    ],
)
def test_kinds(name: str, head: bytes, kind: FileKind):
    assert kind_of(name, head) is kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.pth.tar", FileKind.CHECKPOINT),
        ("train.jsonl.gz", FileKind.DATA),
        ("src.tar", FileKind.OTHER),
        ("photo.v2.png", FileKind.OTHER),
        ("train.log.1", None),
    ],
)
def test_the_inner_ending_counts(name: str, kind: FileKind | None):
    assert by_name(name) is kind


RECORDS = b'{"text": "a", "label": 1}\n{"text": "b", "label": 0}\n'
STEPS = b"".join(b"step %d loss: 1.5 lr: 0.1\n" % n for n in range(9))


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [
        ("a.jsonl", RECORDS, FileKind.DATA),
        ("a.csv", b"text,label\nx,1\ny,0\n", FileKind.DATA),
        ("a", b"\x93NUMPY\x01\x00v\x00{'descr': '<f4'}", FileKind.DATA),
        ("history.csv", b"epoch,loss,val_loss\n1,0.5,0.6\n2,0.4,0.5\n", FileKind.LOG),
        ("m.jsonl", b'{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n', FileKind.LOG),
        ("trainer_state.json", b'{"log_history": [{"loss": 1.0, "step": 1}]}', FileKind.LOG),
        ("train.log", STEPS, FileKind.LOG),
        ("out.txt", STEPS, FileKind.LOG),
        ("train.log.1", STEPS, FileKind.LOG),
        ("model.pt", b"PK\x03\x04" + bytes(64), FileKind.CHECKPOINT),
        ("model.safetensors.index.json", b'{"weight_map": {}}', FileKind.CHECKPOINT),
        ("ds.json", b'{"fp16": {"enabled": true}, "optimizer": {"type": "AdamW"}}', None),
        ("config.json", b'{"model_type": "gpt2", "vocab_size": 50257}\n', None),
        ("tokenizer.json", b'{"version": "1.0", "model": {"vocab": {}}}', None),
        ("package.json", b'{\n "name": "x"\n}\n', None),
        ("<stdin>", b'{"learning_rate": 0.1, "optimizer": "adam"}\n', None),
        ("x.json", b'{"cells": [{"cell_type": "code"}], "nbformat": 4}', None),
        ("c.yaml", b"lr: 0.1\n", None),
        ("tool", b"#!/usr/bin/env python\nprint('step 1 loss 2')\n" * 5, None),
        ("requirements.txt", b"torch==2.1\nnumpy>=1\n", None),
        ("Makefile", b"all:\n\techo loss=3\n", None),
        ("empty", b"", None),
    ],
)
def test_who_reads_a_file(name: str, head: bytes, kind: FileKind | None):
    assert scanned_as(name, head) is kind


@pytest.mark.parametrize(
    ("name", "head", "first"),
    [
        ("model.pt", b"PK\x03\x04" + bytes(64), "checkpoint"),
        ("model.pkl", b"\x80\x02}q\x00.", "checkpoint"),
        ("arrays.bin", b"PK\x03\x04" + bytes(26) + b"x.npy" + bytes(64), "log"),
        ("model.safetensors", bytes(8) + b"{}", "log"),
    ],
)
def test_who_is_asked_first(monkeypatch, name: str, head: bytes, first: str):
    asked = []
    real = paths.reader
    monkeypatch.setattr(paths, "reader", lambda who: asked.append(who) or real(who))
    scanned_as(name, head)
    assert asked[0] == first
    if first == "checkpoint":
        assert asked == ["checkpoint"]
