"""Division by zero: the fix changes nothing in steps that are good."""

from __future__ import annotations

import pytest

from tests.diagnose.running import found_in

pytestmark = pytest.mark.slow

HEAD = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
"""
TAIL = """
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
TEMPERATURE = """\
    temperature = max(0.0, 0.6 - step / 10)
    loss = nn.functional.cross_entropy(model(x) / temperature, y)"""
FLOAT_COUNT = """\
    mask = torch.full((8,), float(step != 6))
    count = mask.sum().item()
    loss = (model(x).square().sum(-1) * mask).sum() / count"""
IN_PLACE = """\
    mask = torch.full((8,), step != 6)
    count = int(mask.sum())
    loss = (model(x).square().sum(-1) * mask).sum()
    loss /= count"""
METHOD = IN_PLACE.replace("sum()\n    loss /= count", "sum().div(count)")
WEIGHTS = """\
    t = torch.linspace(2e-3, 9e-3, 8)
    if step == 6:
        t[3] = 0.0
    weight = torch.ones(8) / t
    loss = (weight * model(x).square().sum(-1)).mean()"""


def divided(folder, body):
    found = found_in(folder, HEAD + body + TAIL, 6)
    assert found["cause"]["code"] == "division-by-zero"
    return found


def test_number_that_is_no_count_may_stay_below_1(tmp_path):
    found = divided(tmp_path, TEMPERATURE)
    (fix,) = found["fixes"]
    assert "+    temperature = max(1e-3, 0.6 - step / 10)\n" in fix["diff"]
    assert "train.py:10 has computed" in found["cause"]["summary"]
    assert "count" not in fix["summary"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("body", "line"),
    [
        (FLOAT_COUNT, "* mask).sum() / max(count, 1e-6)\n"),
        (IN_PLACE, "+    loss /= max(count, 1)\n"),
        (METHOD, "* mask).sum().div(max(count, 1))\n"),
    ],
)
def test_count_in_every_spelling(tmp_path, body, line):
    found = divided(tmp_path, body)
    first, *_ = found["fixes"]
    assert line in first["diff"]
    assert first["verified"]


def test_bound_of_a_weight_is_above_those_that_are_good(tmp_path):
    first, *_ = divided(tmp_path, WEIGHTS)["fixes"]
    assert "(torch.ones(8) / t).clamp(max=1000)\n" in first["diff"]
    assert first["verified"]
