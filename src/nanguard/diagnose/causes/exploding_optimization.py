"""Training that runs away."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from nanguard.diagnose.cause import (
    CASTS,
    DIVISIONS,
    EXPONENTIALS,
    LARGEST,
    STATISTICS,
    Cause,
    Suspicion,
)
from nanguard.diagnose.lab import Usual
from nanguard.diagnose.repairs import Repair, clipped_gradients, silencing, without_samples
from nanguard.findings import name_of

if TYPE_CHECKING:
    from nanguard.diagnose.cause import Case
    from nanguard.diagnose.lab import Trial

_HUGE = 1e9
# The square of more than this is too large for float32.
_SQUARED = 1e15
# From here on a learning rate is suspicious by itself, and more so where steps are normalised.
_HIGH, _HIGH_ADAPTIVE = 1.0, 0.05
# This many losses in a row, each larger than the one before and the last so many times the first:
# that is divergence, before any trial.
_RISING, _FAR_ABOVE, _RUNS_AWAY = 4, 1e4, 0.85
# Of this many losses this many are so far below zero: there is no bound to them. Near the end
# everything jumps about.
_FALLING, _MOST_FALLING, _DEEP = 10, 7, 1e6
# A loss is calm if its last values are within this many times the smallest one.
_CALM, _CALM_TIMES = 16, 20.0
# A parameter is multiplied if, after its first steps, it has grown to this many times what it was
# (a logarithm), over this many steps, at rates between this many points that are about the same.
_SETTLED, _GROWN, _LONG, _POINTS, _STEADY = 16, math.log(1e4), 100, 5, 2.0
# A run that has come this far can learn with its learning rate.
_LEARNED = 300
SLOWER = "a learning rate ten times lower"
# The extremes of the wide types: no number grows to just these.
_EXTREMES = (LARGEST["bfloat16"], 3.4028234663852886e38)


class ExplodingOptimization(Cause):
    """Divergence: learning rate, gradients without clipping, inputs without scaling."""

    code = "exploding-optimization"
    meaning = "divergence through learning rate, unclipped gradients or unscaled inputs"
    why = (
        "Weights, activations or gradients grew from step to step until float32 could not hold "
        "them. Lower the learning rate, warm it up, clip gradients, and scale inputs and targets "
        "to about 1."
    )

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether large finite numbers became infinite in a type with a wide range."""
        if case.precision == "float16" or case.phase in ("data", "init"):
            return None
        if _is_mask(case):
            return None
        large = case.largest_input()
        growth = case.facts.growth
        grown = growth is not None and growth.last > 10 * max(growth.first, 1e-12)
        singular = case.op in (*DIVISIONS, *EXPONENTIALS, *STATISTICS)
        if case.op in STATISTICS and large > _SQUARED:
            singular = False  # they are squared, whether they differ or not
        if large < _HUGE and not grown:
            return None
        evidence = [
            {"what": f"input {s.name} of {case.origin.kernel}", **s.to_json()} for s in case.inputs
        ]
        if growth is not None:
            evidence.append(
                {"what": "norm of all parameters", "first": growth.first, "last": growth.last}
            )
        if case.facts.losses:
            evidence.append({"what": "losses before", "last": case.facts.losses[-5:]})
        strength = (0.75 if grown else 0.7) if large >= _HUGE else 0.4
        if _runs_away(case.facts.losses):
            strength = max(strength, _RUNS_AWAY)
        if _is_buffer(case):
            said = f"the buffer {case.origin.buffer} overflows {case.precision}: it has grown to "
            return Suspicion(strength, said + name_of(large), evidence)
        how = "hold" if _came_large(case) else "have grown to"
        whose = ", which comes with the data" if _came_large(case) else ""
        return Suspicion(
            strength * (0.6 if singular else 1.0),
            f"{case.origin.kernel} overflows {case.precision}: its inputs {how} "
            f"{name_of(large)}{whose}",
            evidence,
        )

    def concluded(self, case: Case, suspicion: Suspicion) -> str:
        """Returns what ran away, and what kept it from doing so."""
        grown = multiplied(case)
        if grown is not None:
            name, percent, since = grown
            return (
                f"{name} has grown by {percent:.2g} % in every step since step {since}, while the "
                "loss did not: something multiplies it, as a weight decay with the wrong sign "
                f"does. {suspicion.summary}"
            )
        if _falls_without_bound(case):
            last = name_of(case.facts.losses[-1])
            return (
                f"the loss falls without bound, to {last} in the step before: a term of it has the "
                f"wrong sign, or nothing that bounds it from below. {suspicion.summary}"
            )
        slower = next((t for t in case.lab.trials if t.what == SLOWER), None)
        rate = case.facts.lr
        if rate is not None and Usual(case.facts.losses).allows(slower):
            tenth = f"with a tenth of the learning rate ({name_of(rate)})"
            return f"{suspicion.summary}; {tenth} it does not"
        if rate is not None and _is_high(case) and not _is_buffer(case):
            return f"{suspicion.summary}; the learning rate of {name_of(rate)} is far too high"
        return suspicion.summary

    def trials(self, case: Case) -> list[Trial]:
        """Goes more slowly, or leaves out what came in so large."""
        if _is_buffer(case):
            return []  # no gradient has a part in it
        if _came_large(case):
            trial = case.without_samples()
            return [trial] if trial else []
        found = [case.lab.try_out("gradients clipped to norm 1 in every step", clip=1.0)]
        if case.facts.lr is not None:
            found.append(case.lab.try_out(SLOWER, lr_factor=0.1))
        return found

    def repairs(self, case: Case) -> list[Repair]:
        """Clips, and lowers the learning rate."""
        if _came_large(case):
            return without_samples(case, "scale the data, or drop what is that large")
        if _is_buffer(case):
            line = "" if case.origin.site is None else f"line {case.origin.site.line}: "
            return [
                Repair(
                    f"{line}let {case.origin.buffer} forget: an average weighs the old by m and "
                    "the new by 1 - m"
                )
            ]
        found, rate = clipped_gradients(case), case.facts.lr
        if rate is not None:
            lower = case.lab.try_out(SLOWER, lr_factor=0.1)
            slower = Repair(
                f"lower the learning rate ({name_of(rate)}) by a factor of ten", trial=lower
            )
            if case.outcome.step >= _LEARNED and not _runs_away(case.facts.losses):
                # The run has learned with that rate until something grew too large.
                (slower,) = silencing([slower], "it grows more slowly; bound what grows")
            found = [slower, *found] if _is_high(case) else [*found, slower]
        if _falls_without_bound(case):
            found = silencing(found, "the loss has no minimum; look at the sign of its terms")
        elif multiplied(case) is not None:
            found = silencing(
                found, "the weights grow by themselves; look at the sign of the decay"
            )
        return found


