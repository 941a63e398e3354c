"""CFG015: class logits set to -inf before the loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change
from nanguard.check.config.node import set_to
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import TrainingStage
    from nanguard.findings import Finding


class LogitsMaskingEnabled(ConfigRule):
    """Masking of class logits, as in training one head on several data sets.

    Why it breaks a run: classes outside a sample's data set get a logit of -inf. One wrong entry in
    the label map masks the target itself, and the loss of that sample is inf: every evaluation
    shows ``Loss: inf`` while the accuracy looks merely low.

    Label smoothing makes it certain: every class, masked or not, gets a share of the target.

    Switch it off until the labels are known to be right, or mask with a finite value such as -1e4;
    with label smoothing, smooth over the classes of the data set only.
    """

    code = "CFG015"
    name = "logits-masking-enabled"
    severity = Severity.WARNING
    seen_in = "https://github.com/matterport/Mask_RCNN/issues/667"
    examples = (
        Passes("lr: 1.0e-5\nepochs: 3\ndatasets: {enable_logits_masking: false}\n", "a.yaml"),
        Passes(
            "lr: 1.0e-5\nepochs: 3\nlogits_masking: {enabled: true, mask_value: -1.0e+4}\n",
            "b.yaml",
        ),
        Fails(
            "lr: 1.0e-5\nepochs: 3\nlabel_smoothing: 0.1\n"
            "logits_masking: {enabled: true, mask_value: -1.0e+9}\n",
            line=4,
            file="c.yaml",
        ),
        Fails(
            "lr: 1.0e-5\nepochs: 3\ndatasets:\n  enable_logits_masking: true\n",
            line=4,
            file="a.yaml",
            fixed="lr: 1.0e-5\nepochs: 3\ndatasets:\n  enable_logits_masking: false\n",
        ),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding where masking is on and its value is not known to be finite."""
        masking = stage.get("logits_masking")
        if masking is None or masking.truth is not True:
            return
        value = stage.number("logits_mask_value")
        share = stage.number("label_smoothing")
        smoothed = share is not None and 0 < share < 1
        finite = value is not None and math.isfinite(value)
        if finite and not smoothed:
            return
        harm = "a target class that is masked by a wrong label map has a loss of inf"
        if smoothed:
            harm = (
                f"label smoothing of {share:g} gives masked classes a share of the target, and "
                f"each adds that share of its masked logit to the loss"
            )
            harm += "" if finite else ": inf"
        yield self.at(
            masking,
            f"{masking.key} = {masking.written}: {harm}",
            change(
                "switch it off until the labels are known to be right",
                set_to(masking, value=False),
                "Scan the labels of every data set: each has to be a class of that data set.",
                "Raise the learning rate in steps, 1e-6 -> 2e-6 -> 5e-6, while the loss stays "
                "finite.",
                "Then switch masking on again, with a finite mask value such as -1e4.",
            ),
        )
