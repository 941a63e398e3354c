"""Real failures, unmodified, under ``nanguard run``: everything the label says must be found."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks.accuracy import cases_in, first_incident, judge

# A sixth of them with the other tests; all of them take five minutes on two cores.
_EVERY = 1 if os.environ.get("NANGUARD_TESTS") == "exhaustive" else 6
_OPEN = cases_in(Path(__file__).parents[1] / "cases" / "open")[::_EVERY]
_FAILING = [case for case in _OPEN if not case.healthy]
# Its fix needs another loss, which no change of a line can give.
_WITHOUT_FIX = {"swav_prototypes"}


@pytest.fixture(scope="module")
def incidents():
    """The first incident of every case."""
    return {case.name: first_incident(case) for case in _OPEN}


@pytest.mark.parametrize("case", _FAILING, ids=lambda case: case.name)
def test_failure_is_named(case, incidents):
    judged = judge(case, incidents[case.name])
    fixed = judged.pop("fix")
    assert [column for column, right in judged.items() if right is False] == []
    assert fixed or case.name in _WITHOUT_FIX


@pytest.mark.parametrize("case", [c for c in _OPEN if c.healthy], ids=lambda case: case.name)
def test_healthy_script_is_silent(case, incidents):
    assert incidents[case.name] is None
