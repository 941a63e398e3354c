"""CFG011: a schedule that ends above where it starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change, rate_after
from nanguard.check.config.node import set_to
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import TrainingStage
    from nanguard.findings import Finding


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
