"""CFG005: a value no optimizer, layer or schedule can work with."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nanguard.check.config.edits import set_member, set_to
from nanguard.check.config.rules.judging import ConfigRule, change
from nanguard.check.config.rules.ranges import Range, range_of
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run import Stage
    from nanguard.check.config.settings import Setting
    from nanguard.findings import Finding


class ValueOutOfRange(ConfigRule):
    """A value outside the range in which a setting means anything.

    Why it breaks a run: a negative learning rate climbs the loss; a beta of 1 never forgets and
    divides by 1 - beta ** t = 0 at the first step; dropout of 1 or more zeroes or divides by zero.

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

    def judge(self, stage: Stage) -> Iterator[Finding]:
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
