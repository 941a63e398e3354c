"""Fewer points tell the same: every extreme, every gap, every break."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanguard.view.runs.curves import gaps_of, restarts_of, thin

NAN, INF = math.nan, math.inf
numbers = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([NAN, INF, -INF, 0.0, 1.0]),
)


def kind(value: float) -> str:
    return "nan" if value != value else "inf" if value > 0 else "-inf"


def covered(thinned, length):
    """Returns, for each point, the bucket that stands for it; None in a gap."""
    owner: list[int | None] = [None] * length
    bounds = sorted([*thinned.starts, *(g.start for g in thinned.gaps), length])
    for bucket, start in enumerate(thinned.starts):
        end = next(at for at in bounds if at > start)
        for at in range(start, end):
            owner[at] = bucket
    return owner


@settings(max_examples=300, deadline=None)
@given(
    st.lists(numbers, max_size=200),
    st.integers(1, 40),
    st.lists(st.integers(0, 199), max_size=3),
    st.lists(st.integers(1, 199), max_size=3, unique=True),
)
def test_nothing_is_lost(values, most, focus, restarts):
    restarts = sorted(at for at in restarts if at < len(values))
    given_values = array("f", values)
    thinned = thin(given_values, most=most, restarts=restarts, focus=focus)
    finite = [v for v in given_values if math.isfinite(v)]
    assert thinned.points == len(values)
    assert sum(thinned.counts) == len(finite)
    # Every point that is not finite lies in a gap of its kind, and no other does.
    in_gap = {at for gap in thinned.gaps for at in range(gap.start, gap.end)}
    assert in_gap == {at for at, v in enumerate(given_values) if not math.isfinite(v)}
    for gap in thinned.gaps:
        kinds = [kind(given_values[at]) for at in range(gap.start, gap.end)]
        assert [kinds.count(k) for k in ("nan", "inf", "-inf")] == [gap.nan, gap.inf, gap.neg_inf]
    # Every finite point lies within its bucket, and every bucket's ends are points of it.
    members: dict[int, list[float]] = {}
    for at, bucket in enumerate(covered(thinned, len(values))):
        if at not in in_gap:
            members.setdefault(bucket, []).append(given_values[at])
    for bucket, own in members.items():
        assert thinned.lows[bucket] == min(own)
        assert thinned.highs[bucket] == max(own)
        assert thinned.counts[bucket] == len(own)
    assert set(members) == set(range(len(thinned.starts)))


@settings(max_examples=200, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=120), st.integers(1, 20))
def test_no_line_crosses_a_gap(values, most):
    thinned = thin(array("f", values), most=most)
    for bucket in range(1, len(thinned.starts)):
        before, here = thinned.starts[bucket - 1], thinned.starts[bucket]
        crosses = any(before < gap.start < here for gap in thinned.gaps)
        assert crosses == (bucket in thinned.breaks)
    assert thinned.breaks[:1] == [0] if thinned.starts else thinned.breaks == []


def test_a_restart_breaks_the_line():
    thinned = thin(array("f", range(100)), most=10, restarts=[37])
    at = thinned.starts.index(37)
    assert thinned.breaks == [0, at]


def test_around_what_happened_every_point_is_kept():
    values = array("f", [float(n % 97) for n in range(100_000)])
    thinned = thin(values, most=2000, focus=[60_000])
    near = [n for n, start in enumerate(thinned.starts) if 59_800 < start < 60_200]
    assert len(near) == 399
    assert {thinned.counts[n] for n in near} == {1}
    assert thinned.largest == 50
    assert len(thinned.starts) < 2600


@pytest.mark.parametrize("apart", [50, 500, 2000])
def test_much_that_happened_is_kept_with_fewer_points_around_it(apart):
    values = array("f", [float(n % 97) for n in range(400_000)])
    focus = range(1000, 1000 + 100 * apart, apart)
    thinned = thin(values, most=4000, focus=focus)
    alone = {s for s, count in zip(thinned.starts, thinned.counts, strict=True) if count == 1}
    assert all({place - 8, place, place + 8} <= alone for place in focus)
    assert len(thinned.starts) <= 3 * 4000


def test_more_gaps_than_can_be_told_are_told_together():
    values = array("f", [NAN if n % 2 else float(n) for n in range(20_000)])
    gaps = gaps_of(values, most=10)
    assert len(gaps) <= 10
    assert sum(gap.nan for gap in gaps) == 10_000
    assert all(gap.mixed for gap in gaps)
    thinned = thin(values, most=100)
    assert sum(gap.count for gap in thinned.gaps) == 10_000
    assert sum(thinned.counts) == 10_000
    assert min(thinned.lows) == 0.0
    assert max(thinned.highs) == 19_998.0
    # Buckets between non-finite points are not joined to anything.
    assert len(thinned.breaks) == len(thinned.starts)


def test_large_numbers_that_overflow_a_sum_are_no_gap():
    assert gaps_of(array("d", [1e308] * 10)) == []


@pytest.mark.parametrize("kind", ["f", "d"])
def test_precision_is_that_of_the_log(kind):
    thinned = thin(array(kind, [0.1, 0.2]), most=1)
    assert thinned.lows.typecode == kind
    assert thinned.lows[0] == array(kind, [0.1])[0]


def test_restarts():
    assert restarts_of([1, 2, 2, 3]) == []
    assert restarts_of([1, 2, 3, 1, 2, 1]) == [3, 5]
    assert restarts_of([n % 2 for n in range(1000)]) is None
    assert restarts_of([]) == []
