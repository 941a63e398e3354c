"""CFG005: a value no optimizer, layer or schedule can work with."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change, is_handed_on
from nanguard.check.config.keys import role
from nanguard.check.config.node import set_member, set_to
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nanguard.check.config.run_config import RunConfig, Setting, TrainingStage
    from nanguard.findings import Finding


class ValueOutOfRange(ConfigRule):
    """A value outside the range in which a setting means anything.

    Why it breaks a run: a negative learning rate climbs the loss; a beta of 1 never forgets and
    divides by 1 - beta ** t = 0 at the first step; dropout of 1 or more zeroes or divides by zero.

    In a project whose code is there, it is an error where a known program reads the file, or the
    code gives the value to an optimizer, a schedule or a layer; otherwise a remark.

    A batch or an accumulation of 0 is often meant as "off". It is not reported where the project's
    code has another value for it, and is an error only where a program that is known reads it, or
    code that divides by it.

    Write a value inside the range. Weights of loss and reward terms may be negative, -1 means
    "all" or "off" for many counts, and dropout may be 0: none of these is reported.
    """

    code = "CFG005"
    name = "value-out-of-range"
    severity = Severity.ERROR
    seen_in = "https://github.com/pytorch/pytorch/pull/5147"
    examples = (
        Passes(
            "lr: 1.0e-4\nepochs: 3\ndropout: 0.0\nmax_steps: -1\nreward_weights: [1.0, -0.5]\n",
            "a.yaml",
        ),
        Passes("learning_rate: [-4]\nweight_decay: [-4]\nepochs: 3\n", "powers_of_ten.yaml"),
        Fails("lr: -1.0e-4\nepochs: 3\n", 1, "a.yaml", "lr: 1.0e-4\nepochs: 3\n"),
        Fails('[optimizer]\nname = "adam"\nlr = 1e-4\nbetas = [0.9, 1.0]\n', 4, "a.toml"),
    )

    def look(self, source: RunConfig) -> Iterator[Finding]:
        """Yields what is wrong with each part of a run, as far as nothing else is known of 0."""
        off = {
            (setting.path, setting.line, setting.column): _off(setting, source)
            for stage in source.stages
            for setting in stage.settings
            if setting.name in _COUNTS and setting.number == 0
        }
        counts = {
            (setting.path, setting.line)
            for stage in source.stages
            for setting in stage.settings
            if setting.name in _COUNTS
        }
        for finding in super().look(source):
            place = (finding.path or "", finding.line or 0, finding.column or 0)
            severity = off.get(place, finding.severity)
            if place[:2] not in counts and not is_handed_on(source, finding):
                severity = Severity.INFO
            if severity is not None:
                yield replace(finding, severity=severity)

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding for each value outside its range."""
        for setting in stage.settings:
            found = range_of(setting, stage)
            if found is None:
                continue
            if setting.name == "betas":
                yield from self._each(setting, found)
            elif _is_exponent(setting):
                continue
            elif setting.number is not None and not found.holds(setting.number):
                fix = change(
                    _title(found, setting.number), set_to(setting, found.right(setting.number))
                )
                yield self.at(setting, _message(setting, setting.written, found), fix)

    def _each(self, setting: Setting, found: Range) -> Iterator[Finding]:
        for at, value in enumerate(setting.numbers):
            if found.holds(value):
                continue
            right = 0.999 if at else 0.9
            edits = set_member(setting, at, right)
            fix = change(f"use {right}, the usual value", edits)
            yield self.at(setting, _message(setting, name_of(value), found), fix)


_COUNTS = frozenset(("batch_size", "micro_batch_size", "global_batch_size", "accumulation"))


def _off(setting: Setting, source: RunConfig) -> Severity | None:
    """Returns how bad a count of 0 is; None where the code has another value for it."""
    usage = source.usage
    if setting.path in source.parsed:
        return Severity.ERROR
    if usage.known and usage.allows_zero(setting.key):
        return None
    if setting.name in ("batch_size", "global_batch_size"):
        return Severity.ERROR
    divided = usage.known and usage.divides_by(setting.key)
    return Severity.ERROR if divided else Severity.WARNING


def _is_exponent(setting: Setting) -> bool:
    """Returns whether it is a list of a whole number, such as a power of ten to search over."""
    number = setting.number
    return setting.node.kind == "sequence" and number is not None and number.is_integer()


def _message(setting: Setting, written: str, found: Range) -> str:
    return f"{setting.key} is {written}; {found.why}"


def _title(found: Range, value: float) -> str:
    right = found.right(value)
    shown = right if isinstance(right, int) or not math.isfinite(right) else name_of(right)
    return f"set it to {shown}"


