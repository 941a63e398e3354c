"""Mask constants of float32 that bfloat16 cannot hold: nothing has grown there."""

from __future__ import annotations

import pytest

from tests.diagnose.running import found_in

pytestmark = pytest.mark.exhaustive

SCRIPT = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 4)

    def forward(self, x, mask):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 4
        mask = mask[:, None, :]
        {bias}
        return self.out(torch.softmax(scores + bias, -1) @ v)


torch.manual_seed(0)
model = Attention().to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for step in range(4):
    x = torch.randn(4, 6, 16, dtype=torch.bfloat16)
    mask = torch.ones(4, 6)
    mask[:, 4:] = 0
    if step == 2:
        mask[2] = 0
    loss = model(x, mask).float().pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

CAST = "bias = ((1.0 - mask) * torch.finfo(torch.float32).min).to(scores.dtype)"
PRODUCT = "bias = (1.0 - mask.to(scores.dtype)) * torch.finfo(torch.float32).min"
# The smallest number twice is -inf in every type.
SUM = "bias = (1.0 - mask.to(scores.dtype)) * torch.finfo(scores.dtype).min; bias = bias + bias"


@pytest.mark.parametrize(("bias", "said"), [(CAST, "3.38953e+38"), (PRODUCT, "-3.40282e+38")])
def test_smallest_float32_as_a_mask(tmp_path, bias, said):
    found = found_in(tmp_path, SCRIPT.format(bias=bias), 2)
    assert found["cause"]["code"] == "half-precision-overflow"
    assert found["cause"]["confidence"] > 0.9
    assert said in found["cause"]["summary"]
    assert "bfloat16" in found["cause"]["summary"]
    assert found["origin"]["code"].strip() == bias
    best = found["fixes"][0]
    assert best["verified"]
    assert "+        bias = (" in best["diff"]
    assert "torch.finfo(torch.bfloat16).min" in best["diff"]


def test_sum_of_two_masks_is_no_explosion(tmp_path):
    found = found_in(tmp_path, SCRIPT.format(bias=SUM), 2)
    causes = [found["cause"], *found.get("other_causes", [])]
    assert "exploding-optimization" not in [cause["code"] for cause in causes]
    assert found["origin"]["op"] == "aten.add"
