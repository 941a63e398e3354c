"""CFG010: a warm-up that the run never leaves."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change
from nanguard.check.config.node import set_to
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import Setting, TrainingStage
    from nanguard.findings import Finding, Fix

# A warm-up without a unit that is this many times the epochs is counted in steps.
_SAME_UNIT = 5
# Sections that describe what is trained, and not how long.
_MODEL = re.compile(r"model|attention|encoder|decoder|network|module|sampler|slots?$")


class WarmupLongerThanTraining(ConfigRule):
    """A warm-up that is as long as the run, or longer.

    Why it breaks a run: the learning rate rises to the last step and is never lowered. The run ends
    at its least stable point, and a schedule computed from "steps after the warm-up" divides by
    zero or counts down from a negative number.

    Warm up over 1 to 10 % of the run. Steps are compared with steps and epochs with epochs only.
    """

    code = "CFG010"
    name = "warmup-longer-than-training"
    severity = Severity.WARNING
    by_habit = True
    seen_in = "https://github.com/YunYang1994/TensorFlow2.0-Examples/issues/8"
    examples = (
        Passes("lr: 1.0e-4\nepochs: 80\nwarmup_steps: 25000\n", "a.yaml"),
        Passes("lr: 1.0e-4\nepochs: 12\nwarmup: 2000\n", "a.yaml"),
        Passes(
            "learning_rate: 1.0e-5\nmax_steps: -1\nwarmup_steps: 500\nnum_train_epochs: 3\n",
            "b.yaml",
        ),
        Passes(
            "lr: 1.0e-4\nepochs: 20\nwarmup_steps: 2500\n"
            "model: {slot_attention: {num_iterations: 1}}\n",
            "slots.yaml",
        ),
        Passes("lr: 1.0e-4\nepochs: 1\nwarmup_epochs: 1\n", "a.yaml"),
        Fails(
            "lr: 1.0e-4\nepochs: 20\nwarmup_epochs: 30\n",
            line=3,
            file="a.yaml",
            fixed="lr: 1.0e-4\nepochs: 20\nwarmup_epochs: 1\n",
        ),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding where the warm-up does not end before the run."""
        for setting in stage.all("warmup_steps", "warmup_epochs", "warmup_ratio", "warmup"):
            value = setting.number
            if value is None:
                continue
            if setting.name == "warmup_ratio" or (setting.name == "warmup" and value <= 1):
                if value == 1:
                    fix = change("warm up over 5 % of the run", set_to(setting, 0.05))
                    yield self.at(setting, f"{setting.key} is 1: the whole run is warm-up", fix)
                continue
            total, unit = _length(stage, setting)
            # A run of one epoch is often told to warm up in a unit of its own scheduler.
            single = unit == "epochs" and value == total == 1
            if total is not None and value >= total > 0 and not single:
                yield self.at(
                    setting,
                    f"{setting.key} is {setting.written}, but the run has {name_of(total)} {unit}: "
                    "the warm-up never ends",
                    _shorter(setting, total, unit),
                )


def _length(stage: TrainingStage, setting: Setting) -> tuple[float | None, str]:
    """Returns how long the run is in the unit of a warm-up."""
    steps, epochs = _steps(stage), stage.number("max_epochs")
    if setting.name == "warmup_epochs":
        return epochs, "epochs"
    if steps is not None and steps > 0:
        return steps, "steps"
    if setting.name == "warmup":
        alike = epochs is not None and (setting.number or 0) < _SAME_UNIT * epochs
        return (epochs, "epochs") if steps is None and alike else (None, "steps")
    return _counted(stage, epochs), "steps"


def _steps(stage: TrainingStage) -> float | None:
    """Returns the number of steps of the run; iterations inside of a model are none of them."""
    setting = stage.get("max_steps")
    if setting is None or any(_MODEL.search(name) for name in setting.sections):
        return None
    return setting.number


def _counted(stage: TrainingStage, epochs: float | None) -> float | None:
    """Returns the number of steps where the files tell how many an epoch has."""
    updates, batches = stage.number("updates_per_epoch"), stage.number("steps_per_epoch")
    if epochs is None or epochs <= 0:
        return None
    if updates is not None and updates > 0:
        return epochs * updates
    if batches is not None and batches > 1:
        return epochs * batches / max(stage.number("accumulation") or 1.0, 1.0)
    return None


def _shorter(setting: Setting, total: float, unit: str) -> Fix:
    value = max(1, int(total / 20)) if 1 < total < math.inf else 0
    return change(
        f"warm up over {value} of the {name_of(total)} {unit}",
        set_to(setting, value),
        "The learning rate now reaches its peak: watch the loss around the end of the warm-up.",
    )
