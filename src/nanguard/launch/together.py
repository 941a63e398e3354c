"""Several ranks, one decision: all of them skip a step, or none does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from nanguard.guard.ranks import is_sharded
from nanguard.tracer.modules import all_modules

if TYPE_CHECKING:
    from nanguard.tracer.symptom import Symptom


class Together:
    """What the ranks know of each other.

    Under DDP and FSDP the gradients are the same on all ranks when the optimizer steps, so they
    carry the verdict. A loss that is bad on one rank alone decides nothing: its gradient does.

    Attributes:
        first: The rank on which the last bad step began.
    """

    def __init__(self) -> None:
        self.first = 0
        self._reduced: bool | None = None

    @property
    def active(self) -> bool:
        """Whether the ranks of this process group train one model."""
        if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
            return False
        if self._reduced is None:
            self._reduced = any(
                type(module).__name__ == "DistributedDataParallel"
                or any(is_sharded(p) for p in module.parameters(recurse=False))
                for module in all_modules()
            )
        return self._reduced

    @property
    def rank(self) -> int:
        """This rank."""
        ready = dist.is_available() and dist.is_initialized()
        return dist.get_rank() if ready else 0

    @property
    def mine(self) -> bool:
        """Whether the last bad step began on this rank, so that this rank reports it."""
        return not self.active or self.first == self.rank

    def agree(self, loss: Symptom | None, gradient: Symptom | None) -> Symptom | None:
        """Returns what is wrong with a step, the same verdict on every rank."""
        if not self.active:
            return loss or gradient
        if gradient is None:
            return None
        self._find_first(loss is not None)
        return loss or gradient

    def agree_on_loss(self, loss: Symptom | None) -> Symptom | None:
        """Returns what is wrong with a loss, where a scaler hides what the gradients say."""
        return None if self.active else loss

    def _find_first(self, bad_here: bool) -> None:  # noqa: FBT001
        # All ranks have seen the same gradients, so all of them come here.
        told: list[bool | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, bad_here)
        self.first = next((rank for rank, bad in enumerate(told) if bad), 0)
