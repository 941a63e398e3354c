"""Spikes, drift and a falling scale; above all, silence on healthy runs."""

from __future__ import annotations

import math
import random
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanguard.settings import Settings
from nanguard.signals import DriftWatch, ScaleWatch, SpikeWindow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

DEFAULTS = Settings()


def window(*, positive: bool = False, **options: Any) -> SpikeWindow:
    chosen = {
        "size": DEFAULTS.spike_window,
        "warmup": DEFAULTS.spike_warmup,
        "warn": DEFAULTS.spike_warn,
        "act": DEFAULTS.spike_act,
        **options,
    }
    return SpikeWindow(positive=positive, **chosen)


def watch(values: Iterable[float], **options: Any) -> tuple[list[int], list[int]]:
    """Returns the steps that were warned about and those that were acted on."""
    watched = window(**options)
    warned, acted = [], []
    for step, value in enumerate(values):
        limits = watched.limits()
        if not value <= limits.act:
            acted.append(step)
            watched.reject(value)
            continue
        if not value <= limits.warn:
            warned.append(step)
        watched.accept(value)
    return warned, acted


def gauss(rng: random.Random, n: int) -> list[float]:
    return [2.5 + 0.05 * rng.gauss(0, 1) for _ in range(n)]


def decay(rng: random.Random, n: int) -> list[float]:
    return [2 + 8 * math.exp(-i / 300) + 0.05 * rng.gauss(0, 1) for i in range(n)]


def warmup_bump(rng: random.Random, n: int) -> list[float]:
    """A loss that rises for a while when the learning rate has warmed up."""

    def level(i: int) -> float:
        if i < 200:
            return 10 - 6 * i / 200
        if i < 300:
            return 4 + math.sin(math.pi * (i - 200) / 100)
        return 4 - min(1.0, (i - 300) / 1000)

    return [level(i) + 0.05 * rng.gauss(0, 1) for i in range(n)]


def exponential(rng: random.Random, n: int) -> list[float]:
    return [rng.expovariate(1.0) for _ in range(n)]


def cyclic(rng: random.Random, n: int) -> list[float]:
    return [1 + 0.5 * math.sin(i / 50) + 0.05 * rng.gauss(0, 1) for i in range(n)]


def overfitted(rng: random.Random, n: int) -> list[float]:
    return [2.3 * math.exp(-i / 50) + 1e-4 * rng.expovariate(1.0) for i in range(n)]


def negative(rng: random.Random, n: int) -> list[float]:
    return [-50 - i / 100 + rng.gauss(0, 1) for i in range(n)]


def constant(_rng: random.Random, n: int) -> list[float]:
    return [0.6931] * n


HEALTHY: dict[str, Callable[[random.Random, int], list[float]]] = {
    f.__name__: f
    for f in (gauss, decay, warmup_bump, exponential, cyclic, overfitted, negative, constant)
}


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("seed", range(5))
def test_healthy_losses_are_left_alone(name: str, seed: int):
    assert watch(HEALTHY[name](random.Random(seed), 3000)) == ([], [])


@pytest.mark.parametrize("seed", range(5))
def test_healthy_norms_are_left_alone(seed: int):
    rng = random.Random(seed)
    norms = [math.exp(0.5 * rng.gauss(0, 1)) * (1 + 3 * math.exp(-i / 100)) for i in range(3000)]
    assert watch(norms, positive=True) == ([], [])


@pytest.mark.parametrize("seed", range(20))
def test_heavy_tails_are_hardly_ever_acted_on(seed: int):
    # Ratios of normals have no variance at all: the worst a healthy loss can do.
    rng = random.Random(seed)
    values = [rng.gauss(0, 1) / max(abs(rng.gauss(0, 1)), 1e-3) for _ in range(3000)]
    warned, acted = watch(values)
    assert len(acted) <= 2
    assert len(warned) <= 6


@pytest.mark.parametrize("factor", [1.5, 2, 10, 1000])
def test_a_spike_of_a_language_model_is_acted_on(factor: float):
    values = gauss(random.Random(1), 400)
    values[300] *= factor
    assert watch(values) == ([], [300])


def test_a_jump_of_the_gradient_norm():
    rng = random.Random(2)
    norms = [math.exp(0.2 * rng.gauss(0, 1)) for _ in range(400)]
    norms[300] = 5.4  # the step before a NaN in a real report
    norms[350] = 100.0
    assert watch(norms, positive=True) == ([300], [350])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_value_fails_the_limits_and_never_enters(bad: float):
    values = gauss(random.Random(3), 400)
    clean = window()
    for value in values:
        clean.accept(value)
    dirty = window()
    for step, value in enumerate(values):
        if step % 7 == 0:
            assert not bad <= dirty.limits().act
            dirty.accept(bad)
        dirty.accept(value)
    assert dirty.limits() == clean.limits()
    assert len(dirty) == len(clean)


def test_a_window_that_is_learning_lets_every_finite_value_pass():
    watched = window(warmup=64)
    for _ in range(63):
        watched.accept(1.0)
    assert watched.limits().act == sys.float_info.max
    watched.accept(1.0)
    assert watched.limits().act < 2.0


def test_a_rare_kind_of_batch_is_not_rejected_for_ever():
    rng = random.Random(4)
    values = [(3.0 if i % 100 == 99 else 1.0) + 0.05 * rng.gauss(0, 1) for i in range(3000)]
    _, acted = watch(values)
    assert len(acted) <= 4


