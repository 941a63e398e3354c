"""bfloat16 has the range of float32: what overflows in it has exploded, and is not too wide."""

from __future__ import annotations

import json

import pytest

from tests.diagnose.running import found_in

SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
optimizer = torch.optim.SGD(model.parameters(), lr=30.0)
for step in range(20):
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(x)
    loss = (out.float() - x).abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.exhaustive
def test_overflow_in_bfloat16_is_an_explosion(tmp_path):
    incident = found_in(tmp_path, SCRIPT)
    assert incident["cause"]["code"] == "exploding-optimization", incident["cause"]
    assert "65504" not in json.dumps(incident)
    assert any(fix["verified"] for fix in incident["fixes"])
