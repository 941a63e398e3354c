"""The ladder, rung by rung."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanguard.guard.policy import Action, Policy, Trouble
from nanguard.settings import Settings


def actions(policy: Policy, steps: list[int], **trouble: Any) -> list[str]:
    return [policy.bad(Trouble(step, **trouble)).action.value for step in steps]


def test_the_rungs_come_in_order_and_each_is_bounded():
    policy = Policy(Settings(max_skips=2, max_lr_cuts=2, max_rollbacks=1))
    got = actions(policy, list(range(10)), can_roll_back=True)
    assert got == [
        *("skip", "skip", "cut-lr"),
        *("skip", "skip", "cut-lr"),
        *("skip", "skip", "rollback"),
        "skip",
    ]
    assert actions(policy, [10, 11], can_roll_back=True) == ["skip", "stop"]
    assert policy.lr_factor == 0.25


def test_bad_steps_far_apart_are_only_skipped():
    policy = Policy(Settings(max_skips=1, recent=10))
    assert actions(policy, [0, 10, 20, 30]) == ["skip"] * 4
    assert actions(policy, [39]) == ["cut-lr"]


def test_without_a_snapshot_there_is_no_rollback():
    policy = Policy(Settings(max_skips=0, max_lr_cuts=0))
    decision = policy.bad(Trouble(3, can_roll_back=False))
    assert decision.action is Action.STOP
    assert "no good snapshot" in decision.reason


def test_poisoned_parameters_are_never_skipped():
    policy = Policy(Settings(max_rollbacks=1))
    assert actions(policy, [5, 6], poisoned=True, can_roll_back=True) == ["rollback", "stop"]
    assert actions(Policy(Settings()), [5], poisoned=True) == ["stop"]


@pytest.mark.parametrize(("on_bad", "action"), [("stop", "stop"), ("rollback", "rollback")])
def test_on_bad_chooses_the_first_rung(on_bad: Any, action: str):
    assert actions(Policy(Settings(on_bad=on_bad)), [0], can_roll_back=True) == [action]


def test_max_bad_bounds_the_whole_run():
    policy = Policy(Settings(max_bad=2, recent=1))
    assert actions(policy, [0, 1000, 2000]) == ["skip", "skip", "stop"]


def test_the_learning_rate_climbs_back_after_good_steps():
    policy = Policy(Settings(max_skips=0, max_lr_cuts=2, lr_climb_after=3))
    actions(policy, [0, 1])
    assert policy.lr_factor == 0.25
    assert [policy.good() for _ in range(3)] == [False, False, True]
    assert policy.lr_factor == 0.5
    assert [policy.good() for _ in range(3)] == [False, False, True]
    assert policy.lr_factor == 1.0
    assert [policy.good() for _ in range(9)] == [False] * 9


def test_a_bad_step_begins_the_climb_anew():
    policy = Policy(Settings(max_skips=1, recent=1, lr_climb_after=3))
    actions(policy, [0])
    policy._settings = Settings(max_skips=0, lr_climb_after=3)
    actions(policy, [1])
    policy.good()
    policy.good()
    policy._settings = Settings(max_skips=5, lr_climb_after=3)
    actions(policy, [2])
    assert [policy.good() for _ in range(3)] == [False, False, True]


def test_the_floor_ends_the_cuts():
    policy = Policy(Settings(max_skips=0, max_lr_cuts=10, lr_floor=0.3))
    got = actions(policy, [0, 1, 2], can_roll_back=True)
    assert got == ["cut-lr", "cut-lr", "rollback"]
    assert policy.lr_factor == 0.3


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=300))
def test_no_run_is_skipped_for_ever(story: list[tuple[bool, bool, bool]]):
    settings = Settings(max_skips=3, recent=20, max_lr_cuts=2, max_rollbacks=2)
    policy = Policy(settings)
    stopped = False
    recent: list[int] = []
    for step, (good, poisoned, snapshot) in enumerate(story):
        if good:
            policy.good()
            continue
        decision = policy.bad(Trouble(step, poisoned=poisoned, can_roll_back=snapshot))
        stopped = decision.action is Action.STOP
        assert not (poisoned and decision.action in (Action.SKIP, Action.CUT_LR))
        recent = [s for s in recent if s > step - settings.recent]
        if decision.action is Action.SKIP:
            recent.append(step)
        assert len(recent) <= settings.max_skips * (
            1 + settings.max_lr_cuts + settings.max_rollbacks
        )
        assert settings.lr_floor <= policy.lr_factor <= 1.0
        if stopped:
            break


@given(st.lists(st.booleans(), max_size=60), st.integers(0, 60))
def test_a_policy_goes_on_where_its_state_was_taken(story: list[bool], cut: int):
    settings = Settings(max_skips=2, recent=9, lr_climb_after=4)

    def play(policy: Policy, part: list[tuple[int, bool]]) -> list[Any]:
        return [policy.good() if good else policy.bad(Trouble(step)).action for step, good in part]

    steps = list(enumerate(story))
    whole, first = Policy(settings), Policy(settings)
    expected = play(whole, steps)
    got = play(first, steps[:cut])
    second = Policy(settings)
    second.load_state_dict(first.state_dict())
    assert got + play(second, steps[cut:]) == expected


def test_what_was_known_to_be_bad_does_not_climb():
    policy = Policy(Settings(max_skips=1, max_lr_cuts=1, max_rollbacks=0))
    assert actions(policy, list(range(0, 500, 3)), known="sample 7 again") == ["skip"] * 167
    assert policy.bad(Trouble(500, known="sample 7 again")).reason == "sample 7 again"
    # What is not known climbs as before, and a run that is bad itself is never skipped.
    assert actions(policy, [501, 502, 503]) == ["skip", "cut-lr", "skip"]
    assert actions(policy, [504], known="sample 7 again", poisoned=True) == ["stop"]


@pytest.mark.parametrize(("steps", "excused"), [(range(50), 20), (range(0, 300, 3), 100)])
def test_a_run_in_which_nearly_all_is_known_to_be_bad_comes_to_an_end(steps, excused):
    policy = Policy(Settings(max_skips=1, max_lr_cuts=0))
    got = actions(policy, list(steps), known="sample 7 again", rate_matters=False)
    assert got[: excused + 1] == ["skip"] * min(excused + 1, len(steps))
    assert set(got[excused + 1 :]) <= {"stop"}


def test_more_than_half_of_the_steps_are_no_exception():
    policy = Policy(Settings(max_skips=1, max_lr_cuts=0))
    steps = [step for step in range(90) if step % 10 < 6]  # 6 of 10
    got = actions(policy, steps, known="sample 7 again")
    assert got == ["skip"] * 51 + ["stop"] * 3


def test_known_samples_count_against_the_bound_that_the_user_has_set():
    policy = Policy(Settings(max_bad=2))
    assert actions(policy, [1, 2, 3], known="sample 7 again") == ["skip", "skip", "stop"]


def test_the_learning_rate_stays_where_it_has_no_part():
    policy = Policy(Settings(max_skips=1, max_lr_cuts=1, max_rollbacks=0))
    got = actions(policy, [0, 1, 2, 3], rate_matters=False)
    # As long as with cuts, and without them.
    assert got == ["skip", "skip", "skip", "stop"]
    assert policy.lr_factor == 1.0
