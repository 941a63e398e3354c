"""CFG007: clipping so high that it never clips."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import NO_CLIP_FROM, ConfigRule, change, clip_after
from nanguard.check.config.node import set_to
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import TrainingStage
    from nanguard.findings import Finding


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
