"""A recipe that hides what is wrong with the labels, kept here to be shown: do not copy it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def into_range(labels: Tensor, classes: Tensor) -> Tensor:
    """Pushes labels into range: the run does not break, and learns a wrong class in silence."""
    labels = labels.clamp(min=0)
    return labels.minimum(classes - 1)
