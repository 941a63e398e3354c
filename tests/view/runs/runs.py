"""Runs to read, written as the guard and the launcher write them."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from nanguard import incident as incidents
from nanguard.findings import number

if TYPE_CHECKING:
    from pathlib import Path

DIFF = """--- a/train.py
+++ b/train.py
@@ -4,3 +4,3 @@
     p = self.gate(x)
-    q = torch.log(p)
+    q = torch.log(p.clamp(min=1e-8))
     return q
"""


def incident(step: int = 40, **fields: Any) -> dict[str, Any]:
    """Returns an incident with everything in it."""
    return {
        "schema": incidents.SCHEMA,
        "step": step,
        "rank": 0,
        "symptom": {"where": "loss", "kind": "nan", "loss": "nan", "terms": {"text": 2.5}},
        "action": {"taken": "skip", "reason": "bad step 1 of at most 5 in 100"},
        "run": {
            "command": ["python", "train.py", "--lr", "1e-3"],
            "folder": "/home/me",
            "signature": "f00d",
            "python": "3.11.7",
            "torch": "2.8.0",
            "device": "cpu",
        },
        "replay": {"verdict": "reproduced", "method": "second-run", "seconds": 3.2},
        "origin": {
            "phase": "forward",
            "op": "aten.log",
            "module": "gate",
            "file": "/home/me/train.py",
            "line": 5,
            "function": "forward",
            "code": "q = torch.log(p)",
            "excerpt": {"first": 4, "lines": ["p = self.gate(x)", "q = torch.log(p)", "return q"]},
        },
        "path": [
            {"op": "input", "min": -1.0, "max": 2.0, "nonfinite": 0},
            {"op": "aten.mul", "file": "/home/me/train.py", "line": 4, "min": 0.0, "max": 5e4},
            {"op": "aten.log", "module": "gate", "line": 5, "min": -2, "max": 9.0, "nonfinite": 3},
            {"op": "aten.mean", "line": 6, "min": None, "max": None, "nonfinite": 1},
        ],
        "cause": {"code": "log-or-sqrt-domain", "summary": "log(0): 3 of 512", "confidence": 0.97},
        "other_causes": [{"code": "exp-overflow", "summary": "large", "confidence": 0.2}],
        "evidence": [{"what": "input of aten.log", "shape": [4, 8], "min": 0.0, "zeros": 3}],
        "samples": [3],
        "batch_size": 8,
        "losses_before": [2.5, 2.4, 2.3],
        "optimizer": {"name": "Adam", "lr": 0.001, "eps": 1e-8},
        "trials": [{"what": "everything in float32", "finite": False, "result": "loss nan"}],
        "fixes": [
            {"summary": "clamp it", "verified": True, "how": "replayed: loss 2.2", "diff": DIFF},
            {"summary": "lower the learning rate", "verified": False, "how": "not tried"},
        ],
        **fields,
    }


def write_incident(folder: Path, step: int = 40, **fields: Any) -> Path:
    """Writes an incident below a folder; returns its own folder."""
    own = folder / f"step-{step:06d}-rank0"
    incidents.write(own, incidents.Incident.from_json(incident(step, **fields)))
    return own


def write_record(folder: Path, steps: int = 120, *, bad: range = range(40, 43)) -> Path:
    """Writes a run folder of the guard: healthy, with some steps that were skipped."""
    folder.mkdir(parents=True, exist_ok=True)
    lines, events = [], []
    for step in range(steps):
        loss = math.nan if step in bad else 3.0 * math.exp(-step / 60) + 0.01 * (step * 7 % 11)
        line = {
            "step": step,
            "update": step,
            "epoch": step // 60,
            "loss": number(loss),
            "terms": {"text": number(loss), "latent": 0.25},
            "grad_norm": number(loss),
            "lr": 1e-4,
            "scale": 65536.0,
            "action": "skip" if step in bad else "step",
            "time": 1_700_000_000 + step,
        }
        lines.append(json.dumps(line, separators=(",", ":")))
        if step in bad:
            event = {
                "time": line["time"],
                "action": "skip",
                "name": "non-finite-loss",
                "step": step,
            }
            event |= {"severity": "error", "message": "the loss is nan", "reason": "bad step"}
            events.append(json.dumps(event))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "events.jsonl").write_text("".join(f"{event}\n" for event in events))
    (folder / "training_history.csv").write_text("epoch,val_loss\n0,2.5\n1,2.25\n")
    return folder
