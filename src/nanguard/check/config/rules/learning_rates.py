"""Learning rates and how they rise and fall: too high, without a warm-up, or the wrong way."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import (
    ConfigRule,
    change,
    limit_of,
    raise_slowly,
    rate_after,
    too_high,
)
from nanguard.check.config.node import add_after, set_to
from nanguard.check.config.run_config import kind_of
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.config_rule import Limit
    from nanguard.check.config.run_config import Setting, TrainingStage
    from nanguard.findings import Edit, Finding, Fix

# Rates of centres, proxies and learned weights of a loss, which bear more than a network.
_OF_A_TABLE = re.compile(r"cent(er|re)|proxy|proxies|arch|alpha|temperature|margin")


class LearningRateTooHigh(ConfigRule):
    """A learning rate far above what the optimizer and the kind of model bear.

    Why it breaks a run: each Adam-type update moves a weight by about the learning rate. Fine-tuned
    transformers lose what they know at 1e-3 and diverge at 1e-2; the loss rises, activations grow,
    and the first overflow is a NaN. SGD, Muon, Adafactor and adapters bear more, and so do small
    networks that start from nothing: the limit depends on all of these.

    Start at the value the fix gives, and raise it once the run has been quiet.
    """

    code = "CFG003"
    name = "learning-rate-too-high"
    severity = Severity.WARNING
    by_habit = True
    seen_in = "https://github.com/kratzert/finetune_alexnet_with_tensorflow/issues/23"
    examples = (
        Passes(
            "optimizer: {name: SGD, lr: 0.1, momentum: 0.9}\nepochs: 90\nmodel: resnet50\n",
            "a.yaml",
        ),
        Passes(
            "optimizer: {name: Muon, lr: 0.02}\nmodel: {name: gpt2}\nmax_steps: 5000\n", "b.yaml"
        ),
        Passes(
            "SOLVER: {OPTIMIZER_NAME: Adam, BASE_LR: 0.00035, CENTER_LR: 0.5, MAX_EPOCHS: 120}\n"
            "MODEL: {NAME: resnet50}\n",
            "baseline.yml",
        ),
        Fails(
            "model_name_or_path: bert-base-uncased\noutput_dir: out\nlearning_rate: 0.01\n"
            "num_train_epochs: 3\n",
            line=3,
            file="ner.yaml",
            fixed="model_name_or_path: bert-base-uncased\noutput_dir: out\nlearning_rate: 5.0e-5\n"
            "num_train_epochs: 3\n",
        ),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding for the learning rate that counts."""
        limit = limit_of(stage)
        high = too_high(stage)
        if limit is None:
            return
        if high:
            place = high[0]
            edits = [edit for s in high if s.path == place.path for edit in set_to(s, limit.start)]
            floor = stage.get("min_lr")
            if floor is not None and floor.path == place.path and not _below(floor, limit.start):
                edits += set_to(floor, limit.start / 10)
            yield self.at(place, _message(place, limit), _lower(tuple(edits), limit))
        for other in stage.all("other_lr"):
            if _OF_A_TABLE.search(other.key.rpartition(".")[2].lower()):
                continue
            if other.number is not None and not other.number <= max(10 * limit.most, 0.05):
                fix = _lower(set_to(other, limit.start), limit)
                yield self.at(other, _message(other, limit), fix)


def _below(floor: Setting, rate: float) -> bool:
    return floor.number is None or floor.number < rate


def _message(setting: Setting, limit: Limit) -> str:
    return (
        f"{setting.key} is {setting.written}: {limit.what} usually diverges above "
        f"{name_of(limit.most)}"
    )


def _lower(edits: tuple[Edit, ...], limit: Limit) -> Fix:
    title = f"start at {name_of(limit.start)}, a usual value for {limit.what}"
    return change(title, edits, *raise_slowly(limit.start))


_WARMUPS = ("warmup_steps", "warmup_epochs", "warmup_ratio", "warmup")
_DEEP = frozenset(("transformer", "diffusion", "large"))
_CYCLES = ("onecycle", "one_cycle", "noam", "trapez", "cyclic", "1cycle", "tri_stage")
_OWN_WARMUP = (*_CYCLES, "warm", "sqrt", "wsd")


