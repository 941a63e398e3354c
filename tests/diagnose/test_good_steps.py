"""What a repair makes of a good step: it should leave it as it is."""

from __future__ import annotations

import math

import pytest

from nanguard.diagnose.lab import Trial, Usual
from nanguard.diagnose.repairs import Repair
from nanguard.diagnose.session import fix_of, merit

USUAL = Usual([0.5, 0.6, 0.5])


def repair(with_it, without=0.5):
    helped = Trial("bounded", finite=True, result="replayed step 6: loss 0.5", loss=0.5)
    return Repair("bound it", trial=helped, on_good=(without, with_it))


def words(with_it):
    return fix_of(repair(with_it), USUAL, "/run")["how"]


def test_a_repair_that_keeps_good_steps_says_so():
    assert words(0.5) == "replayed step 6: loss 0.5; a good step is as before: loss 0.5"
    assert "a good step is as before" in words(0.502)


def test_a_repair_that_changes_good_steps_says_so_and_comes_second():
    assert words(0.4).endswith(
        "; it changes good steps as well: the loss of one is 0.4 instead of 0.5"
    )
    assert fix_of(repair(0.4), USUAL, "/run")["verified"]
    worse, better = repair(0.4), repair(0.5)
    ordered = sorted([worse, better], key=lambda one: merit(one, USUAL, at_source=False))
    assert ordered == [better, worse]


@pytest.mark.parametrize("value", [math.inf, math.nan, 0.9, -0.1])
def test_a_repair_that_makes_another_step_of_a_good_one_is_not_verified(value):
    assert not fix_of(repair(value), USUAL, "/run")["verified"]


def test_a_small_loss_is_compared_with_the_usual_one():
    assert fix_of(repair(1e-3, without=1e-5), USUAL, "/run")["verified"]
