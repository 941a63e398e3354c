"""What a configuration says about clipping gradients: nothing, too little, or two things."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import NO_CLIP_FROM, ConfigRule, change, clip_after
from nanguard.check.config.node import add_after, set_to
from nanguard.check.config.run_config import kind_of
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import Setting, TrainingStage
    from nanguard.findings import Edit, Finding, Fix

_CLIPS = ("clip_norm", "clip_value", "clip_switch")
# These bound their own updates, or are trained without clipping as a rule.
_BOUNDED = ("adafactor", "free", "lamb", "lars")


class MissingGradientClipping(ConfigRule):
    """A run of a kind that needs gradient clipping, with clipping off or not set up.

    Why it breaks a run: gradients of recurrent networks grow with the length of the sequence, and
    those of transformers and diffusion models have rare spikes; one unclipped spike moves the
    weights so far that the next loss overflows, sooner still in half precision.

    Clip the norm at 1.0; at 0.5 if spikes remain. Convolutional networks under SGD, GANs and
    Adafactor do without, and so do frameworks that clip by themselves.
    """

    code = "CFG006"
    name = "missing-gradient-clipping"
    severity = Severity.WARNING
    by_habit = True
    seen_in = "https://github.com/chentuochao/Sound_Bubble/issues/4"
    examples = (
        Passes(
            "model: resnet50\noptimizer: {name: sgd, lr: 0.1}\nepochs: 90\ngrad_clip: null\n",
            "a.yaml",
        ),
        Passes(
            "output_dir: o\nlearning_rate: 1.0e-5\nnum_train_epochs: 1\nfp16: true\n"
            "save_steps: 9\n",
            "h.yaml",
        ),
        Fails(
            "model: {type: lstm}\noptimizer: {name: adam, lr: 1.0e-3}\nepochs: 9\n"
            "grad_clip: null\n",
            line=4,
            file="a.yaml",
            fixed="model: {type: lstm}\noptimizer: {name: adam, lr: 1.0e-3}\nepochs: 9\n"
            "grad_clip: 1.0\n",
        ),
        Fails("model: {type: lstm}\noptimizer: {name: adam, lr: 1.0e-3}\nepochs: 9\n", 2, "b.yaml"),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding where clipping is off or absent, and needed."""
        found = stage.all(*_CLIPS)
        if any(_on(setting) for setting in found) or not _needed(stage, off=bool(found)):
            return
        if found and all(setting.is_null for setting in found) and _gentle(stage):
            return
        reason = _reason(stage)
        if found:
            off = found[0]
            yield self.at(
                off,
                f"{off.key} = {off.written or 'null'} switches gradient clipping off; {reason}",
                _fix(set_to(off, True if off.name == "clip_switch" else 1.0)),
            )
            return
        rate = stage.get("lr")
        if rate is not None and stage.family.clips is None:
            yield self.at(
                rate, f"nothing clips the gradients; {reason}", _fix(_added(stage, rate), keys=True)
            )


def _on(setting: Setting) -> bool:
    if setting.name == "clip_switch":
        return setting.truth is not False
    value = setting.number
    if value is not None:
        return value > 0
    return setting.truth is True or bool(
        setting.text and not setting.is_null and setting.truth is None
    )


def _needed(stage: TrainingStage, *, off: bool) -> bool:
    traits, kind = stage.traits, kind_of(stage.optimizer)
    if kind in _BOUNDED or traits & {"adversarial", "reinforcement"}:
        return False
    if stage.family.name == "torchtune" or not _complete(stage, off=off):
        return False
    if "recurrent" in traits:
        return True
    if kind not in ("adam", "lion", "muon", "galore") or stage.family.clips == 0:
        return False
    deep = bool(traits & {"transformer", "diffusion", "large"})
    half = stage.precision.half is not None
    return (deep or half) if off else (deep and half)


def _gentle(stage: TrainingStage) -> bool:
    """Returns whether a model is only tuned, without fp16, where leaving it empty is usual."""
    tuned = bool(stage.traits & {"tuned", "adapter"}) and "recurrent" not in stage.traits
    return tuned and stage.precision.half != "fp16"


def _complete(stage: TrainingStage, *, off: bool) -> bool:
    """Returns whether the files tell enough of a run for what is missing to mean something."""
    if stage.number("lr") is None:
        return off and stage.get("max_steps", "max_epochs") is not None
    named = stage.get("optimizer") is not None or stage.family.optimizer is not None
    return (named and stage.get("max_steps", "max_epochs") is not None) or off


def _reason(stage: TrainingStage) -> str:
    if "recurrent" in stage.traits:
        return "gradients of a recurrent network grow with the length of its sequences"
    half = stage.precision.half
    kind = "a diffusion model" if "diffusion" in stage.traits else "a transformer"
    kind = kind if stage.traits & {"diffusion", "transformer", "large"} else "this run"
    where = f" in {half}" if half in ("fp16", "bf16") else ""
    return f"one gradient spike of {kind}{where} can end the run"


