"""Infinite inputs: those that a cast to float16 made, and those that somebody wrote."""

from __future__ import annotations

from tests.diagnose.running import found_in

CAST = """
import torch
from torch import nn

torch.manual_seed(0)
torch.save(torch.ones(4, 4), "scale.pt")
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-12)
scale = torch.load("scale.pt", weights_only=True).mean()
for step in range(4):
    x = torch.rand(8, 4) * scale * (2e5 if step == 2 else 5e4)
    x = x.half()
    loss = model(x.float()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


WRITTEN = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for step in range(6):
    x = torch.randn(8, 4)
    if step == 4:
        x[3] = float("inf")
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_infinity_that_was_written_into_the_data(tmp_path):
    found = found_in(tmp_path, WRITTEN, 4)
    assert found["cause"]["code"] == "bad-input-data"
    assert found["samples"] == [3]


def test_cast_to_float16(tmp_path):
    found = found_in(tmp_path, CAST, 2)
    assert found["cause"]["code"] == "half-precision-overflow"
    assert found["origin"]["code"].strip() == "x = x.half()"
    (fix,) = [fix for fix in found["fixes"] if fix["summary"].startswith("compute")]
    assert fix["verified"]
