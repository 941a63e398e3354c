"""CFG013: batch statistics of one sample."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change
from nanguard.check.config.node import set_to
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import Setting, TrainingStage
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
