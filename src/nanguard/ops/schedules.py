"""A learning-rate schedule that starts gently and ends where it should."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.optim.lr_scheduler import LambdaLR

from nanguard.errors import UsageError

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass
class WarmupCosine:
    """The factor of the learning rate: a straight rise, then half a cosine, then flat.

    Prevents the first steps at full learning rate, when Adam's moments are still empty, and two
    slips of hand-written schedules: a division by zero with no warm-up, and a cosine that goes up
    again after its end.

    Attributes:
        warmup_steps: The steps of the rise; may be 0.
        total_steps: Where the cosine ends.
        start_factor: The factor at step 0, if there is a warm-up.
        end_factor: The factor at the end and after it.
    """

    warmup_steps: int
    total_steps: int
    start_factor: float = 0.1
    end_factor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps < self.total_steps:
            raise _refused(
                f"{self.warmup_steps} steps of warm-up in {self.total_steps} steps",
                "Use a warm-up that ends before the run does.",
            )
        if not 0 < self.start_factor <= 1 or not 0 <= self.end_factor <= 1:
            raise _refused(
                f"start_factor is {self.start_factor}, end_factor is {self.end_factor}",
                "Use 0 < start_factor <= 1 and 0 <= end_factor <= 1.",
            )

    def __call__(self, step: int) -> float:
        """Returns the factor at a step, counted from 0."""
        if step < self.warmup_steps:
            return self.start_factor + (1 - self.start_factor) * step / self.warmup_steps
        done = min((step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        return self.end_factor + (1 - self.end_factor) * (1 + math.cos(math.pi * done)) / 2


def warmup_cosine(
    optimizer: Optimizer,
    *,
    warmup_steps: int,
    total_steps: int,
    start_factor: float = 0.1,
    end_factor: float = 0.0,
) -> LambdaLR:
    """Returns a scheduler that warms the learning rate up and lowers it along a cosine.

    Call its ``step`` once for each step of the optimizer, or give it to the guard; or count epochs
    in both numbers and call it once for each.

    Args:
        optimizer: Its present learning rates are the highest ones.
        warmup_steps: The steps of the rise; may be 0.
        total_steps: Where the cosine ends.
        start_factor: The factor at step 0.
        end_factor: The factor at the end and after it.
    """
    return LambdaLR(optimizer, WarmupCosine(warmup_steps, total_steps, start_factor, end_factor))


def _refused(what: str, do: str) -> UsageError:
    return UsageError(what, where="nanguard.ops.warmup_cosine", do=do)
