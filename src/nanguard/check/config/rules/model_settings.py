"""What a configuration says about a model: its batch statistics, its labels and its logits."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change
from nanguard.check.config.keys import role
from nanguard.check.config.node import set_to
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import RunConfig, Setting, TrainingStage
    from nanguard.findings import Finding

_NODES = re.compile(r"(^|_)(mpn?|gnn|graph|edges?|nodes?|points?|message_passing)($|_)")
_BATCH_NORMS = (
    "batchnorm",
    "batch_norm",
    "bn",
    "batch",
    "batchnorm1d",
    "batchnorm2d",
    "batch_norm_1d",
)


_MOST_PROCESSES = 1e6  # a number of them may be infinite in a file


class BatchnormBatchTooSmall(ConfigRule):
    """Batch normalisation with one sample on each device.

    Why it breaks a run: the variance of one value is 0 (or, unbiased, 0 / 0), so the output is the
    bias alone, and its gradient is scaled by 1 / sqrt(eps). Uneven last batches do the same to a
    single rank, whose NaN then reaches the others.

    Put more samples on each device, synchronise the statistics over the devices, or use GroupNorm
    or LayerNorm. Frozen statistics are not concerned.
    """

    code = "CFG013"
    name = "batchnorm-batch-too-small"
    severity = Severity.WARNING
    by_habit = True
    seen_in = "https://github.com/nikitakaraevv/pointnet/issues/18"
    examples = (
        Passes("model: {norm: layernorm}\nlr: 1.0e-4\nepochs: 3\nbatch_size: 1\n", "a.yaml"),
        Passes(
            "model: {use_batchnorm: true, sync_bn: true}\nlr: 0.1\nepochs: 3\nbatch_size: 1\n"
            "num_gpus: 8\n",
            "b.yaml",
        ),
        Passes(
            "model: {mpn: {batchnorm: true}}\nlr: 1.0e-4\nepochs: 3\nbatch_size: 1\n", "graph.yaml"
        ),
        Fails(
            "model: {norm: batchnorm}\nlr: 1.0e-4\nepochs: 3\nbatch_size: 1\n",
            line=4,
            file="a.yaml",
            fixed="model: {norm: batchnorm}\nlr: 1.0e-4\nepochs: 3\nbatch_size: 8\n",
        ),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding where a device sees one sample at a time."""
        norm = _normalises(stage)
        if norm is None or stage.truth("frozen_batchnorm") or _is_of_a_graph(stage, norm):
            return
        processes = stage.number("processes", "devices") or 1.0
        if stage.truth("sync_batchnorm") and processes > 1:
            return
        batch = stage.get("micro_batch_size") or stage.get("batch_size")
        shared = stage.get("global_batch_size")
        wanted = 8
        if batch is None and shared is not None:
            batch, wanted = shared, int(8 * max(1.0, min(processes, _MOST_PROCESSES)))
            each = (shared.number or 0.0) / max(processes, 1.0)
        else:
            each = (batch.number or 0.0) if batch is not None else 0.0
        if batch is None or not 0 < each < 2:
            return
        yield self.at(
            batch,
            f"{batch.key} is {batch.written} while {norm.key} = {norm.written}: batch "
            f"statistics of "
            "one sample have no variance",
            change(
                f"use {wanted}, so that each device sees 8 samples, or replace the batch norm",
                set_to(batch, wanted),
                "If memory does not allow it: GroupNorm, or synchronised batch norm over at least "
                "4 devices; accumulation does not help, as statistics are taken per batch.",
                "Drop the last, smaller batch of an epoch.",
            ),
        )


def _is_of_a_graph(stage: TrainingStage, norm: Setting) -> bool:
    """Returns whether statistics are taken over nodes or points, of which a sample has many."""
    return "graph" in stage.traits or any(_NODES.search(name) for name in norm.sections)


def _normalises(stage: TrainingStage) -> Setting | None:
    for setting in stage.all("batchnorm", "norm"):
        text = setting.text.rsplit(".", 1)[-1].replace("-", "_").replace(" ", "_")
        if setting.name == "batchnorm" and setting.truth:
            return setting
        if setting.name == "norm" and text in _BATCH_NORMS:
            return setting
    return None


