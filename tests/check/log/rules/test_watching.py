"""The guard's watches over the numbers of a log, short and long."""

from __future__ import annotations

import math
import random
from array import array

import pytest

from nanguard.check.log import log_rule
from nanguard.check.log.log_rule import drift_of, runs_of, same_row, spikes_of
from nanguard.check.log.quantities import metric_of
from nanguard.check.log.rules.scaled_gradients import scale_of
from nanguard.check.log.series import Log, MetricSeries
from nanguard.check.rule import rules_for
from nanguard.signals import DriftWatch, ScaleWatch
from tests.cost import cpu_seconds


def series_of(name: str, values: list[float], stride: int = 1) -> MetricSeries:
    metric = metric_of(name)
    assert metric is not None
    series = MetricSeries(metric)
    count = len(values)
    series.extend(array("d", values), range(0, count * stride, stride), None, range(1, count + 1))
    return series


def descent(rng: random.Random, count: int, noise: float = 0.02) -> list[float]:
    return [
        (1.5 + 2.5 * math.exp(-5 * i / count)) * (1 + noise * rng.gauss(0, 1)) for i in range(count)
    ]


@pytest.mark.parametrize("count", [40, 120, 400, 2000])
@pytest.mark.parametrize("seed", range(5))
def test_healthy_logs_are_left_alone(count: int, seed: int):
    rng = random.Random(seed)
    norms = [math.exp(0.3 * rng.gauss(0, 1)) for _ in range(count)]
    log = Log("x", [series_of("loss", descent(rng, count)), series_of("grad_norm", norms)])
    assert [f for rule in rules_for("log") for f in rule.check(log)] == []


@pytest.mark.parametrize("count", [80, 200, 1000, 30_000, 100_000])
@pytest.mark.parametrize("positive", [False, True])
def test_a_spike_is_found_where_it_is(count: int, positive: bool):
    rng = random.Random(count)
    values = (
        [math.exp(0.1 * rng.gauss(0, 1)) for _ in range(count)] if positive else descent(rng, count)
    )
    at = int(0.7 * count)
    values[at] *= 20
    series = series_of("grad_norm" if positive else "loss", values)
    assert [s.point.index for s in spikes_of(series, positive=positive, bold=False)] == [at]


def test_a_long_series_is_watched_like_a_short_one(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("numpy")
    rng = random.Random(5)
    values = descent(rng, 40_000)
    for at in (5000, 5001, 20_480, 39_999):
        values[at] *= 3  # the fourth of a kind is what this run does now and then
    values[30_000] = math.nan
    series = series_of("loss", values)
    fast = [s.point.index for s in spikes_of(series, positive=False, bold=True)]
    monkeypatch.setattr(log_rule, "_LONG_RUN", 1 << 30)
    assert fast == [s.point.index for s in spikes_of(series, positive=False, bold=True)]
    assert fast == [5000, 5001, 20_480]


def test_the_cost_of_a_long_series_is_small():
    pytest.importorskip("numpy")
    rng = random.Random(1)

    def check(count: int) -> None:
        values = [2 + 0.05 * rng.gauss(0, 1) for _ in range(count)]
        log = Log("x", [series_of("loss", values)])
        assert [f for rule in rules_for("log") for f in rule.check(log)] == []

    assert cpu_seconds(lambda: check(400_000)) < 4 * 8 * cpu_seconds(lambda: check(50_000))


def test_a_divergence_is_dated_from_the_lowest_value():
    rng = random.Random(3)
    values = descent(rng, 100, 0.005)
    values += [values[-1] + 0.1 * (i + 1) for i in range(100)]
    found = drift_of(series_of("loss", values))
    assert found is not None
    assert 90 <= found[0].index <= 101


def test_a_divergence_that_came_back_is_forgiven():
    values = [2.0 * 0.97**i for i in range(100)]
    hump = values + [values[-1] + 0.1 * i for i in range(60)] + [values[-1]] * 100
    assert drift_of(series_of("loss", hump)) is None


def test_growth_from_the_start_needs_to_be_asked_for():
    values = [1.05**i for i in range(60)]
    quiet, asked = DriftWatch(block=3), DriftWatch(block=3, growth=3.0)
    assert not any(quiet.accept(v) for v in values)
    said = [message for v in values if (message := asked.accept(v))]
    assert len(said) == 1
    assert "times where it began" in said[0]
    assert not asked.recovered


def test_a_patient_watch_remembers_where_a_scale_came_from():
    scales = [65536.0] * 30 + [65536.0 / 2 ** (i // 30) for i in range(30 * 12)]
    usual, patient = ScaleWatch(), ScaleWatch(factor=1024.0, patient=True)
    assert not any(usual.accept(s) for s in scales)
    assert sum(bool(patient.accept(s)) for s in scales) == 1
    grown = ScaleWatch(factor=1024.0, patient=True)
    waves = [2.0 ** (16 - abs(i % 16 - 8)) for i in range(400) for _ in range(25)]
    assert not any(grown.accept(s) for s in waves)


def test_a_scale_that_is_logged_now_and_then():
    scales = [65536.0] * 10 + [max(1.0, 65536.0 / 2**i) for i in range(20)]
    assert scale_of(series_of("loss_scale", scales, stride=100)) is not None
    assert (
        scale_of(series_of("loss_scale", [65536.0, 32768.0] + [16384.0] * 40, stride=100)) is None
    )


def test_two_runs_in_one_log_are_told_apart():
    series = series_of("loss", [1.0] * 10)
    series.extend(array("d", [1.0] * 5), range(5), None, range(11, 16))
    assert runs_of(series) == [range(10), range(10, 15)]


def test_the_same_row_of_another_series():
    loss, norm = series_of("loss", [1.0, 2.0, 3.0]), series_of("grad_norm", [4.0, 5.0, 6.0])
    row = same_row(norm, loss[1])
    assert row is not None
    assert row.value == 5.0
    later = MetricSeries(norm.metric)
    later.extend(array("d", [7.0]), range(1, 2), None, range(9, 10))
    row = same_row(later, loss[1])
    assert row is not None
    assert row.value == 7.0


def test_a_run_that_goes_on_with_nan_for_ever_costs_little():
    found, long = cost_of_nan(200_000)
    assert found == {"non-finite-loss": 1000, "non-finite-grad-norm": 1000, "hidden-nan": 1000}
    assert long < 4 * 8 * cost_of_nan(25_000)[1]


def cost_of_nan(count: int) -> tuple[dict[str, int | None], float]:
    """Returns what is found in such a run, and what it costs."""
    bad = [math.nan] * (count - 1000)
    log = Log(
        "x",
        [
            series_of("loss", [2.5 + i % 7 / 100 for i in range(1000)] + [0.0] * (count - 1000)),
            series_of("grad_norm", [1.0 + i % 5 / 10 for i in range(1000)] + bad),
            series_of("scale", [1024.0] * count),
            series_of("acc", [0.5] * count),
            series_of("val_loss", [2.5] * 1000 + bad),
        ],
    )
    found: dict[str, int | None] = {}

    def check() -> None:
        found.update({f.name: f.step for rule in rules_for("log") for f in rule.check(log)})

    return found, cpu_seconds(check)
