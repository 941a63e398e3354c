"""What a file is, told by what it holds."""

from __future__ import annotations

import pytest

from nanguard.sources.kinds import FileKind, kind_of


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
