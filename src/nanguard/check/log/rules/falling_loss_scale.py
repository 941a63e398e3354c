"""LOG006: a loss scale that keeps falling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.log.names import Role
from nanguard.check.log.rules.judging import LogRule, place
from nanguard.check.log.rules.scaling import scale_of
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.log.series import Log
    from nanguard.findings import Finding


def _scales(scales: list[float]) -> str:
    return "".join(
        f'{{"step": {n}, "loss": 2.0, "scale": {scale}}}\n' for n, scale in enumerate(scales, 1)
    )


class FallingLossScale(LogRule):
    """The loss scale keeps falling after it had found its level.

    Why it breaks a run: each fall is a step that was skipped because gradients overflowed. When
    no scale is small enough, the gradients are NaN or Inf by themselves: nothing is trained any
    more, and small gradients become zero on the way down.

    The first fall from 65536 is how the scaler finds its level, and is left alone. Train in
    bfloat16, or find the operation that overflows.
    """

    code = "LOG006"
    name = "falling-loss-scale"
    severity = Severity.WARNING
    seen_in = "https://github.com/Junjue-Wang/FactSeg/issues/6"
    examples = (
        Passes(_scales([65536.0, 32768.0, 16384.0] + [16384.0] * 22), "a.jsonl"),
        Fails(
            _scales([65536.0] * 22 + [32768.0 / 2**n for n in range(8)]),
            file="a.jsonl",
        ),
    )

    def check(self, source: Log) -> Iterator[Finding]:
        """Yields one finding for the first scale that falls for good."""
        for series in source.of(Role.SCALE):
            found = scale_of(series, source)
            if found is not None:
                point, message = found
                low = min(v for v in series.values if v == v)
                message = f"at {place(point)}, {message} (the lowest in this log is {low:g})"
                yield self.at(source, series, point, message)
                return
        for note in source.notes:
            if note.role is Role.SCALE:
                at = "" if note.step is None else f" at step {note.step}"
                yield self.finding(
                    f"the log says{at}: {note.said}",
                    path=source.path,
                    line=note.line,
                    where="loss scale",
                    step=note.step,
                )
                return
