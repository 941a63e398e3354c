"""CFG003: a learning rate above what the kind of run bears."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change, limit_of, raise_slowly, too_high
from nanguard.check.config.node import set_to
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
