"""What is usual for a loss, and which trial leaves a step as usual."""

from __future__ import annotations

import math

import pytest

from nanguard.diagnose.lab import Trial, Usual
from tests.diagnose.running import found_in

pytestmark = pytest.mark.slow

REGRESSION = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
for step in range(8):
    x = torch.randn(32, 16)
    loss = ((model(x) - x.sum(1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def trial(loss, finite=True):
    return Trial("a change", finite, "replayed", loss)


@pytest.mark.parametrize(
    ("losses", "usual"),
    [
        ([2.0, 1.0, 3.0], 2.0),
        ([-2.0, 1.0, math.nan, 0.0, 3.0], 2.0),
        ([17.0, 33536.0, 2.9e24], 17.0),
        ([1.0, 1e5, 1.1, 0.9, 1.0], 1.0),
        ([2.0] * 10 + [2.0**n for n in range(1, 11)], 2.0),
        ([], math.inf),
        ([0.0, math.inf], math.inf),
    ],
)
def test_usual_is_what_was_before_a_divergence(losses, usual):
    assert Usual(losses).loss == usual


@pytest.mark.parametrize(
    ("losses", "loss", "good"),
    [
        ([2.0, 1.0, 3.0], 150.0, True),
        ([2.0, 1.0, 3.0], -250.0, False),
        ([17.0, 33536.0, 2.9e24], 23.0, True),
        ([17.0, 33536.0, 2.9e24], 88060.0, False),
        ([0.1, 50.0, 0.1, 50.0, 0.1], 60.0, True),
        ([-0.003, 0.001, -0.005], 4.0, True),
        ([-0.003, 0.001, -0.005], 40.0, False),
        ([], 1e5, True),
        ([], 3.3e20, False),
        ([0.0, 0.0], 3.0, True),
        ([2.0, 1.0, 3.0], None, True),
    ],
)
def test_trial_far_above_is_not_good(losses, loss, good):
    usual = Usual(losses)
    assert usual.allows(trial(loss)) is good
    assert usual.is_far_from(trial(loss)) is not good


def test_trial_that_was_bad_or_not_made_is_neither_good_nor_far():
    usual = Usual([1.0])
    for finite in (False, None):
        assert not usual.allows(trial(1.0, finite))
        assert not usual.is_far_from(trial(1e9, finite))
    assert not usual.allows(None)


def test_divergence_is_repaired_by_what_brings_the_loss_back(tmp_path):
    found = found_in(tmp_path, REGRESSION)
    assert found["cause"]["code"] == "exploding-optimization"
    assert found["cause"]["confidence"] >= 0.95
    clip, lower = found["fixes"]
    assert "loss.backward()\n+    torch.nn.utils.clip_grad_norm_(model" in clip["diff"]
    assert clip["verified"]
    assert "far above the " in lower["how"]


@pytest.mark.exhaustive
def test_fix_that_leaves_the_step_absurd_proves_nothing(tmp_path):
    text = REGRESSION.replace("lr=5.0", "lr=1e-3").replace(
        "(model(x) -", "(model(x) / (0.6 - min(step, 6) * 0.1 if step < 6 else 0.0) -"
    )
    found = found_in(tmp_path, text)
    (fix,) = found["fixes"]
    assert "far above the " in fix["how"]
    assert found["cause"]["code"] == "division-by-zero"
    assert found["cause"]["confidence"] < 0.9


@pytest.mark.exhaustive
def test_exponent_is_bounded_more_closely_where_one_element_decides_the_step(tmp_path):
    text = REGRESSION.replace("lr=5.0", "lr=1e-3").replace(
        "((model(x) - x.sum(1, keepdim=True)) ** 2).mean()",
        "(model(x) + 300.0 * (step == 4) * (x == x.max()).any(1, keepdim=True)).exp().mean()",
    )
    found = found_in(tmp_path, text)
    assert found["cause"]["code"] == "exp-overflow"
    first, second, *_ = found["fixes"]
    assert first["verified"]
    assert ".clamp(max=5)" in first["diff"]
    assert "far above the " in second["how"]
    assert ".clamp(max=20)" in second["diff"]
