"""The state of a run in words: the same in the view and in plain lines."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nanguard.check.log.quantities import Quantity
from nanguard.view.terminal.plot import brief

if TYPE_CHECKING:
    from nanguard.view.terminal.channels import Happening
    from nanguard.view.terminal.watch_state import RunState
    from nanguard.view.terminal.watched import WatchedRun

GOOD, BAD, WAITING = "green", "bold red", "yellow"


def state_of(run: WatchedRun) -> tuple[str, str]:
    """Returns how a run is doing, and the style in which that is said."""
    bad = run.state.bad_now()
    if bad:
        return f"ALARM: {bad}", BAD
    if run.problem:
        return run.problem, WAITING
    if run.reading:
        return f"reading {run.share:.0%}", WAITING
    if run.stalled:
        return "ALARM: stalled", BAD
    if run.ended():
        return "ended", GOOD
    if not run.state.channels:
        lines = run.state.lines
        return f"no numbers yet in {lines} lines" if lines else "nothing written yet", WAITING
    if run.state.grown is None or time.monotonic() - run.state.grown > 30.0:
        since = "" if run.state.grown is None else f" for {_span(_quiet(run.state))}"
        return f"quiet{since}", WAITING
    return "running", GOOD


def progress(state: RunState) -> tuple[str, float | None, str]:
    """Returns where a run is, which share of all that is, and how fast it goes."""
    if state.step is None:
        where = f"{state.lines:,} lines".replace(",", " ")
    else:
        where = f"step {spaced(state.step)}"
        where += f" / {spaced(state.total)}" if state.total else ""
    if state.epoch is not None:
        where += f"  epoch {state.epoch:g}"
    share = min(1.0, state.step / state.total) if state.step and state.total else None
    return where, share, _speed(state)


def _speed(state: RunState) -> str:
    pace = state.pace()
    if pace is None:
        return ""
    speed = f"{pace:.3g} steps/s" if pace >= 1.0 else f"{1.0 / pace:.3g} s/step"
    if state.total and state.step is not None and state.step < state.total:
        speed += f"  ETA {_span((state.total - state.step) / pace)}"
    return speed


def numbers(state: RunState) -> list[str]:
    """Returns the last number of each role, with its name."""
    out: list[str] = []
    for role, name in (
        (Quantity.LOSS, "loss"),
        (Quantity.GRAD_NORM, "grad norm"),
        (Quantity.RATE, "lr"),
        (Quantity.SCALE, "scale"),
    ):
        channel = state.main(role)
        if channel is not None:
            out.append(f"{name} {brief(channel.last)}")
    return out


def happening(one: Happening) -> str:
    """Returns a happening in words: where, what, and how often."""
    where = "" if one.step is None else f"step {spaced(one.step)}"
    if one.last is not None and one.last != one.step:
        where += f" to {spaced(one.last)}"
    often = f" ({one.count} times)" if one.count > 1 else ""
    return f"{where}: {one.text}{often}" if where else f"{one.text}{often}"


def spaced(number: int) -> str:
    """Returns a whole number with spaces between its thousands."""
    return f"{number:,}".replace(",", " ")


def _quiet(state: RunState) -> float:
    return 0.0 if state.grown is None else time.monotonic() - state.grown


def _span(seconds: float) -> str:
    if seconds < 90.0:
        return f"{seconds:.0f} s"
    minutes = seconds / 60.0
    if minutes < 90.0:
        return f"{minutes:.0f} min"
    return f"{minutes / 60.0:.1f} h" if minutes < 48 * 60 else f"{minutes / 1440.0:.1f} days"
