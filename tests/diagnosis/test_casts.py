"""Good data that a cast to float16 made infinite is an overflow, and no bad data."""

from __future__ import annotations

import json
import os
import subprocess
import sys

CAST = """
import torch
from torch import nn

torch.manual_seed(0)
torch.save(torch.ones(4, 4), "scale.pt")
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
scale = torch.load("scale.pt", weights_only=True).mean()
for step in range(4):
    x = torch.randn(8, 4) * scale * (1e6 if step == 2 else 1.0)
    x = x.half()
    loss = model(x.float()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_cast_to_float16(tmp_path):
    (tmp_path / "train.py").write_text(CAST)
    guarded = [sys.executable, "-m", "nanguard", "run", "--incidents", "found", "--"]
    subprocess.run(
        [*guarded, sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        timeout=180,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found = json.loads((tmp_path / "found/step-000002-rank0/incident.json").read_text())
    assert found["cause"]["code"] == "half-precision-overflow"
    assert found["origin"]["code"].strip() == "x = x.half()"
    (fix,) = [fix for fix in found["fixes"] if fix["summary"].startswith("compute")]
    assert fix["verified"]
