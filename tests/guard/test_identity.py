"""A run that met bad batches ends bit-identical to the run that never saw them."""

from __future__ import annotations

import pytest
import torch

from nanguard.testing import inject
from tests.training import INF, NAN, Run, adamw, batches, differences, poisoned, without

OPTIMIZERS = {
    "adamw fused": adamw(fused=True),
    "adamw foreach": adamw(foreach=True),
    "adamw for-loop": adamw(foreach=False, fused=False),
    "adam fused amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, fused=True),
    "sgd fused": lambda p: torch.optim.SGD(
        p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, fused=True
    ),
    "sgd fused, no momentum": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
}
if hasattr(torch.optim, "Adafactor"):  # since torch 2.5
    OPTIMIZERS["adafactor"] = lambda p: torch.optim.Adafactor(p, lr=1e-2)
PLACES = {
    "first": (0,),
    "last": (23,),
    "consecutive": (7, 8, 9),
    "while others are in flight": (5, 6, 8, 10),
    "first, last and between": (0, 1, 11, 22, 23),
}


def whole_steps(bad: tuple[int, ...], accumulate: int) -> set[int]:
    """Returns the batches of every step that a bad batch voids."""
    return {b // accumulate * accumulate + i for b in bad for i in range(accumulate)}


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["adamw fused", "adamw foreach"])
def test_bad_batches_leave_no_trace(name: str, place: str, accumulate: int, lag: int):
    bad, data = PLACES[place], batches(24)
    void = whole_steps(bad, accumulate)
    clean = Run(OPTIMIZERS[name], accumulate=accumulate).bare(without(data, void)).everything()
    run = Run(OPTIMIZERS[name], accumulate=accumulate).guarded(poisoned(data, bad), lag=lag)
    assert differences(run.everything(), clean) == []
    summary = run.guard.summary()
    assert summary.skipped == len(void) // accumulate
    assert summary.applied == (24 - len(void)) // accumulate


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, lag: int):
    bad, data = (0, 6, 7, 15), batches(16)
    clean = Run(OPTIMIZERS[name]).bare(without(data, bad)).everything()
    run = Run(OPTIMIZERS[name]).guarded(poisoned(data, bad), lag=lag)
    assert differences(run.everything(), clean) == []


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_every_non_finite_value(value: float, lag: int):
    bad, data = (3, 9), batches(12)
    clean = Run().bare(without(data, bad)).everything()
    run = Run().guarded(poisoned(data, bad, value), lag=lag)
    assert differences(run.everything(), clean) == []


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("fault", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("into", ["input", "loss", "gradient"])
def test_every_way_in(into: str, fault: str, lag: int):
    data, bad = batches(14), (4, 5, 9)
    clean = Run().bare(without(data, bad)).everything()
    run = Run()
    guard = run.make_guard(lag=lag)
    parameter = "last.weight" if into == "gradient" else None
    with inject(guard, fault, into=into, step=bad, parameter=parameter) as injection:
        for batch in guard.watch(data):
            guard.backward(run.loss(batch))
            guard.step(max_norm=1.0)
    guard.close()
    assert injection.fired >= len(bad)
    assert differences(run.everything(), clean) == []
    expected = "non-finite-gradient" if into == "gradient" else "non-finite-loss"
    assert {event.finding.name for event in guard.summary().events} == {expected}
    assert [event.finding.step for event in guard.summary().events] == list(bad)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_spike_is_skipped_like_a_bad_batch(lag: int):
    data, bad = batches(60), (40, 50)
    clean = Run().guarded(without(data, bad), lag=lag, spike_warmup=16, spike_window=32)
    clean_state = clean.everything()
    run = Run()
    guard = run.make_guard(lag=lag, spike_warmup=16, spike_window=32)
    with inject(guard, "spike", into="loss", step=bad, factor=1e3):
        for batch in guard.watch(data):
            guard.backward(run.loss(batch))
            guard.step(max_norm=1.0)
    guard.close()
    assert differences(run.everything(), clean_state) == []
    spikes = [e for e in guard.summary().events if e.finding.name == "loss-spike"]
    assert [event.finding.step for event in spikes] == list(bad)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_healthy_run_is_the_bare_run(lag: int):
    data = batches(40)
    bare = Run().bare(data).everything()
    run = Run().guarded(data, lag=lag, snapshot_every=7, scan_every=3)
    assert differences(run.everything(), bare) == []
    assert run.guard.summary().events == []


def test_the_comparison_sees_a_single_bit():
    data = batches(8)
    left = Run().bare(data).everything()
    right = Run().bare(data).everything()
    assert differences(left, right) == []
    right["model"]["norm.running_mean"].view(torch.int32)[2] ^= 1
    assert differences(left, right) == ["/model/norm.running_mean"]


def test_bad_batches_without_a_guard_do_leave_a_trace():
    data = batches(12)
    clean = Run().bare(without(data, [5])).everything()
    assert "/model/norm.running_mean" in differences(
        Run().bare(poisoned(data, [5])).everything(), clean
    )