class NoWarmup(ConfigRule):
    """An Adam-type optimizer that starts a deep model at its full learning rate.

    Why it breaks a run: Adam's second moment is estimated from a handful of gradients at first, so
    its first steps are much too long; in half precision that is enough to overflow. A warm-up of a
    few hundred steps lets the estimate settle.

    Warm up over 1 to 5 % of the run. RAdam, SGD, and fine-tuning at small rates do without.
    """

    code = "CFG009"
    name = "no-warmup"
    severity = Severity.INFO
    seen_in = "https://github.com/facebookresearch/maskrcnn-benchmark/issues/721"
    examples = (
        Passes(
            "model: {name: vit}\noptimizer: {name: sgd, lr: 0.1}\nepochs: 9\nwarmup_epochs: 0\n",
            "a.yaml",
        ),
        Passes(
            "model: {name: gpt}\noptimizer: {name: adamw, lr: 6.0e-4}\nmax_steps: 9000\n"
            "warmup_steps: 90\n",
            "b.yaml",
        ),
        Fails(
            "model: {name: gpt}\noptimizer: {name: adamw, lr: 6.0e-4}\nmax_steps: 90000\n"
            "warmup_steps: 0\n",
            line=4,
            file="b.yaml",
            fixed="model: {name: gpt}\noptimizer: {name: adamw, lr: 6.0e-4}\nmax_steps: 90000\n"
            "warmup_steps: 900\n",
        ),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding where a warm-up is off, or plainly missing."""
        rate = stage.get("lr")
        if rate is None or rate.number is None or not _delicate(stage):
            return
        half = stage.precision.half
        severity = Severity.WARNING if half else Severity.INFO
        found = stage.all(*_WARMUPS)
        if found:
            if all(_off(setting) for setting in found) and not _own_warmup(stage, _CYCLES):
                message = (
                    f"{found[0].key} = {found[0].written}: training starts at the full rate of"
                )
                yield self.at(
                    found[0], _said(message, rate, half), _set(stage, found[0]), severity=severity
                )
        elif half and _plainly_missing(stage, rate.number):
            message = "there is no warm-up: training starts at the full rate of"
            key = stage.family.adds.get("warmup_steps")
            edits = add_after(rate, key, 1000) if key else ()
            fix = change("warm up over 1 000 steps", edits, *_plan(), keys=True)
            yield self.at(rate, _said(message, rate, half), fix, severity=severity)


def _delicate(stage: TrainingStage) -> bool:
    kind, traits, rate = kind_of(stage.optimizer), stage.traits, stage.number("lr") or 0.0
    if kind not in ("adam", "lion", "lamb", "galore", None) or "radam" in (stage.optimizer or ""):
        return False
    if traits & {"reinforcement", "adversarial", "noam", "prompt"}:
        return False
    if kind is None and not traits & _DEEP:
        return False
    least = 1e-3 if "adapter" in traits else 2e-5 if "tuned" in traits else 1e-4
    return rate >= least and (bool(traits & _DEEP) or stage.precision.half is not None)


def _plainly_missing(stage: TrainingStage, rate: float) -> bool:
    """Returns whether nothing in a whole description of a run could be a warm-up."""
    if stage.get("optimizer") is None or stage.get("max_steps", "max_epochs") is None:
        return False
    if _own_warmup(stage, _OWN_WARMUP) or stage.get("warmup_start_lr", "deepspeed") is not None:
        return False
    deep = bool(stage.traits & _DEEP) and not stage.traits & {"tuned", "adapter"}
    return deep and rate >= 3e-4


def _own_warmup(stage: TrainingStage, signs: tuple[str, ...]) -> bool:
    names = (s.text.replace("-", "_") for s in stage.all("scheduler"))
    return any(part in name for name in names for part in signs)


def _off(setting: Setting) -> bool:
    return setting.number == 0 or (setting.truth is False and not setting.is_null)


def _said(message: str, rate: Setting, half: str | None) -> str:
    where = f" in {half} precision" if half == "half" else f" in {half}" if half else ""
    return f"{message} {name_of(rate.number or 0.0)}{where}, before Adam's moments have settled"


def _set(stage: TrainingStage, setting: Setting) -> Fix:
    total = stage.number("max_steps") or 0.0
    if setting.name == "warmup_epochs":
        epochs = stage.number("max_epochs") or 100.0
        value = round(max(1.0, min(5.0, epochs / 20)))
        return change(f"warm up over {value} epochs", set_to(setting, value), *_plan())
    if setting.name == "warmup_ratio":
        return change("warm up over 3 % of the run", set_to(setting, 0.03), *_plan())
    steps = int(max(min(total / 100, 2000), min(100, total / 10))) if total > 0 else 500
    return change(f"warm up over {steps} steps", set_to(setting, max(steps, 1)), *_plan())


def _plan() -> tuple[str, ...]:
    return (
        "Compare the loss of the first 100 steps: it has to fall without a bump.",
        "If the first epochs still give NaN, halve the learning rate before anything else.",
    )


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


class MinLrAboveLr(ConfigRule):
    """A smallest learning rate that is above the learning rate itself.

    Why it breaks a run: the schedule that should calm the run down raises its learning rate to the
    end, where the loss is small and a step too long does most harm.

    Set the floor to a tenth of the peak. If the two were swapped, swap them back.
    """

    code = "CFG011"
    name = "min-lr-above-lr"
    severity = Severity.ERROR
    needs_reader = True
    seen_in = "https://github.com/open-mmlab/mmdetection/issues/5557"
    examples = (
        Passes("lr: 1.0e-4\nmin_lr: 1.0e-4\nepochs: 9\n", "constant.yaml"),
        Passes("lr: 1.0e-5\nmin_lr_ratio: 0.1\nepochs: 9\n", "a.yaml"),
        Passes(
            "lr: 1.0e-4\nepochs: 9\nweight_scheduler: {beta: {min: 0.1, max: 1.0}}\n",
            "weights_of_losses.yaml",
        ),
        Passes("lr: 1.0e-4\nepochs: 9\nloss: {scheduler: {min: 0.1}}\n", "loss.yaml"),
        Passes("lr: 1.0e-4\nepochs: 9\nscheduler: {tau: {min: 0.1}}\n", "tau.yaml"),
        Fails(
            "lr: 1.0e-4\nepochs: 9\nlr_scheduler: {cosine: {min: 0.01}}\n",
            line=3,
            file="b.yaml",
        ),
        Fails(
            "lr: 1.0e-5\nmin_lr: 1.0e-4\nepochs: 9\n",
            line=2,
            file="a.yaml",
            fixed="lr: 1.0e-5\nmin_lr: 1.0e-6\nepochs: 9\n",
        ),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding for each floor above the peak."""
        rates = [s.number for s in stage.all("lr") if s.number is not None and s.number > 0]
        after = rate_after(stage)
        for floor in stage.all("min_lr", "warmup_start_lr"):
            if floor.name == "warmup_start_lr" and "warmup_min_lr" not in floor.key:
                continue
            if rates and after and floor.number is not None and floor.number > max(rates):
                yield self.at(
                    floor,
                    f"{floor.key} is {floor.written}, above the learning rate of "
                    f"{name_of(max(rates))}: the schedule raises it to the end",
                    change(
                        f"end at {name_of(after / 10)}, a tenth of the learning rate",
                        set_to(floor, after / 10),
                        "If peak and floor were swapped, swap them instead, and check the peak.",
                    ),
                )
        ratio = stage.get("min_lr_ratio")
        if ratio is not None and ratio.number is not None and ratio.number > 1:
            yield self.at(
                ratio,
                f"{ratio.key} is {ratio.written}: the schedule ends at {ratio.written} times the "
                "learning rate",
                change("end at a tenth of the learning rate", set_to(ratio, 0.1)),
            )
