"""When the size of a gradient is worth a warning: when it jumps, and not when it rises."""

from __future__ import annotations

import random

import pytest

from nanguard.guard.verdicts import Reading, Verdicts
from nanguard.settings import Settings


def warned_at(norms: list[float]) -> list[int]:
    verdicts = Verdicts(Settings(spikes="warn"), lanes={})
    verdicts.add_lane("x", lag=0, adversarial=False)
    found = []
    for step, norm in enumerate(norms):
        reading = Reading(closed=False, loss=1.0, grad_norm=norm, terms={})
        limits = verdicts.limits("x", ahead=0)
        found += [step for f in verdicts.passed("x", reading, limits, step) if "norm" in f.name]
    return found


@pytest.mark.parametrize(
    ("then", "warned"),
    [
        ([0.01 * 1.3**n for n in range(14)], []),
        ([1.0, 0.01], [200]),
        ([1.0, 1.1, 1.2, 0.9], [200]),
    ],
    ids=["rises", "jumps", "stays"],
)
def test_warned_of_once_when_it_jumps(then, warned):
    rng = random.Random(1)
    usual = [0.01 * (1 + 0.05 * rng.random()) for _ in range(200)]
    assert warned_at(usual + then) == warned
