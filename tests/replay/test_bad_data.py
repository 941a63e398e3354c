"""The line that makes data bad is found where torch has no part in it."""

from __future__ import annotations

import inspect
import sys

import numpy as np
import pytest

from nanguard.replay.bad_data import FirstBadLine
from tests.replay.test_forms import found_in, line_of, run

FLAT = np.ones(8, np.float32)
HOLED = np.array([1.0, np.nan], np.float32)


def scaled(row):
    centred = row - row.mean()
    return centred / row.std()  # made here


def in_place(row):
    row = row.copy()
    row /= row.std()  # made here
    return row


def by_a_function(row):
    flat = row - row
    return np.log(flat)  # made here


def inside_of_another(row):
    several = [row + 1.0, row]
    return np.stack([scaled(one) for one in several])


class Kept:
    rows = (HOLED, FLAT)

    def __init__(self):
        self.table = [HOLED]

    def read(self, row):
        return self.table[0] * row[:2]

    def parsed(self, row):
        value = np.float32("nan")
        return value * row

    def guarded(self, row):
        best = float("inf")
        row = row / np.maximum(row.std(), 1e-6)
        return np.minimum(row, best)


def line_in(function, mark):
    lines, first = inspect.getsourcelines(function)
    return first + next(n for n, line in enumerate(lines) if mark in line)


@pytest.fixture(autouse=True)
def _no_warnings():
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize(
    ("function", "owner"),
    [
        (scaled, scaled),
        (in_place, in_place),
        (by_a_function, by_a_function),
        (inside_of_another, scaled),
    ],
)
def test_the_line_that_computes_it(function, owner):
    with FirstBadLine() as first:
        function(FLAT)
    assert first.place is not None
    assert (first.place[0], first.place[2]) == (owner.__code__, line_in(owner, "# made here"))
    assert sys.gettrace() is None


@pytest.mark.parametrize("name", ["read", "parsed", "guarded"])
def test_what_came_in_bad_or_is_good_was_computed_nowhere(name):
    with FirstBadLine() as first:
        getattr(Kept(), name)(FLAT)
    assert first.place is None


def test_a_debugger_keeps_its_own(monkeypatch):
    def other(*_given):
        return None

    sys.settrace(other)
    try:
        with FirstBadLine() as first:
            scaled(FLAT)
        assert sys.gettrace() is other
    finally:
        sys.settrace(None)
    assert first.place is None


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_sample_that_numpy_makes_bad(tmp_path, workers):
    done = run(tmp_path, "data.py", "arrays", workers)
    (incident,) = found_in(tmp_path)
    assert incident["origin"]["line"] == line_of("data.py", "FAULT OF NUMPY"), done.stderr
    assert incident["cause"]["code"] == "bad-input-data"
    assert "makes dataset item 22 NaN from finite numbers, without torch" in done.stderr
