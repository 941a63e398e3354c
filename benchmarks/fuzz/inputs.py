"""The kinds of files that are fuzzed, where their seeds are, and the input of any number.

Seeds are the labelled corpora of the tests, small files of torch in ``seeds``, in which most bytes
are structure, and a few that are made here. Input ``n`` of a seed is the same on every machine that
has the same files.
"""

from __future__ import annotations

import functools
import json
import random
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fuzz.mutations import mutated

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
# Larger seeds are slower to check, and most of them is numbers.
_LARGEST_SEED = 24 << 10
# Of long texts, most inputs come from the first lines: all there is to get wrong is in those.
_SHORT_TEXT = 1 << 10
_SHARE_OF_SHORT = 0.9


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of files.

    Attributes:
        file: How a file of this kind is called.
        form: What it is made of, for ``mutated``.
        seeds: Where seeds are, as patterns below ``tests``.
        scanned: Whether a worker reads it: data, checkpoints and logs.
        beside: What lies beside it, as a pattern below ``tests``.
    """

    file: str
    form: str
    seeds: tuple[str, ...] = ()
    scanned: bool = True
    beside: str = ""


KINDS: dict[str, Kind] = {
    "python": Kind("train.py", "words", ("lint/own/*/*.py", "cases/own/*.py"), scanned=False),
    "notebook": Kind("train.ipynb", "json", scanned=False),
    "yaml": Kind("config.yaml", "words", ("configs/own/*/*.y*ml",), scanned=False),
    "json-config": Kind("config.json", "json", ("configs/own/*/*.json",), scanned=False),
    "toml": Kind("config.toml", "words", ("configs/own/*/*.toml",), scanned=False),
    "csv": Kind("train.csv", "text", ("data_cases/own/**/*.csv",)),
    "jsonl": Kind("train.jsonl", "lines", ("data_cases/own/**/*.jsonl",)),
    "json-data": Kind("train.json", "json"),
    "parquet": Kind("train.parquet", "bytes", ("data_cases/o*/**/*.parquet",)),
    "arrow": Kind("train.arrow", "bytes", ("data_cases/own/**/*.arrow",)),
    "npy": Kind("train.npy", "bytes", ("data_cases/o*/**/*.npy",)),
    "npz": Kind("train.npz", "zip", ("data_cases/o*/**/*.npz",)),
    "torch": Kind("model.pt", "zip", ("checkpoints/o*/**/*.pt", "checkpoints/o*/**/*.pth")),
    "torch-legacy": Kind("model.pth", "pickles", ("checkpoints/o*/*legacy*.pth",)),
    "safetensors": Kind("model.safetensors", "safetensors", ("checkpoints/o*/**/*.safetensors",)),
    "index": Kind(
        "model.safetensors.index.json",
        "json",
        ("checkpoints/own/*/*.index.json",),
        beside="checkpoints/own/*_sharded/*.safetensors",
    ),
    "text-log": Kind("train.log", "words", ("logs/own/*.log", "logs/own/*.txt")),
    "csv-log": Kind("metrics.csv", "text", ("logs/own/*.csv", "logs/own/*/*/*.csv")),
    "jsonl-log": Kind("metrics.jsonl", "lines", ("logs/own/*.jsonl",)),
    "trainer-state": Kind("trainer_state.json", "json", ("logs/own/**/*.json",)),
    "tensorboard": Kind("events.out.tfevents.1.host.1.0", "events", ("logs/own/tb_*/*",)),
    "wandb": Kind("run-a.wandb", "blocks"),
    "incident": Kind("incident.json", "json", scanned=False),
    "run": Kind("events.jsonl", "lines", scanned=False),
}


def beside(kind: str) -> list[Path]:
    """Returns the files that lie beside an input of a kind, without which it cannot be clean."""
    pattern = KINDS[kind].beside
    return sorted(TESTS.glob(pattern)) if pattern else []


@functools.cache
def seeds(kind: str) -> list[bytes]:
    """Returns the seeds of a kind, in a fixed order; at least one."""
    made: list[bytes] = _MADE[kind]() if kind in _MADE else []
    found = sorted({path for pattern in KINDS[kind].seeds for path in TESTS.glob(pattern)})
    found += sorted((Path(__file__).parent / "seeds" / kind).glob("*"))
    small = [p for p in found if p.is_file() and 0 < p.stat().st_size <= _LARGEST_SEED]
    if kind == "torch":
        small = [path for path in small if path.read_bytes()[:2] == b"PK"]
    return [path.read_bytes() for path in small] + made


def input_of(kind: str, seed: int, number: int) -> bytes:
    """Returns an input by its number.

    Args:
        kind: The kind.
        seed: The seed of a campaign.
        number: The number.
    """
    rng = random.Random(f"{seed}/{kind}/{number}")  # noqa: S311 - it has to be repeatable
    known = seeds(kind)
    data = rng.choice(known)
    if KINDS[kind].form in ("text", "lines", "words") and rng.random() < _SHARE_OF_SHORT:
        data = _first_lines(data)
    return mutated(data, known, KINDS[kind].form, rng)


def _first_lines(data: bytes) -> bytes:
    """Returns the whole lines at the beginning of a text, and at least one."""
    if len(data) <= _SHORT_TEXT:
        return data
    end = data.rfind(b"\n", 0, _SHORT_TEXT) + 1
    return data[: end or len(data)]


def _notebooks() -> list[bytes]:
    out = []
    for code in seeds("python")[:20]:
        lines = code.decode("utf-8", "replace").splitlines(keepends=True)
        cell = {"cell_type": "code", "metadata": {}, "outputs": [], "source": lines}
        about = {"cell_type": "markdown", "metadata": {}, "source": "# a model"}
        book = {"cells": [about, cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
        out.append(json.dumps(book).encode())
    return out


def _lists() -> list[bytes]:
    rows = [data.splitlines()[:20] for data in seeds("jsonl")]
    return [b"[" + b",\n".join(lines) + b"]" for lines in rows]


def _incidents() -> list[bytes]:
    step = {"where": "loss", "kind": "nan", "loss": "nan", "grad_norm": 3.1, "terms": {"a": 2.1}}
    origin = {"phase": "forward", "op": "aten.log", "module": "head", "file": "train.py",
              "line": 41, "function": "forward", "code": "torch.log(p)"}  # fmt: skip
    incident = {
        "schema": "nanguard.incident/1", "step": 7, "rank": 0, "symptom": step, "origin": origin,
        "action": {"taken": "skip", "reason": "the loss is nan"},
        "cause": {"code": "log-or-sqrt-domain", "summary": "log(0)", "confidence": 0.97},
        "evidence": [{"what": "input of aten.log", "min": 0.0, "max": 1.0, "zeros": 3,
                      "nonfinite": 0, "shape": [4, 2], "dtype": "float32"}],
        "samples": [3],
        "trials": [{"what": "in float64", "loss": "nan", "finite": False}],
        "path": [origin, origin],
        "fixes": [{"summary": "use F.logsigmoid(x)", "verified": True, "how": "replayed step 7",
                   "diff": "--- a\n+++ b\n@@ -1 +1 @@\n-x\n+y\n"}],
        "replay": {"verdict": "reproduced", "method": "in-place"},
        "run": {"command": ["python", "train.py"], "folder": "/", "ordinal": 7, "ranks": 1,
                "seconds": 1.5, "torch": "2.4", "python": "3.11"},
    }  # fmt: skip
    short = {name: incident[name] for name in ("schema", "step", "rank", "symptom")}
    short["replay"] = {"verdict": "not-replayed"}
    return [json.dumps(one, indent=1).encode() for one in (incident, short)]


def _events() -> list[bytes]:
    lines = [
        {"time": 1.0 + at, "code": "RUN001", "name": "non-finite-loss", "severity": "error",
         "message": "loss is nan", "step": at, "action": "skip", "reason": "x"}
        for at in range(5)
    ]  # fmt: skip
    steps = [
        {"step": at, "update": at, "epoch": 0, "loss": 1 / (at + 1), "grad_norm": 0.5, "lr": 1e-3,
         "action": "step", "time": 1.0 + at, "terms": {"a": 0.5}}
        for at in range(40)
    ]  # fmt: skip
    return ["".join(json.dumps(one) + "\n" for one in rows).encode() for rows in (lines, steps)]


def _offline_runs() -> list[bytes]:
    """Returns short runs as W&B keeps them: blocks of records with checksums."""

    def field(number: int, data: bytes) -> bytes:
        return varint(number << 3 | 2) + varint(len(data)) + data

    def varint(value: int) -> bytes:
        more = value >> 7
        return bytes([value & 127 | 128]) + varint(more) if more else bytes([value])

    out = []
    for bad in (99, 7):
        data = b":W&B\xe1\xbe\x00"
        for step in range(12):
            row = {"train/loss": "NaN" if step >= bad else str(1 / (step + 1)), "lr": "0.001"}
            items = [field(1, key.encode()) + field(16, row[key].encode()) for key in row]
            history = b"".join(field(1, item) for item in items)
            record = b"\x08" + varint(step) + field(2, history + field(2, b"\x08" + varint(step)))
            checksum = zlib.crc32(b"\x01" + record)
            data += struct.pack("<IHB", checksum, len(record), 1) + record
        out.append(data)
    return out


_MADE: dict[str, Any] = {
    "wandb": _offline_runs,
    "notebook": _notebooks,
    "json-data": _lists,
    "incident": _incidents,
    "run": _events,
}
