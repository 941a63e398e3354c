"""How long the frame of a step is held: until its backward pass, if that ever comes."""

from __future__ import annotations

import linecache
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from nanguard.replay.starts import Starts

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOP = """
def train():
    for step in range(6):
        loss = net(x).sum()
        note(starts.current)
        if step == last:
            {leave}
        starts.before_backward([loss.detach()])
        starts.after_backward()
        note(starts.current)
        starts.step_begins()
        starts.step_ended()

try:
    train()
except SystemExit:
    pass
"""


@pytest.fixture
def starts() -> Iterator[Starts]:
    starts = Starts(long=False)
    starts.begin()
    yield starts
    starts.close()


def run(starts: Starts, leave: str, *, last: int = -1) -> list[Any]:
    """Runs the loop; returns whose frame is held after each call of the model and each backward."""
    held: list[Any] = []

    def note(start: Any) -> None:
        frame = None if start is None else start.held
        held.append(None if frame is None else frame.f_code.co_name)

    text = LOOP.format(leave=leave)
    name = f"held {leave}.py"  # what is known of a file is kept
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names = {"net": nn.Linear(2, 1), "x": torch.ones(2), "starts": starts, "note": note}
    exec(compile(text, name, "exec"), {**names, "last": last, "__name__": "held"})
    return held


def test_the_frame_is_let_go_at_the_backward_pass(starts):
    held = run(starts, "pass")
    assert not any(held[1::2])
    assert held[2::2] == ["train"] * 5
    assert starts.unfinished() == []


@pytest.mark.parametrize("leave", ["raise SystemExit", "break", "return"])
def test_what_a_step_left_behind_is_there_at_the_end(starts, leave):
    run(starts, leave, last=4)
    ((frame, _line),) = starts.unfinished()
    assert frame.f_locals["step"] == 4
    assert frame.f_locals["loss"].requires_grad


def test_an_evaluation_is_not_held(starts):
    run(starts, "pass")
    with torch.no_grad():
        run(starts, "break", last=0)
    assert starts.unfinished() == []


def test_the_next_step_lets_go_of_what_the_last_one_left_behind(starts):
    run(starts, "break", last=4)
    ((frame, _line),) = starts.unfinished()
    left = weakref.ref(frame.f_locals["loss"])
    del frame, _line
    assert left() is not None
    run(starts, "pass")
    assert left() is None


def test_a_script_that_has_not_come_to_a_backward_pass(starts):
    run(starts, "break", last=0)
    assert starts.current is None
    names = [frame.f_code.co_name for frame, _ in starts.unfinished()]
    assert "train" in names