@dataclass(frozen=True, slots=True)
class Range:
    """The values that a setting can have.

    Attributes:
        holds: Whether a value is one of them; false for NaN.
        why: What the values are, and what the others do.
        right: A value to take instead of a wrong one.
    """

    holds: Callable[[float], bool]
    why: str
    right: Callable[[float], float]


def _always(value: float) -> Callable[[float], float]:
    return lambda _: value


def _fraction(why: str, right: float, *, most: bool = False) -> Range:
    holds = (lambda x: 0 <= x <= 1) if most else (lambda x: 0 <= x < 1)
    return Range(holds, why, _always(right))


def _positive(value: float) -> float:
    return abs(value) if math.isfinite(value) and value else 1e-4


def _whole(least: int) -> Callable[[float], float]:
    """Returns the whole number without its sign; the least one for what is none."""
    return lambda value: max(least, int(abs(value))) if math.isfinite(value) else least


_RATE = Range(
    lambda x: 0 <= x < math.inf,
    "a learning rate cannot be negative or infinite: the update would climb the loss",
    _positive,
)
_RANGES: dict[str, Range] = {
    **dict.fromkeys(("lr", "other_lr", "min_lr", "warmup_start_lr"), _RATE),
    "betas": _fraction("betas lie in [0, 1): 1 divides by zero at the first step", 0.9),
    "beta1": _fraction("a beta lies in [0, 1): 1 divides by zero at the first step", 0.9),
    "beta2": _fraction("a beta lies in [0, 1): 1 divides by zero at the first step", 0.999),
    "momentum": _fraction("momentum lies in [0, 1): at 1 nothing is ever forgotten", 0.9),
    "dropout": _fraction("a dropout rate lies in [0, 1): 1 leaves nothing to train on", 0.1),
    "label_smoothing": _fraction("label smoothing lies in [0, 1)", 0.1),
    "warmup_ratio": _fraction("it is a share of the run, from 0 to 1", 0.03, most=True),
    "ema_decay": _fraction("the decay of an average lies in [0, 1]", 0.999, most=True),
    "eps": Range(
        lambda x: 0 < x < math.inf,
        "eps has to be above 0: it keeps 0 / 0 out of every update",
        lambda x: abs(x) if math.isfinite(x) and x else 1e-8,
    ),
    "weight_decay": Range(
        lambda x: 0 <= x < math.inf,
        "weight decay below 0 makes the weights grow without bound",
        lambda x: abs(x) if math.isfinite(x) else 0.01,
    ),
    "clip_norm": Range(
        lambda x: x >= 0 or x == -1,
        "a negative norm turns every gradient round",
        lambda x: abs(x) if math.isfinite(x) else 1.0,
    ),
    "num_labels": Range(lambda x: x >= 1 or x == -1, "there is at least one class", _always(2)),
    **dict.fromkeys(
        ("batch_size", "micro_batch_size", "global_batch_size"),
        Range(
            lambda x: x >= 1 or x == -1 or 0 < x < 1,
            "a batch holds at least one sample",
            _whole(1),
        ),
    ),
    "accumulation": Range(
        lambda x: x >= 1 or x == -1,
        "at least one batch makes a step; the loss is divided by this number",
        _whole(1),
    ),
    **dict.fromkeys(
        ("warmup_steps", "warmup_epochs", "max_steps", "max_epochs"),
        Range(lambda x: x >= 0 or x == -1, "a run has no negative length", _whole(0)),
    ),
}
_DECAY = Range(
    lambda x: 0 < x <= 1,
    "the factor of a schedule lies in (0, 1]: above 1 the learning rate grows without bound",
    _always(0.1),
)
_DISCOUNT = _fraction(
    "a discount lies in [0, 1]: above 1 returns grow without bound", 0.99, most=True
)
_TEMPERATURE = Range(
    lambda x: x > 0, "a temperature is above 0: logits are divided by it", _always(0.07)
)
_MAY_BE_ONE = re.compile(r"cond|guidance|modality|layer|token|word|path_type")


def range_of(setting: Setting, stage: TrainingStage) -> Range | None:
    """Returns the values that a setting can have; None if nothing is known about them."""
    where = role(setting.sections)
    name = setting.name
    if name == "gamma":
        if where == "scheduler":
            return _DECAY
        return _DISCOUNT if where is None and "reinforcement" in stage.traits else None
    if name == "temperature":
        return _TEMPERATURE if where == "loss" else None
    if name == "accumulation" and setting.node.kind == "sequence":
        return None  # the steps at which it changes
    if name == "momentum" and where in ("model", "norm"):
        return None
    if name == "eps" and stage.precision.half == "fp16" and setting.number == 0:
        return None  # the rule about eps in half precision says more
    if name == "dropout" and _MAY_BE_ONE.search(setting.key.lower()):
        return _fraction("a probability lies in [0, 1]", 0.1, most=True)
    return _RANGES.get(name)
