"""CFG009: full learning rate from the first step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change
from nanguard.check.config.node import add_after, set_to
from nanguard.check.config.run_config import kind_of
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import Setting, TrainingStage
    from nanguard.findings import Finding, Fix

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