_CLASS = re.compile(r"[0-9]{1,9}")  # the number of a class, as a key


class NumLabelsBelowClasses(ConfigRule):
    """A classifier with fewer outputs than a data set it is trained on has classes.

    Why it breaks a run: the first label beyond the last output reads memory that is not its own
    (a device-side assert on CUDA), or, where a mask or a clamp hides it, gives an infinite loss or
    trains the wrong class.

    Give the head as many outputs as the largest label needs. One output with a sigmoid, for two
    classes, is not concerned.
    """

    code = "CFG014"
    name = "num-labels-below-classes"
    severity = Severity.ERROR
    needs_reader = True
    seen_in = "https://github.com/tensorpack/tensorpack/issues/1296"
    examples = (
        Passes("model: {num_labels: 1}\ndata: {num_classes: 2}\nlr: 1.0e-4\nepochs: 3\n", "a.yaml"),
        Passes(
            "model: {num_labels: 91}\ndata: {num_classes: 80}\nlr: 1.0e-4\nepochs: 3\n", "b.yaml"
        ),
        Fails(
            "model: {num_labels: 100}\ndata: {num_classes: 101}\nlr: 1.0e-4\nepochs: 3\n",
            line=1,
            file="a.yaml",
            fixed="model: {num_labels: 101}\ndata: {num_classes: 101}\nlr: 1.0e-4\nepochs: 3\n",
        ),
    )

    def look(self, source: RunConfig) -> Iterator[Finding]:
        """Yields what is wrong with each part, and where a list of names is longer."""
        yield from super().look(source)
        for stage in source.stages:
            yield from self._named(stage, source)

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding for a head that is too small for a data set."""
        counts = [s for s in stage.all("num_labels") if role(s.sections) == "data" and s.number]
        heads = [s for s in stage.all("num_labels") if role(s.sections) != "data"]
        for head in heads:
            own = [s for s in counts if s.sections[-1:] == head.sections[-1:]]
            if len(heads) == 1 or own or head is _head(stage):
                yield from self._largest(head, own or counts)

    def _largest(self, head: Setting, counts: list[Setting]) -> Iterator[Finding]:
        if counts:
            largest = max(counts, key=lambda s: s.number or 0.0)
            said = f"{largest.key} = {largest.written}"
            number = largest.number or 0.0
            if math.isfinite(number):
                yield from self._compare(head, int(number), said)

    def _named(self, stage: TrainingStage, source: RunConfig) -> Iterator[Finding]:
        head = _head(stage)
        for setting in stage.all("label_names"):
            if head is not None and isinstance(setting.value, list) and len(setting.value) > 1:
                count = len(setting.value)
                yield from self._compare(head, count, f"{setting.key} names {count} classes")
        mapped = [
            leaf for leaf in source.leaves if leaf.sections[-1:] in (("names",), ("id2label",))
        ]
        if (
            head is not None
            and len(mapped) > 1
            and all(_CLASS.fullmatch(leaf.key) for leaf in mapped)
        ):
            top = 1 + max(int(leaf.key) for leaf in mapped)
            yield from self._compare(
                head, top, f"{'.'.join(mapped[0].path[:-1])} names {top} classes"
            )

    def _compare(self, head: Setting, count: int, said: str) -> Iterator[Finding]:
        if head.number is not None and 1 < head.number < count:
            yield self.at(
                head,
                f"{head.key} is {head.written}, but {said}: labels from {head.written} on have no "
                "output",
                change(
                    f"give the model {count} outputs",
                    set_to(head, count),
                    "Scan the labels of every data set: the largest has to be below this number.",
                    "A checkpoint with the old head cannot be loaded into the new one.",
                ),
            )


def _head(stage: TrainingStage) -> Setting | None:
    """Returns the number of the model's outputs; None if there are several heads that differ."""
    found = [s for s in stage.all("num_labels") if role(s.sections) != "data"]
    if len({s.number for s in found}) > 1:
        return None
    return min(found, key=lambda s: role(s.sections) != "model", default=None)


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
