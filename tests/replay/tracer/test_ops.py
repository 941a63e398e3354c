"""Whole numbers that went over the end of their type."""

from __future__ import annotations

import pytest
import torch

from nanguard.replay.tracer.ops import may_have_wrapped
from nanguard.replay.tracer.origin import origin_of
from nanguard.replay.tracer.trace import Trace


def traced(call):
    trace = Trace()
    trace.start()
    trace.begin_step(0)
    try:
        call()
    finally:
        trace.stop()
    return trace


SMALL = torch.tensor([1, 20, 3], dtype=torch.int16)


def counted():
    counts = torch.full((3,), 32760, dtype=torch.int16)
    counts += SMALL
    return (counts.sum() / counts).sqrt()


def multiplied():
    return 1.0 / torch.tensor([2048, 2048, 1024], dtype=torch.int32).prod(dtype=torch.int32)


def narrowed():
    return torch.log(torch.tensor([200, 3]).to(torch.int8).float())


@pytest.mark.parametrize("call", [counted, multiplied, narrowed])
def test_bad_value_made_of_numbers_that_wrapped(call):
    trace = traced(call)
    origin = origin_of(trace.bad[0], trace, sink="loss")
    assert origin.wrapped is not None
    assert origin.wrapped.site is not None
    assert origin.wrapped.site.function == call.__name__


def fits():
    return (SMALL + SMALL - 40).sqrt()


def looked_up():
    hashed = torch.tensor([2**31 - 5, 7], dtype=torch.int32) * 1664525
    return torch.log(torch.zeros(64)[(hashed % 64).long()])


@pytest.mark.parametrize("call", [fits, looked_up])
def test_numbers_that_fit_or_are_only_looked_up_with_are_not_blamed(call):
    trace = traced(call)
    assert origin_of(trace.bad[0], trace, sink="loss").wrapped is None


@pytest.mark.parametrize(
    ("values", "dtype", "wrapped"),
    [
        ([30000, -30000], torch.int16, True),
        ([-100, 100], torch.int16, False),
        ([-30000, -20000], torch.int16, False),
        ([2**40, -(2**62)], torch.int64, False),
    ],
)
def test_look_of_numbers_that_wrapped_before(values, dtype, wrapped):
    assert may_have_wrapped(torch.tensor(values, dtype=dtype)) is wrapped


def test_whole_numbers_under_vmap_are_let_through():
    counts = torch.full((3, 4), 32760, dtype=torch.int16)

    def call():
        torch.func.vmap(lambda row: (row + row).float().log())(counts)

    assert traced(call).bad