def _is_high(case: Case) -> bool:
    """Returns whether the learning rate is suspicious by itself."""
    rate = case.facts.lr
    high = _HIGH_ADAPTIVE if "Ada" in (case.facts.optimizer or "") else _HIGH
    return rate is not None and rate >= high


def _runs_away(losses: list[float]) -> bool:
    """Returns whether the loss has grown from step to step, far beyond what it was before."""
    last = [abs(loss) for loss in losses[-_RISING:] if math.isfinite(loss)]
    if len(last) < _RISING or any(after <= before for before, after in pairwise(last)):
        return False
    return last[-1] > _FAR_ABOVE * max(last[0], 1e-12)


def _is_buffer(case: Case) -> bool:
    """Returns whether what has grown is a buffer, which no gradient moves."""
    return case.origin.buffer is not None and case.op not in STATISTICS


def _came_large(case: Case) -> bool:
    """Returns whether the largest input came with the data, and no parameter had a part in it."""
    largest = max(
        case.inputs,
        key=lambda s: max((abs(v) for v in (s.low, s.high) if not math.isnan(v)), default=0.0),
        default=None,
    )
    known = set() if largest is None else case.origin.sources.get(largest.name, set())
    return known == {"data"} and case.op in STATISTICS


def _falls_without_bound(case: Case) -> bool:
    """Returns whether the loss went down and down, far below zero."""
    last = case.facts.losses[-_FALLING:]
    return len(last) == _FALLING and sum(loss < -_DEEP for loss in last) >= _MOST_FALLING


def multiplied(case: Case) -> tuple[str, float, int] | None:
    """Returns the parameter that was multiplied in every step, while the loss did not follow.

    Returns:
        Its name, by how many percent it grew in a step, and since when; None if there is none.
    """
    losses = [abs(loss) for loss in case.facts.losses]
    if len(losses) < _CALM or max(losses[-_CALM:]) > _CALM_TIMES * max(min(losses), 1e-12):
        return None
    steady = []
    for name, curve in case.facts.curves.items():
        late = [(step, math.log(abs(v))) for step, v in curve if step >= _SETTLED and v]
        if len(late) < _POINTS or late[-1][1] - late[0][1] < _GROWN:
            continue
        far, kept = (late[-1][0] - late[0][0]) / (2 * _POINTS), late[:1]
        for point in late:
            if point[0] - kept[-1][0] >= far:
                kept.append(point)
        rates = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(kept)]
        lasts = late[-1][0] - late[0][0] >= _LONG
        if lasts and len(kept) >= _POINTS and max(rates) < _STEADY * min(rates):
            rate = (late[-1][1] - late[0][1]) / (late[-1][0] - late[0][0])
            steady.append((late[-1][1], name, 100 * math.expm1(rate), late[0][0]))
    return max(steady)[1:] if steady else None


def _is_mask(case: Case) -> bool:
    """Returns whether large numbers were written, as in a mask, and did not come by training."""
    if not case.inputs or case.from_parameters:
        return False
    return case.op in CASTS or case.largest_input() in _EXTREMES
