"""Precisions that contradict each other, and fp16 without what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change
from nanguard.check.config.keys import role
from nanguard.check.config.node import set_to
from nanguard.check.config.run_config import kind_of
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.precision import Claim, World
    from nanguard.check.config.run_config import Setting, TrainingStage
    from nanguard.findings import Edit, Finding, Fix

_WORDS = {
    "fp32": "full precision",
    "fp16": "mixed fp16",
    "bf16": "mixed bf16",
    "pure-fp16": "fp16 weights",
    "pure-bf16": "bf16 weights",
}


# Options of launchers and scripts that set the precision whatever files say.
_OPTIONS = ("mixed_precision", "fp16", "bf16", "precision", "amp", "dtype")


class ConflictingPrecision(ConfigRule):
    """Settings that ask for two precisions at once, in one file or between files.

    Why it breaks a run: one of them wins, and which one depends on the order in which code reads
    them. fp16 in place of bf16 overflows at 65 504; a loss scaler that belongs to the other type
    is missing or refuses to work; a launcher that says "no" leaves the trainer's own autocast
    without its scaler.

    Decide for one: bf16 where the hardware has it, else fp16 with loss scaling, else full
    precision; and say it once, or the same everywhere.
    """

    code = "CFG001"
    name = "conflicting-precision"
    severity = Severity.ERROR
    needs_reader = True
    seen_in = "https://github.com/deepspeedai/DeepSpeed/issues/5509"
    examples = (
        Passes("learning_rate: 1.0e-5\nmax_steps: 100\nbf16: true\nfp16: false\n", "run.yaml"),
        Passes(
            "lr: 1.0e-4\nepochs: 3\ndtype: bf16\namp: {enabled: false, dtype: float16}\n", "a.yml"
        ),
        Fails(
            "lr: 1.0e-4\nepochs: 3\nbf16: true\nfp16: true\n",
            line=4,
            file="run.yaml",
            fixed="lr: 1.0e-4\nepochs: 3\nbf16: true\nfp16: false\n",
        ),
        Fails(
            '{"fp16": {"enabled": true}, "bf16": {"enabled": true}, "zero_optimization": {}}',
            1,
            "d.json",
        ),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding where no way to train agrees with every setting."""
        precision = stage.precision
        if not precision.conflicting:
            return
        if any(stage.usage.overridden(c.setting.path, *_OPTIONS) for c in precision.claims):
            return  # the command that starts the run decides
        bound = [claim for claim in precision.claims if claim.setting.path in stage.partial]
        kept = precision.kept(bound)
        against = [claim for claim in precision.claims if kept not in claim.worlds]
        mine = [claim for claim in against if claim.setting.path not in stage.partial] or against
        place = mine[0].setting
        said = ", ".join(_said(claim) for claim in precision.claims)
        edits = tuple(
            edit
            for claim in against
            if claim.setting.path == place.path
            for edit in _agreeing(claim, kept)
        )
        yield self.at(
            place,
            f"these settings cannot all hold: {said}; which one wins depends on the order in "
            "which they are read",
            change(
                f"keep {_WORDS[kept]}, which most of the settings agree with",
                edits,
                "Look at the first lines of the next run: the precision it reports has to be "
                f"{_WORDS[kept]}.",
            ),
        )


def _said(claim: Claim) -> str:
    setting = claim.setting
    file = setting.path.rsplit("/", 1)[-1]
    return f"{setting.key} = {setting.written or 'null'} ({file}:{setting.line})"


def _agreeing(claim: Claim, kept: World) -> tuple[Edit, ...]:
    """Returns the change that makes a setting agree."""
    setting = claim.setting
    half = kept.removeprefix("pure-")
    if setting.name in ("fp16", "bf16"):
        return set_to(setting, setting.name == kept)
    if isinstance(setting.value, bool):
        return set_to(setting, kept in ("fp16", "bf16"))
    if setting.name == "mixed_precision" or (setting.name == "amp" and kept == "fp32"):
        return set_to(setting, half if kept in ("fp16", "bf16") else "no")
    return set_to(setting, _spelled(setting.text, kept))