def test_a_new_level_is_learned_after_a_few_rejections():
    values = [1.0 + 0.01 * (i % 5) for i in range(300)] + [3.0 + 0.01 * (i % 5) for i in range(300)]
    warned, acted = watch(values)
    assert acted == [300, 301, 302]
    assert all(step < 450 for step in warned)


def test_growing_losses_stay_rejected():
    values = [1.0 + 0.01 * (i % 5) for i in range(300)] + [2.0 * 3.0**i for i in range(20)]
    _, acted = watch(values)
    assert acted == list(range(300, 320))


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=200), st.booleans())
def test_no_sequence_of_values_breaks_a_window(values: list[float], positive: bool):
    watched = window(size=32, warmup=16, positive=positive)
    for value in values:
        limits = watched.limits()
        assert not math.nan <= limits.act
        assert limits.warn <= limits.act
        if value <= limits.act:
            watched.accept(value)
        else:
            watched.reject(value)


@given(st.lists(st.floats(-1e6, 1e6), max_size=120), st.integers(0, 120))
def test_a_window_goes_on_where_its_state_was_taken(values: list[float], cut: int):
    def play(watched: SpikeWindow, part: list[float]) -> list[Any]:
        seen = []
        for value in part:
            limits = watched.limits()
            seen.append(limits)
            (watched.accept if value <= limits.act else watched.reject)(value)
        return seen

    whole, first, second = (window(size=32, warmup=16) for _ in range(3))
    expected = play(whole, values)
    got = play(first, values[:cut])
    second.load_state_dict(first.state_dict())
    assert got + play(second, values[cut:]) == expected


# --- drift -----------------------------------------------------------------------------------


def drifts(values: Iterable[float], block: int = 64) -> list[int]:
    watched = DriftWatch(block=block)
    return [step for step, value in enumerate(values) if watched.accept(value)]


def test_a_loss_that_gives_back_what_it_gained_is_told_once():
    rng = random.Random(5)
    falling = [4 - 2 * min(1, i / 1000) + 0.05 * rng.gauss(0, 1) for i in range(1500)]
    rising = [2 + 2.5 * i / 1000 + 0.05 * rng.gauss(0, 1) for i in range(1000)]
    told = drifts(falling + rising)
    assert len(told) == 1
    assert 1500 < told[0] < 2200


def test_drift_is_told_again_after_a_new_best():
    wave = [4 - 2 * min(1, i / 500) for i in range(600)] + [2 + i / 200 for i in range(400)]
    again = [4 - 3 * min(1, i / 500) for i in range(600)] + [1 + i / 150 for i in range(400)]
    assert len(drifts(wave + again)) == 2


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_losses_do_not_drift(name: str):
    assert drifts(HEALTHY[name](random.Random(6), 4000)) == []


def test_a_loss_that_never_fell_does_not_drift():
    """The generator of a GAN, the value loss of an agent whose returns grow."""
    rng = random.Random(7)
    assert drifts([0.7 + i / 300 + 0.1 * rng.gauss(0, 1) for i in range(3000)]) == []


# --- loss scale ------------------------------------------------------------------------------


def falls(scales: Iterable[float]) -> list[int]:
    watched = ScaleWatch()
    return [step for step, scale in enumerate(scales) if watched.accept(scale)]


def test_finding_its_first_level_is_how_a_scaler_works():
    assert falls([2.0 ** max(8, 16 - i) for i in range(200)]) == []


def test_growing_and_backing_off_now_and_then_is_healthy():
    assert falls([2.0 ** (15 + (i // 50) % 2) for i in range(1000)]) == []


def test_a_scale_that_keeps_falling_is_told_once():
    told = falls([65536.0] * 40 + [65536.0 / 2 ** (i // 3) for i in range(40)])
    assert len(told) == 1


def test_a_scale_below_one_is_told_at_once():
    assert falls([2.0**-i for i in range(5)]) == [1]


def test_what_was_usual_lately_is_not_unusual_once_the_others_lie_closer():
    rng = random.Random(3)
    watched = window(size=128)
    for _ in range(100):
        watched.accept(2.0 + rng.random() * 4)
    for step in range(110):  # the loss falls, and now and then a hard batch comes
        value = 5.4 if step == 20 else 0.003 * (1 + rng.random())
        assert step < 60 or value <= watched.limits().warn
        watched.accept(value)
    assert 2.8 <= watched.limits().warn < 50.0


def test_unusual_values_that_lie_close_together_are_one_event():
    rng = random.Random(5)
    values = [
        (4.0 + 4.0 * rng.random() if i % 400 >= 390 else 1.0) + 0.05 * rng.gauss(0, 1)
        for i in range(4000)
    ]
    warned, _ = watch(values, act=1e9)
    assert [step // 400 for step in warned[:3]] == [0, 1, 2]
    assert len(warned) <= 4


def test_what_grows_within_an_event_is_news_again():
    values = [1.0 + 0.01 * (i % 5) for i in range(300)] + [2.0 * 1.5**i for i in range(8)]
    warned, _ = watch(values, act=1e9)
    assert warned[0] == 300
    assert 2 <= len(warned[1:]) <= 4


def test_the_same_jump_is_news_again_after_a_while():
    values = [5.0 if i in (300, 340) else 1.0 + 0.01 * (i % 5) for i in range(400)]
    assert watch(values, act=1e9)[0] == [300, 340]
