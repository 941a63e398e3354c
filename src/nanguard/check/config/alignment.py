"""Whether the files of a run agree on precision, clipping and batch size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanguard.check.config.precision import PRECISION_SETTINGS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nanguard.check.config.run import RunConfig, Stage
    from nanguard.check.config.settings import Setting

_BATCH = ("micro_batch_size", "batch_size")


@dataclass(frozen=True, slots=True)
class Row:
    """One setting in one place.

    Attributes:
        setting: What is set: ``precision``, ``clipping`` or ``batch size``.
        where: The file, the line and the key.
        value: The value as it is written.
        verdict: ``agrees``, ``conflicts``, or ``set once``.
    """

    setting: str
    where: str
    value: str
    verdict: str

    def to_json(self) -> dict[str, Any]:
        """Returns the row as the report's JSON has it."""
        return {
            "setting": self.setting,
            "where": self.where,
            "value": self.value,
            "verdict": self.verdict,
        }


def alignment(runs: Iterable[RunConfig]) -> list[Row]:
    """Returns a row for each place that sets precision, clipping or batch size.

    Args:
        runs: The runs, each with all the files it was read from.
    """
    rows: dict[tuple[str, str], Row] = {}
    for run in runs:
        for stage in run.stages:
            for row in (*_precision(stage), *_clipping(stage), *_batch(stage)):
                known = rows.get((row.setting, row.where))
                if known is None or known.verdict != "conflicts":
                    rows[row.setting, row.where] = row
    return list(rows.values())


def _precision(stage: Stage) -> Iterator[Row]:
    precision = stage.precision
    kept = precision.kept([c for c in precision.claims if c.setting.path in stage.partial])
    said = {id(claim.setting): claim for claim in precision.claims}
    for setting in stage.all(*PRECISION_SETTINGS):
        claim = said.get(id(setting))
        if not precision.conflicting or claim is None:
            verdict = "agrees" if len(said) > 1 else "set once"
        else:
            verdict = "agrees" if kept in claim.worlds else "conflicts"
        yield _row("precision", setting, verdict)


def _clipping(stage: Stage) -> Iterator[Row]:
    yield from _numbers("clipping", stage.all("clip_norm", "clip_value"))


def _batch(stage: Stage) -> Iterator[Row]:
    per_device = stage.all(*_BATCH)
    yield from _numbers("batch size", per_device)
    shared = stage.get("global_batch_size")
    if shared is not None:
        yield _row("batch size", shared, _product(stage, shared))


def _product(stage: Stage, shared: Setting) -> str:
    """Returns whether the batch of all devices is what each device, steps and devices give."""
    parts = [
        stage.number(*_BATCH),
        stage.number("accumulation"),
        stage.number("processes", "devices"),
    ]
    if shared.number is None or any(part is None for part in parts):
        return "set once"
    product = 1.0
    for part in parts:
        product *= part or 1.0
    return "agrees" if product == shared.number else "conflicts"


def _numbers(name: str, settings: list[Setting]) -> Iterator[Row]:
    """Yields the rows of settings that have to have one number; ``auto`` agrees with any."""
    values = {setting.number for setting in settings if setting.number is not None}
    for setting in settings:
        verdict = "set once" if len(settings) == 1 else "agrees" if len(values) < 2 else "conflicts"
        yield _row(name, setting, verdict)


def _row(name: str, setting: Setting, verdict: str) -> Row:
    where = f"{setting.path}:{setting.line} {setting.key}"
    return Row(name, where, setting.written or "null", verdict)
