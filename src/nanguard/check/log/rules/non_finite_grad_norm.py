"""LOG002: a gradient norm that is NaN or Inf."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.log.log_rule import LogRule, first_bad_norm, history_of, place
from nanguard.check.log.quantities import Quantity
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.log.series import Log
    from nanguard.findings import Finding


class NonFiniteGradNorm(LogRule):
    """A gradient norm in the log is NaN or infinite, and no loss scaler took care of it.

    Why it breaks a run: clipping does not help, because it divides by the norm, and NaN gradients
    that are zeroed or applied leave a run that trains nothing. A loss that still looks fine hides
    it for as long as it is computed from weights of before.

    An overflow that the loss scaler meets while it looks for its level is left alone.
    """

    code = "LOG002"
    name = "non-finite-grad-norm"
    severity = Severity.ERROR
    seen_in = "https://github.com/InternLM/xtuner/issues/187"
    examples = (
        Passes(
            "step 1 loss 2.9 grad_norm inf scale 65536\nstep 2 loss 2.8 grad_norm 0.9 scale 32768\n"
            "step 3 loss 2.7 grad_norm 1.1 scale 32768\n",
            "train.log",
        ),
        Fails(
            "{'loss': 2.1, 'grad_norm': 0.9, 'epoch': 0.1}\n"
            "{'loss': 2.0, 'grad_norm': nan, 'epoch': 0.2}\n",
            line=2,
            file="train.log",
        ),
    )

    def check(self, source: Log) -> Iterator[Finding]:
        """Yields the first bad norm of each rank."""
        bad = [
            (point.step if point.step is not None else point.index, index, series, point)
            for index, series in enumerate(source.of(Quantity.GRAD_NORM))
            if (point := first_bad_norm(source, series)) is not None
        ]
        for _, _, series, point in sorted(bad, key=lambda one: one[:2])[:1]:
            count = len(series.bad())
            many = f" ({count} of {len(series)} values are not finite)" if count > 1 else ""
            message = f"{series.name} is {name_of(point.value)} at {place(point)}{many}"
            yield self.at(source, series, point, f"{message}; {history_of(source, series, point)}")
        notes = [note for note in source.notes if note.role is Quantity.GRAD_NORM]
        if notes and not bad:
            at = "" if notes[0].step is None else f" at step {notes[0].step}"
            yield self.finding(
                f"the log says{at}: {notes[0].said}",
                path=source.path,
                line=notes[0].line,
                where="gradient norm",
                step=notes[0].step,
            )
