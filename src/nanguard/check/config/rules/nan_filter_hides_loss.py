"""CFG017: a log that leaves NaN out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change
from nanguard.check.config.node import set_to
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import TrainingStage
    from nanguard.findings import Finding


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