def _spelled(like: str, kept: World) -> str:
    """Returns the name of a precision as the file spells such names."""
    if like.endswith(("-mixed", "-true")):
        return {"fp32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}.get(
            kept, kept.replace("pure-", "").replace("fp", "") + "-true"
        )
    if "float" in like:
        name = {"fp32": "float32", "fp16": "float16"}.get(kept.removeprefix("pure-"), "bfloat16")
        return f"torch.{name}" if like.startswith("torch.") else name
    return kept.removeprefix("pure-")


_SCALING = ("grad_scaler", "dynamic_loss_scale", "loss_scale", "initial_scale")


class Fp16WithoutLossScaling(ConfigRule):
    """fp16 training with loss scaling switched off, or with everything in fp16 and no scaler.

    Why it breaks a run: most gradients of a deep network are below 6e-8, the smallest fp16 number,
    and become 0; the optimizer then divides 0 by its eps, which is 0 in fp16 too. Multiplying the
    loss by a factor that adapts (loss scaling) keeps them.

    Use mixed precision with a scaler (``fp16: true`` in transformers, ``16-mixed`` in Lightning,
    ``loss_scale: 0`` in DeepSpeed), or bf16, which needs none.
    """

    code = "CFG002"
    name = "fp16-without-loss-scaling"
    severity = Severity.WARNING
    seen_in = "https://github.com/allenai/OLMo/issues/524"
    examples = (
        Passes('{"fp16": {"enabled": true, "loss_scale": 0}, "zero_optimization": {}}', "ds.json"),
        Passes("lr: 1.0e-4\nepochs: 3\ntrain_dtype: bfloat16\nuse_grad_scaler: false\n", "a.yaml"),
        Fails(
            "lr: 1.0e-4\nepochs: 3\nfp16: true\nuse_grad_scaler: false\n",
            line=4,
            file="a.yaml",
            fixed="lr: 1.0e-4\nepochs: 3\nfp16: true\nuse_grad_scaler: true\n",
        ),
        Fails("trainer:\n  max_epochs: 9\n  accelerator: gpu\n  precision: 16-true\n", 4, "l.yaml"),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding where fp16 is in use and nothing scales the loss."""
        precision = stage.precision
        if precision.conflicting or precision.half != "fp16":
            return
        off = _switched_off(stage)
        if off is not None:
            yield self.at(
                off,
                f"{off.key} = {off.written}: fp16 without loss scaling loses every gradient below "
                "6e-8",
                _scaled(off),
            )
            return
        whole = _whole_model(stage)
        if whole is not None:
            yield self.at(
                whole,
                f"{whole.key} = {whole.written}: everything is computed in fp16 and nothing scales "
                "the loss, so gradients below 6e-8 become 0",
                _mixed(whole),
            )


def _switched_off(stage: TrainingStage) -> Setting | None:
    """Returns the setting that switches loss scaling off; None if none does."""
    for setting in stage.all("grad_scaler", "loss_scale"):
        if setting.name == "grad_scaler" and setting.truth is False and not setting.is_null:
            return setting
        if (
            setting.name == "loss_scale"
            and setting.number == 1
            and role(setting.sections) not in ("model", "loss")  # there it weighs a loss term
            and not stage.truth("dynamic_loss_scale")
        ):
            return setting
    dynamic = stage.get("dynamic_loss_scale")
    if dynamic is not None and dynamic.truth is False and stage.get("loss_scale") is None:
        return dynamic
    return None


def _whole_model(stage: TrainingStage) -> Setting | None:
    """Returns the setting that makes the weights fp16, where nothing scales the loss."""
    if stage.traits & {"adapter", "quantised"} or stage.get(*_SCALING) is not None:
        return None
    level = stage.get("amp_level")
    if level is not None and level.text == "o3":
        return level
    if not stage.precision.pure:
        return None
    names = ("param_dtype", "precision", "dtype")
    claims = [claim.setting for claim in stage.precision.claims]
    return next((setting for setting in claims if setting.name in names), None)


def _scaled(off: Setting) -> Fix:
    dynamic = off.name == "loss_scale"
    spelled = 0 if off.sections[-1:] == ("fp16",) or off.document.format == "json" else "dynamic"
    return change(
        "scale the loss by a factor that adapts",
        set_to(off, spelled if dynamic else True),
        "Watch the scale: when it keeps falling, some operation overflows in fp16; use bf16 there.",
    )


def _mixed(whole: Setting) -> Fix:
    text = whole.text
    if text.endswith("-true"):
        return change("use mixed precision, which scales the loss", set_to(whole, "16-mixed"))
    if whole.name == "amp_level":
        return change("use O1, which scales the loss", set_to(whole, "O1"))
    right = "bfloat16" if "float" in text else "bf16"
    right = f"torch.{right}" if text.startswith("torch.") else right
    value = False if isinstance(whole.value, bool) else right
    return change(
        "use bf16, which has the range of fp32 and needs no loss scaling",
        set_to(whole, value),
        "Without bf16 on the hardware: keep the weights in fp32 and use mixed fp16 with a scaler.",
    )


_ZERO_IN_FP16 = 2.0**-25  # rounds to 0; the smallest fp16 number is 2 ** -24
_IDLE = 5e-10  # far below what an unscaled fp16 gradient can be


class AdamEpsTooSmall(ConfigRule):
    """Adam's eps too small for fp16.

    Why it breaks a run: where weights and moments are fp16, an eps below 3e-8 is 0, and the first
    weight whose gradient is 0 gets 0 / 0. With fp32 weights an eps far below 1e-8 still turns the
    noise of an underflowing fp16 gradient into a step of full length.

    Use 1e-4 to 1e-6 where everything is fp16; leave 1e-8 where the weights are fp32. bf16 has the
    range of fp32 and is not concerned.
    """

    code = "CFG012"
    name = "adam-eps-too-small"
    severity = Severity.WARNING
    by_habit = True
    seen_in = "https://github.com/pytorch/pytorch/issues/26218"
    examples = (
        Passes("adam: {lr: 3.0e-4, eps: 1.0e-10}\nepochs: 9\ndtype: bf16\n", "a.yaml"),
        Passes(
            "optimizer: {name: adam, lr: 3.0e-4, eps: 1.0e-8}\nepochs: 9\nfp16: true\n", "b.yaml"
        ),
        Fails(
            "optimizer: {name: adam, lr: 3.0e-4, eps: 1.0e-10}\nepochs: 9\nparam_dtype: float16\n",
            line=1,
            file="a.yaml",
            fixed="optimizer: {name: adam, lr: 3.0e-4, eps: 1.0e-4}\nepochs: 9\n"
            "param_dtype: float16\n",
        ),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding where eps cannot do its work."""
        eps = stage.get("eps")
        if eps is None or eps.number is None or eps.number < 0:
            return
        if kind_of(stage.optimizer) not in ("adam", "lamb", "galore", "rmsprop"):
            return
        if stage.precision.half != "fp16" or "field" in stage.traits:
            return
        pure = stage.precision.pure
        if eps.number > (_ZERO_IN_FP16 if pure else _IDLE):
            return
        right = 1e-4 if pure else 1e-8
        why = "is 0 in fp16" if pure else "protects nothing where gradients are computed in fp16"
        yield self.at(
            eps,
            f"{eps.key} is {eps.written}, which {why}",
            change(
                f"use {name_of(right)}",
                set_to(eps, right),
                "Keep the weights in fp32 (mixed precision) to go back to 1e-8.",
            ),
        )
