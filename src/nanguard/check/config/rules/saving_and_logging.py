"""What a run writes down: checkpoints to go back to, and a log that shows NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change
from nanguard.check.config.node import set_to
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import Setting, TrainingStage
    from nanguard.findings import Edit, Finding

_SAVES = ("save_steps", "save_epochs", "save_interval")
_LONG_STEPS = 5_000.0
_LONG_EPOCHS = 10.0
_RARE_STEPS = 100_000.0


class CheckpointIntervalTooLong(ConfigRule):
    """Checkpoints that are never written, or too rarely to go back to one.

    Why it breaks a run: a NaN that has reached the weights can only be undone by an earlier
    checkpoint. If the first one comes after the last step, everything is lost.

    Save every 1 000 steps or so, and keep more than one.
    """

    code = "CFG016"
    name = "checkpoint-interval-too-long"
    severity = Severity.WARNING
    by_habit = True
    seen_in = "https://github.com/lucidrains/stylegan2-pytorch/pull/238"
    examples = (
        Passes("lr: 1.0e-4\nmax_steps: 150000\nsave_steps: 2000\n", "a.yaml"),
        Passes("lr: 1.0e-4\nepochs: 20\nsave_interval: 1000  # steps\n", "b.yaml"),
        Fails(
            "lr: 1.0e-4\nmax_steps: 150000\nsave_steps: 200000\n",
            line=3,
            file="a.yaml",
            fixed="lr: 1.0e-4\nmax_steps: 150000\nsave_steps: 1000\n",
        ),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding where nothing is saved in time."""
        if "reinforcement" in stage.traits:
            return
        switched = _switched_off(stage)
        if switched is not None:
            if _long(stage):
                message = f"{switched.key} = {switched.written}: a long run without a checkpoint"
                fix = change("save regularly", _switch_on(switched), *_plan())
                yield self.at(switched, message, fix)
            return
        if (strategy := stage.get("save_strategy")) is not None and strategy.text != "steps":
            return
        found = [s for s in stage.all(*_SAVES) if s.number is not None]
        late = [s for s in found if _late(s, stage)]
        if late and len(late) == len(found):
            place = late[0]
            right = _interval(place, stage)
            yield self.at(
                place,
                f"{place.key} is {place.written} in a run of {_length(place, stage)}: there is "
                "nothing to go back to after a NaN",
                change(f"save every {right}", set_to(place, right), *_plan()),
            )


def _switched_off(stage: TrainingStage) -> Setting | None:
    strategy = stage.get("save_strategy")
    if strategy is not None and strategy.truth is False:
        return strategy
    enabled = stage.get("checkpointing")
    return enabled if enabled is not None and enabled.truth is False else None


def _switch_on(setting: Setting) -> tuple[Edit, ...]:
    return set_to(setting, "steps" if setting.name == "save_strategy" else True)


def _long(stage: TrainingStage) -> bool:
    steps, epochs = stage.number("max_steps") or 0.0, stage.number("max_epochs") or 0.0
    return steps >= _LONG_STEPS or (steps <= 0 and epochs >= _LONG_EPOCHS)


def _late(setting: Setting, stage: TrainingStage) -> bool:
    every = setting.number or 0.0
    if every <= 1:
        return False  # a share of the run, or every step; 0 and -1 switch off what others do
    if setting.name == "save_epochs":
        epochs = stage.number("max_epochs") or 0.0
        return epochs >= 5 and every >= epochs
    steps = stage.number("max_steps") or 0.0
    if steps <= 0:
        return setting.name == "save_steps" and every >= _RARE_STEPS
    rare = every >= 2 * _LONG_STEPS and 3 * every > steps
    return steps > 2000 and (every >= steps or rare)


def _interval(setting: Setting, stage: TrainingStage) -> int:
    if setting.name == "save_epochs":
        return 1
    steps = stage.number("max_steps") or 0.0
    return int(min(1000, max(steps // 10, 1))) if steps > 0 else 1000


def _length(setting: Setting, stage: TrainingStage) -> str:
    if setting.name == "save_epochs":
        return f"{name_of(stage.number('max_epochs') or 0.0)} epochs"
    steps = stage.number("max_steps") or 0.0
    return f"{steps:.0f} steps" if steps > 0 else "unknown length"


def _plan() -> tuple[str, ...]:
    return ("Keep the last three, and one that is known to be finite.",)


class NanFilterHidesLoss(ConfigRule):
    """A filter that keeps non-finite losses out of the log.

    Why it breaks a run: ``logging_nan_inf_filter`` replaces a NaN or Inf by the average of the loss
    so far in the log, and only there: the step itself is taken. The curve looks healthy while the
    weights are NaN.

    Switch it off, so that the log shows what happened.
    """

    code = "CFG017"
    name = "nan-filter-hides-loss"
    severity = Severity.INFO
    seen_in = "https://github.com/huggingface/trl/issues/6702"
    examples = (
        Passes(
            "learning_rate: 1.0e-5\noutput_dir: o\nsave_steps: 9\nlogging_nan_inf_filter: false\n",
            "a.yaml",
        ),
        Fails(
            "learning_rate: 1.0e-5\noutput_dir: o\nsave_steps: 9\nlogging_nan_inf_filter: true\n",
            line=4,
            file="a.yaml",
            fixed="learning_rate: 1.0e-5\noutput_dir: o\nsave_steps: 9\n"
            "logging_nan_inf_filter: false\n",
        ),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding where the filter is switched on."""
        setting = stage.get("nan_filter")
        if setting is not None and setting.truth is True:
            yield self.at(
                setting,
                f"{setting.key} = {setting.written} shows the average in place of a NaN loss, "
                f"while "
                "the update is made",
                change("log what was computed", set_to(setting, value=False)),
            )
