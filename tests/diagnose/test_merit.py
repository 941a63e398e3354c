"""Of two repairs that make a step finite, the one that leaves its loss as usual comes first."""

from __future__ import annotations

import pytest

from tests.diagnose.running import found_in

pytestmark = pytest.mark.slow

WEIGHTED = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(8):
    x, t = torch.randn(8, 4), torch.rand(8) * 0.9 + 0.1
    if step == 6:
        t[3] = 0.0
    weight = (t + 1) / t.sqrt()
    loss = (weight[:, None] * (model(x) - x) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def fixes_of(folder, text):
    found = found_in(folder, text, 6)
    assert found["cause"]["code"] == "division-by-zero"
    return found["fixes"]


def test_weight_without_bound_is_bounded_and_not_its_divisor(tmp_path):
    first, *others = fixes_of(tmp_path, WEIGHTED)
    assert "+    weight = ((t + 1) / t.sqrt()).clamp(max=100)\n" in first["diff"]
    assert first["verified"]
    assert "far above" not in first["how"]
    (other,) = [fix for fix in others if "t.sqrt().clamp(min=1e-6)" in fix.get("diff", "")]
    assert "far above the " in other["how"]


def test_divisor_comes_first_where_it_leaves_the_loss_as_usual(tmp_path):
    text = WEIGHTED.replace("(t + 1) / t.sqrt()", "1 / (1 + (t / t).sum())").replace(
        "weight[:, None]", "weight"
    )
    first, *_ = fixes_of(tmp_path, text)
    assert first["verified"]
    assert "(t / t.clamp(min=1e-6))" in first["diff"]
    assert "far above" not in first["how"]


SWINGING = """
import torch
from torch import nn

torch.manual_seed(0)
frequency = nn.Parameter(torch.tensor(0.3))
optimizer = torch.optim.SGD([frequency], lr=0.1)
for step in range(12):
    x = torch.randn(16) * 0.1
    if step == 9:
        x = torch.full((16,), 0.5)
    y = x / x.std()
    loss = torch.sin(frequency * y).mean() + frequency**4
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
open("last", "w").write(frequency.item().hex())
"""


def test_repair_that_ruins_the_weights_a_step_later_is_not_verified(tmp_path):
    found = found_in(tmp_path, SWINGING, 9)
    clamped = [fix for fix in found["fixes"] if "x.std().clamp(" in fix.get("diff", "")]
    assert clamped
    for fix in clamped:
        assert fix["how"].startswith("replayed step 9: loss ")
        assert "2 steps on it is bad again" in fix["how"]
        assert not fix["verified"]


LASTING = SWINGING.replace("full((16,), 0.5)", "full((16,), 0.0)")


def test_repair_that_lasts_is_verified_and_leaves_nothing_behind(tmp_path):
    explained, plain = tmp_path / "explained", tmp_path / "plain"
    for folder in (explained, plain):
        folder.mkdir()
    found = found_in(explained, LASTING, 9)
    assert found["fixes"][0]["verified"]
    assert "2 steps on it is still good" in found["fixes"][0]["how"]
    assert "a good step is as before: loss " in found["fixes"][0]["how"]
    found_in(plain, LASTING, 9, "--no-trace")
    assert (explained / "last").read_text() == (plain / "last").read_text()