def _added(stage: TrainingStage, rate: Setting) -> tuple[Edit, ...]:
    trainer = stage.get("max_steps", "max_epochs") if stage.family.name == "lightning" else None
    return add_after(trainer or rate, stage.family.adds.get("clip_norm", "max_grad_norm"), 1.0)


def _fix(edits: tuple[Edit, ...], *, keys: bool = False) -> Fix:
    return change(
        "clip the gradient norm at 1.0",
        edits,
        "Watch the gradient norm: if it is cut at most steps, lower the learning rate instead.",
        "If spikes still reach the loss, go on with 0.5, then 0.3.",
        keys=keys,
    )


class ClipNormTooLarge(ConfigRule):
    """A clipping norm of a thousand or more, or infinity, as "no clipping".

    Why it breaks a run: a healthy gradient norm is around 1, one that ruins the weights around 100.
    At 10 000 nothing is ever clipped, while the log says that clipping is on.

    Use 1.0; 0.5 or 0.3 if spikes remain. To measure the norm without clipping, measure it apart.
    """

    code = "CFG007"
    name = "clip-norm-too-large"
    severity = Severity.WARNING
    by_habit = True
    seen_in = "https://github.com/keras-team/keras/issues/5127"
    examples = (
        Passes(
            "lr: 20.0\nmodel: {type: lstm}\nepochs: 9\noptimizer: sgd\ngrad_clip: 100\n", "a.yaml"
        ),
        Fails(
            "lr: 1.0e-4\nepochs: 9\nmax_grad_norm: 1.0e+6  # off\n",
            line=3,
            file="a.yaml",
            fixed="lr: 1.0e-4\nepochs: 9\nmax_grad_norm: 1.0  # off\n",
        ),
        Fails("lr: 1.0e-4\nepochs: 9\nclip_grad_norm: .inf\n", 3, "a.yaml"),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding for each norm that clips nothing."""
        for setting in stage.all("clip_norm", "clip_value"):
            value = setting.number
            most = 10 * NO_CLIP_FROM if "reinforcement" in stage.traits else NO_CLIP_FROM
            if value is None or value < most:
                continue
            target = clip_after(stage)
            yield self.at(
                setting,
                f"{setting.key} is {setting.written}: no gradient is ever clipped at that norm",
                change(
                    f"clip at {target:g}",
                    set_to(setting, target),
                    "Watch the gradient norm for 1 000 steps; clip at 0.5, then 0.3 if spikes "
                    "remain.",
                ),
            )


class ConflictingClipping(ConfigRule):
    """Two different clipping norms for the same gradients, in one file or between files.

    Why it breaks a run: one of them is not applied, or both are, one after the other. Whoever
    lowers the one that does not count sees no change, and looks for the cause elsewhere.

    Set it in one place. With DeepSpeed that is ``gradient_clipping`` in its JSON, best as
    ``"auto"``, so that it follows the trainer's own.
    """

    code = "CFG008"
    name = "conflicting-clipping"
    severity = Severity.WARNING
    seen_in = "https://github.com/axolotl-ai-cloud/axolotl/issues/1381"
    examples = (
        Passes(
            "generator: {lr: 1.0e-4, grad_clip: 1.0}\ndiscriminator: {lr: 4.0e-4, grad_clip: 0.1}\n"
            "epochs: 9\n",
            "gan.yaml",
        ),
        Passes(
            "optimizer: {lr: 1.0e-4, grad_clip: 1.0}\ntrain: {epochs: 9, max_grad_norm: 1}\n",
            "b.yaml",
        ),
        Fails(
            "optimizer: {lr: 1.0e-4, grad_clip: 5.0}\ntrain: {epochs: 9, max_grad_norm: 0.5}\n",
            line=1,
            file="a.yaml",
            fixed="optimizer: {lr: 1.0e-4, grad_clip: 0.5}\n"
            "train: {epochs: 9, max_grad_norm: 0.5}\n",
        ),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding where two settings give two norms."""
        found = [s for s in stage.all("clip_norm") if _counts(s, stage)]
        if len({s.number for s in found}) < 2:
            return
        kept = clip_after(stage)
        wrong = [s for s in found if s.number != kept]
        place = next((s for s in wrong if s.path not in stage.partial), found[0])
        edits = tuple(e for s in wrong if s.path == place.path for e in set_to(s, kept))
        if not edits:  # the wrong one is in the other file: this one follows it
            other = next(s.number for s in found if s.path != place.path)
            edits = set_to(place, other)
        said = ", ".join(
            f"{s.key} = {s.written} ({s.path.rsplit('/', 1)[-1]}:{s.line})" for s in found
        )
        yield self.at(
            place,
            f"gradients are to be clipped at two norms: {said}; only one of them counts",
            change(f"clip at {name_of(kept)} everywhere, the smaller of the two", edits),
        )


def _counts(setting: Setting, stage: TrainingStage) -> bool:
    """Returns whether a norm takes part: numbers do, and 0 for "off" only against another file."""
    if setting.number is None or setting.number < 0:
        return False
    return setting.number > 0 or len({s.path for s in stage.all("clip_norm")}) > 1
