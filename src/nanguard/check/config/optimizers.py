"""Which optimizer a run takes, and what kind of optimizer that is."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nanguard.check.config.names import words

if TYPE_CHECKING:
    from nanguard.check.config.run import Stage

_ADAM = re.compile(
    r"adam|radam|ademamix|adan|(?:^|_)soap|sophia|stable_?adam|came(?:$|_)|adabelief|adopt|lamb"
)
_FREE = re.compile(r"prodigy|d_?adapt|adadelta|lbfgs|rprop|mechanic|dog$|ldog|dlion|cocob")
_ADAM_KEYS = frozenset(("betas", "beta1", "beta2", "eps"))
_SECTIONS = words("adam adamw sgd adafactor lion muon rmsprop lamb lars radam nadam adagrad")


def optimizer_of(stage: Stage) -> str | None:
    """Returns the optimizer of a stage in lower case, or None if nothing tells."""
    setting = stage.get("optimizer")
    if setting is not None and setting.text:
        name = re.split(r"[.:/]", setting.text)[-1]
        return name.replace("-", "_")
    for found in stage.settings:
        named = _SECTIONS.intersection(found.sections)
        if named and found.name in ("lr", *_ADAM_KEYS):
            return sorted(named)[0]
    if any(found.name in _ADAM_KEYS for found in stage.settings):
        return "adam"
    return stage.family.optimizer


def kind_of(optimizer: str | None) -> str | None:
    """Returns the kind of an optimizer, which says what learning rates it bears.

    Returns:
        One of ``adam``, ``sgd``, ``adafactor``, ``lion``, ``muon``, ``rmsprop``, ``lars``,
        ``adagrad``, ``free`` (finds its own step), ``other``; None for None.
    """
    if optimizer is None:
        return None
    if _FREE.search(optimizer):
        return "free"
    for kind in ("adafactor", "lion", "muon", "rmsprop", "lars", "adagrad", "galore", "lamb"):
        if kind in optimizer:
            return kind
    if _ADAM.search(optimizer):
        return "adam"
    return "sgd" if "sgd" in optimizer or optimizer in ("momentum", "nesterov") else "other"
