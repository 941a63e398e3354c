"""Trains the tiny model, and measures what the guard around this process does in each step.

To be run under ``nanguard run``. Whatever torch or Python tells the guard is timed as it comes in;
what the guard calls for the script is taken off, and so is the timing itself: functions that do
nothing are timed in every step, too. The last line that it prints is JSON: the time of each part in
microseconds a step, and of all of them, as undisturbed blocks of steps have it.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter, defaultdict
from time import perf_counter
from typing import TYPE_CHECKING, Any

from benchmarks.scripts import tiny
from nanguard.run import live

if TYPE_CHECKING:
    from collections.abc import Callable

# What torch tells the guard, and which argument is the script's own call.
_CALLS = {"backward": 0, "step": 1, "next_batch": 1, "choose": 1}
# The first steps, in which regions and models are only found.
_WARM = 200
# Steps whose mean counts as one: what is done now and then only is paid for by all of them.
_BLOCK = 64
# Functions that do nothing, one of them with a call of the script's own inside: what they take is
# what the timing takes.
_NOTHING, _NOTHING_OF_THEIRS = "nothing", "nothing of theirs"


class Clock:
    """Adds up the time of parts, step by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self.calls: Counter[str] = Counter()
        self._parts: dict[str, float] = defaultdict(float)
        self._theirs = 0.0
        self._nothing = self.around(_NOTHING, lambda: None, None)
        self._nothing_of_theirs = self.around(_NOTHING_OF_THEIRS, lambda call: call(), 0)

    def end_step(self) -> None:
        """Begins the next step."""
        self._nothing()
        self._nothing_of_theirs(lambda: None)
        self.steps.append(dict(self._parts))
        self._parts.clear()

    def around(self, name: str, function: Callable[..., Any], place: int | None) -> Any:
        """Returns a function that times another one, without the call it is given."""

        def timed(*args: Any) -> Any:
            outer, self._theirs = self._theirs, 0.0
            began = perf_counter()
            try:
                if place is not None:
                    args = (*args[:place], self._outside(args[place]), *args[place + 1 :])
                return function(*args)
            finally:
                taken = perf_counter() - began
                self._parts[name] += taken - self._theirs
                self.calls[name] += 1
                self._theirs = outer + taken
                if name == "step":
                    self.end_step()

        return timed

    def _outside(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any) -> Any:
            outer, self._theirs = self._theirs, 0.0
            began = perf_counter()
            try:
                return call(*args)
            finally:
                self._theirs = outer + perf_counter() - began

        return made


def _undisturbed(times: list[float]) -> float:
    """Returns the lower quartile of blocks: others that use the machine only make them longer."""
    blocks = [times[at : at + _BLOCK] for at in range(0, len(times) - _BLOCK + 1, _BLOCK)]
    return statistics.quantiles(map(statistics.mean, blocks), n=4)[0]


def main() -> None:
    """Trains and measures."""
    guard = live.current
    if guard is None:
        sys.exit("start it with: nanguard run -- python -m benchmarks.scripts.timed")
    clock = Clock()
    for name, place in _CALLS.items():
        vars(guard)[name] = clock.around(name, getattr(guard, name), place)
    starts = guard.starts
    vars(starts)["_called"] = clock.around("model call", starts._called, None)
    if starts._lines is not None:
        vars(starts._lines)["_line"] = clock.around("line", starts._lines._line, None)
    tiny.main()
    steps = clock.steps[_WARM:]
    names = sorted({name for step in steps for name in step} - {_NOTHING, _NOTHING_OF_THEIRS})
    each = {n: clock.calls[n] / len(clock.steps) for n in names}
    for step in steps:
        alone, around = step.pop(_NOTHING), step.pop(_NOTHING_OF_THEIRS)
        for name in step:
            step[name] -= (around if name in _CALLS else alone) * each[name]
    parts = {n: 1e6 * _undisturbed([s.get(n, 0.0) for s in steps]) for n in names}
    total = 1e6 * _undisturbed([sum(step.values()) for step in steps])
    print(json.dumps({"us": round(total, 1), "parts": {n: round(v, 1) for n, v in parts.items()}}))


if __name__ == "__main__":
    main()
