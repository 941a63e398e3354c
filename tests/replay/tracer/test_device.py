"""What a device computes is read late and in one go; tried here with values that lie at hand."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

from nanguard.replay.tracer import tensor_values as values
from nanguard.replay.tracer.origin import path_of, producers
from nanguard.replay.tracer.trace import Trace
from tests.replay.tracer import test_trace
from tests.replay.tracer.test_trace import INF, origin, traced

TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]


@pytest.fixture
def late(monkeypatch):
    """Reads as little of a CPU's tensors as of a device's: nothing before ``resolve``."""
    monkeypatch.setattr(values, "is_late", lambda tensor: True)

    def too_early(tensor):
        raise AssertionError("a device was waited for")

    monkeypatch.setattr(values, "extremes_of", too_early)
    stop = Trace.stop

    def stop_and_read(trace):
        stop(trace)
        trace.resolve()

    monkeypatch.setattr(Trace, "stop", stop_and_read)


@pytest.mark.parametrize("dtype", [*TYPES, torch.float8_e5m2])
@pytest.mark.parametrize("bad", [math.nan, INF, -INF, None])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_one_number_tells_whether_a_tensor_is_finite(dtype, bad, count):
    tensors = [torch.full((7, 3), 2.0).to(dtype) for _ in range(count)]
    if bad is not None:
        tensors[-1] = torch.tensor([[1.0, bad, -3.0]]).to(dtype)
    numbers = values.read_all(values.largest_of(tensors))
    assert [math.isfinite(number) for number in numbers[:-1]] == [True] * (count - 1)
    assert math.isfinite(numbers[-1]) is (bad is None)
    if bad is not None:
        assert math.isnan(numbers[-1]) is math.isnan(bad)


def test_sparse_tensors_are_looked_at():
    full = torch.tensor([1.0, -INF, 0.0]).to_sparse()
    empty = torch.zeros(3).to_sparse()
    assert values.read_all(values.largest_of([full, empty])) == [INF, 0.0]


def test_tensors_of_several_types_keep_their_order():
    tensors = [torch.full((2,), float(n), dtype=TYPES[n % 3]) for n in range(9)]
    assert values.read_all(values.largest_of(tensors)) == [float(n) for n in range(9)]


# What holds where results are looked at when they are there has to hold for a device.
SAME = [
    test_trace.test_producer_is_told_from_propagators,
    test_trace.test_masks_are_meant,
    test_trace.test_mask_with_one_entry_left_is_silent,
    test_trace.test_masked_target_is_where_the_infinity_gets_out,
    test_trace.test_backward_names_the_forward_line_and_module,
    test_trace.test_where_trap_is_in_backward,
    test_trace.test_unfilled_parameter_is_init,
    test_trace.test_unfilled_buffer_that_is_filled_is_silent,
    test_trace.test_optimizer_is_a_phase_of_its_own,
    test_trace.test_partial_write_keeps_the_rest_bad,
    test_trace.test_custom_function_and_checkpoint,
    test_trace.test_bad_value_that_passes_through_finite_ones_is_a_suspect,
    test_trace.test_healing_an_operation_heals_what_follows,
    test_trace.test_training_in_another_thread_is_seen,
    test_trace.test_memory_that_nobody_saw_has_the_line_that_reads_it_first,
    test_trace.test_fake_and_meta_tensors_are_let_through,
]


class _Closer(Exception):
    """Numbers are wanted that take a closer look."""

    def __init__(self, index):
        super().__init__(index)
        self.index = index


@pytest.mark.parametrize("test", SAME, ids=lambda test: test.__name__.removeprefix("test_"))
def test_device_shows_the_same(test, late, monkeypatch):
    def first_look(trace, tensor, sink="loss"):
        found = origin(trace, tensor, sink)
        if found.detail is None:
            raise _Closer(found.index)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(test_trace, "origin", first_look)
        try:
            test()
        except _Closer as closer:
            index = closer.index
        else:
            return
    monkeypatch.setattr(test_trace, "traced", functools.partial(traced, look_at=index))
    test()


def test_first_look_tells_how_large_and_the_closer_one_what(late):
    def step():
        return (torch.log(torch.tensor([0.0, 1.0]) * -3.0) + 1.0).sum()

    with traced() as trace:
        loss = step()
    sink = trace.writer(loss)
    first = producers([sink])[0]
    assert (first.op, first.exact, first.detail) == ("aten.log", False, None)
    assert [row["max"] for row in path_of(first, [sink], trace)] == [None] * 5
    with traced(look_at=first.index) as trace:
        loss = step()
    sink = trace.writer(loss)
    first = producers([sink])[0]
    assert first.exact
    assert first.detail.inputs[0].negatives == 1
    rows = path_of(first, [sink], trace)
    assert [(row["op"], row["min"]) for row in rows[:2]] == [("input", 0.0), ("aten.mul", -3.0)]


def test_copies_are_known_from_what_they_copy(late, monkeypatch):
    looked = []
    largest = values.largest_of

    def counted(tensors):
        looked.extend(tensors)
        return largest(tensors)

    monkeypatch.setattr(values, "largest_of", counted)
    x = torch.tensor([1.0, 0.0, 2.0, 4.0], dtype=torch.bfloat16)
    with traced() as trace:
        y = torch.log(x)
        wide = y.float().clone()
        part = wide[2:].clone()
        narrow = wide.to(torch.float16)
        both = torch.cat([wide, wide])
    assert len(looked) == 4  # x, y, the part, and what was cast to a narrower type
    assert trace.writer(wide).bad
    assert trace.writer(both).bad
    assert trace.writer(narrow).bad
    assert not trace.writer(part).bad
    assert producers([trace.writer(both)])[0].op == "aten.log"


def test_lists_and_parameters_take_a_few_kernels(late, monkeypatch):
    calls = []
    norm, foreach = values._norm, torch._foreach_norm
    monkeypatch.setattr(values, "_norm", lambda *a: calls.append("one") or norm(*a))
    monkeypatch.setattr(torch, "_foreach_norm", lambda *a: calls.append("many") or foreach(*a))
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.ones(2, 4)
    for step in range(2):
        with traced() as trace:
            model(x).sum().backward()
            calls.clear() if step else None
            optimizer.step()
            optimizer.zero_grad()
    assert calls == ["many"] * len(calls)
    assert len(calls) <= 4
    assert not trace.bad
    with traced() as trace:
        calls.clear()
        model(x)
    # The parameters together, the input, and a result of each layer.
    assert sorted(calls) == ["many"] + ["one"] * 7


def test_bad_parameter_is_known_by_name(late):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with torch.no_grad():
        model[1].weight[0, 1] = math.nan
    with traced() as trace:
        loss = model(torch.ones(3, 2)).sum()
    found = origin(trace, loss)
    assert (found.phase, found.parameter) == ("init", "1.weight")
    assert found.detail.all_bad == 1
    # What is there before is no operation, and has the index of the one that reads it.
    assert [record.op for record in trace.bad] == ["aten.addmm", "aten.sum"]
    assert trace.bad[0].index == found.index


def test_which_infinity_an_extreme_is_matters_on_a_device(late):
    torch.manual_seed(0)  # weights of one sign in each row would make the sum the first NaN
    layer = nn.Linear(3, 3)
    with traced() as trace:
        x = torch.randn(4, 3).masked_fill(torch.ones(4, 3, dtype=torch.bool), -INF)
        loss = layer(x.amax(0, keepdim=True)).sum()
    assert origin(trace, loss).op == "aten.amax"


def test_closer_look_sees_what_was_overwritten(late):
    def step():
        x = torch.tensor([0.0, 4.0])
        return x.log_().sum()

    with traced() as trace:
        loss = step()
    index = origin(trace, loss).index
    with traced(look_at=index) as trace:
        loss = step()
    found = origin(trace, loss)
    assert found.op == "aten.log_"
    assert (found.detail.inputs[0].zeros, found.detail.inputs[0].high) == (1, 4.0)


def test_device_can_be_read_twice(late):
    x = torch.tensor([0.0, 4.0])
    with traced() as trace:
        loss = x.log().sum()
        trace.resolve()
        assert trace.writer(loss).bad
        twice = loss * 2
    assert [record.op for record in trace.bad] == ["aten.log", "aten.sum", "aten.mul"]
    assert trace.writer(twice).bad_writers == (trace.writer(loss),)


def test_one_sample_of_many_in_one_memory_is_bad(late):
    data = torch.tensor([[1.0, 2.0], [3.0, math.nan], [5.0, 6.0]])
    with traced() as trace:
        batch = torch.stack([data[0], data[1], data[2]])
        loss = batch.exp().sum()
    found = origin(trace, loss)
    assert (found.op, found.phase) == ("input", "data")
    assert found.detail.all_bad == 1
    with traced() as trace:
        good = (data[0].exp() + data[2]).sum()
    assert not trace.writer(good).bad


def test_what_was_bad_before_a_step_is_known_in_it(late):
    with traced() as trace:
        weights = torch.tensor([0.0, 1.0]).log()
        trace.begin_step(1)
        loss = (weights * 2).sum()
    assert origin(trace, loss).op == "aten.log"


def test_data_that_is_asked_for_its_gradient_is_data(late):
    x = torch.tensor([[1.0, math.nan]], requires_grad=True)
    with traced() as trace:
        loss = nn.Linear(2, 1)(x).sum()
    assert (origin(trace, loss).op, origin(trace, loss).phase) == ("input", "data")
