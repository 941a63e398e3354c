"""What a user can set about the guard. Every field has a default that suits a first run."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Literal

from nanguard.errors import SettingsError


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Settings of a guard.

    The ladder climbs one rung at a time: skip the batch, cut the learning rate, roll back to the
    last good snapshot, stop. Each rung is bounded by a setting here.
    """

    # Where the ladder begins for a bad step: skip the batch, roll back, or stop at once.
    on_bad: Literal["skip", "rollback", "stop"] = "skip"
    # How many bad steps the whole run may meet before it is stopped; None for no such bound.
    max_bad: int | None = None
    # How many bad steps among the `recent` ones are skipped before the next rung.
    max_skips: int = 5
    # How many steps back a bad step still counts against `max_skips`.
    recent: int = 100
    # How many times the learning rate may be cut.
    max_lr_cuts: int = 2
    # The factor of one cut.
    lr_cut: float = 0.5
    # The share of the scheduled learning rate below which it is never cut.
    lr_floor: float = 0.1
    # Good steps after which one cut is taken back.
    lr_climb_after: int = 200
    # How many times the run may be rolled back.
    max_rollbacks: int = 2

    # Whether spikes of loss or gradient norm make the guard act, only warn, or do nothing.
    spikes: Literal["act", "warn", "off"] = "act"
    # Accepted values in the window that judges the next one.
    spike_window: int = 128
    # Accepted values it needs before it has an opinion.
    spike_warmup: int = 64
    # Spreads above the median that earn a warning.
    spike_warn: float = 6.0
    # Spreads above the median that make the guard act.
    spike_act: float = 12.0

    # Updates between two snapshots in memory; 0 for none.
    snapshot_every: int = 100
    # Updates between two snapshots on disk (they need a run folder); 0 for none.
    disk_every: int = 1000
    # Snapshots kept on disk. The last good one is always among them.
    keep: int = 3

    # Updates between two device-side scans of the parameters for non-finite values.
    scan_every: int = 64
    # Steps the host may be behind the device; None for 2 on CUDA and 0 elsewhere.
    lag: int | None = None
    # Whether the ranks of a process group train one model together or each its own.
    ranks: Literal["together", "alone"] = "together"

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            _check(name, getattr(self, name), getattr(self, name) in choices, f"one of {choices}")
        for name, low in _COUNTS.items():
            value = getattr(self, name)
            if value is None and name in _MAY_BE_NONE:
                continue
            good = isinstance(value, int) and not isinstance(value, bool) and value >= low
            _check(name, value, good, f"a whole number of at least {low}")
        for name, (above, most) in _RANGES.items():
            value = getattr(self, name)
            good = isinstance(value, (int, float)) and above < value <= most
            _check(name, value, good, f"a number in ({above:g}, {most:g}]")
        _check(
            "spike_warmup",
            self.spike_warmup,
            self.spike_warmup <= self.spike_window,
            f"at most spike_window ({self.spike_window})",
        )
        _check(
            "spike_act",
            self.spike_act,
            self.spike_act >= self.spike_warn,
            f"at least spike_warn ({self.spike_warn:g})",
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the settings by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


_CHOICES: dict[str, tuple[str, ...]] = {
    "on_bad": ("skip", "rollback", "stop"),
    "spikes": ("act", "warn", "off"),
    "ranks": ("together", "alone"),
}
_MAY_BE_NONE = ("max_bad", "lag")
_COUNTS: dict[str, int] = {
    "max_bad": 0,
    "max_skips": 0,
    "recent": 1,
    "max_lr_cuts": 0,
    "lr_climb_after": 1,
    "max_rollbacks": 0,
    "spike_window": 16,
    "spike_warmup": 16,
    "snapshot_every": 0,
    "disk_every": 0,
    "keep": 1,
    "scan_every": 1,
    "lag": 0,
}
_RANGES: dict[str, tuple[float, float]] = {
    "lr_cut": (0.0, 1.0),
    "lr_floor": (0.0, 1.0),
    "spike_warn": (0.0, math.inf),
    "spike_act": (0.0, math.inf),
}


def _check(name: str, value: object, good: bool, wanted: str) -> None:  # noqa: FBT001
    if not good:
        raise SettingsError(
            f"{name} is {value!r}, but it has to be {wanted}.",
            where=f"Settings({name}={value!r})",
            do=f"Give {name} a value that is {wanted}, or leave it out for the default.",
        )
