"""What a run's configuration shows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nanguard.advice.checklist.facts import Trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nanguard.check.config.leaves import Leaf
    from nanguard.check.config.run import RunConfig, Stage
    from nanguard.check.config.settings import Setting

_TRAINERS = frozenset(("huggingface", "axolotl"))
# Settings that show something where they are above zero, or on: the trace, and their names.
_POSITIVE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("clip", ("clip_norm", "clip_value")),
    ("warmup", ("warmup_steps", "warmup_epochs", "warmup_ratio", "warmup")),
    ("rate-set", ("lr",)),
    ("save", ("save_steps", "save_epochs", "save_interval", "checkpointing")),
    ("sync-batchnorm", ("sync_batchnorm",)),
    ("scaler-on", ("grad_scaler", "dynamic_loss_scale")),
    ("batchnorm", ("batchnorm",)),
)
# Keys that no rule reads: the trace, and what the key looks like.
_KEYS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("drop-last", re.compile(r"(^|_)drop_last$")),
    ("small-trial", re.compile(r"^(limit_train_batches|overfit_batches|max_train_samples)$")),
    ("metrics", re.compile(r"^(report_to|log_with|wandb_project|logger|tensorboard_dir)$")),
)
_NONE = (None, False, "", "none", "no", 0)


def config_traces(run: RunConfig) -> Iterator[Trace]:
    """Yields what one run shows."""
    for document in run.documents:
        yield Trace("configuration", document.path, None, "its keys")
    for stage in run.stages:
        yield from _stage(stage)
    for leaf in run.leaves:
        yield from _leaf(leaf)
    if run.family.name in _TRAINERS:
        words = "the Trainer of transformers does it"
        yield Trace("hf-trainer", run.path, None, words)


def _stage(stage: Stage) -> Iterator[Trace]:
    for name, settings in _POSITIVE:
        setting = stage.get(*settings)
        if setting is not None and _is_on(setting):
            yield _trace(name, setting)
    clip = stage.get("clip_norm")
    if clip is not None and clip.number == 0:
        yield _trace("clip-off", clip)
    strategy = stage.get("save_strategy")
    if strategy is not None:
        yield _trace("save-off" if strategy.text == "no" else "save", strategy)
    hidden = stage.get("nan_filter")
    if hidden is not None and hidden.truth is False:
        yield _trace("nan-filter-off", hidden)
    yield from _ranks(stage.all("processes", "devices"))
    yield from _precision(stage)


def _precision(stage: Stage) -> Iterator[Trace]:
    claims = stage.precision.claims
    if not claims:
        return
    first = claims[0].setting
    yield _trace("precision-set", first)
    half = stage.precision.half
    if half is not None:
        yield _trace("half", first)
    if half == "fp16":
        yield _trace("fp16", first)


def _ranks(settings: Iterable[Setting]) -> Iterator[Trace]:
    for setting in settings:
        if setting.number is not None and (setting.number > 1 or setting.number == -1):
            yield _trace("several-ranks", setting)


def _leaf(leaf: Leaf) -> Iterator[Trace]:
    value = leaf.node.value if leaf.node.kind == "scalar" else "listed"
    text = value.lower() if isinstance(value, str) else value
    if text in _NONE:
        return
    dotted = ".".join(leaf.path)
    for name, pattern in _KEYS:
        if pattern.search(leaf.key):
            yield Trace(name, leaf.document.path, leaf.entry.line, f"{dotted} is set")
    if leaf.key == "distributed_type" and isinstance(text, str) and text.startswith("multi_"):
        yield Trace("several-ranks", leaf.document.path, leaf.entry.line, f"{dotted} is {value}")


def _is_on(setting: Setting) -> bool:
    if setting.truth is not None:
        return setting.truth
    return setting.text == "auto" or (setting.number is not None and setting.number > 0)


def _trace(name: str, setting: Setting) -> Trace:
    return Trace(name, setting.path, setting.line, f"{setting.key}: {setting.written[:40]}")
