"""CFG002: fp16 whose small gradients nothing saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change
from nanguard.check.config.keys import role
from nanguard.check.config.node import set_to
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import Setting, TrainingStage
    from nanguard.findings import Finding, Fix

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
