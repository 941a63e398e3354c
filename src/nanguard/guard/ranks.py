"""Several ranks, one decision.

Under DDP and FSDP2 the gradient is reduced over the ranks anyway, so it carries the verdict: a
rank whose loss is bad sends NaN through its backward pass, every rank finds NaN in the reduced
norm, and all of them skip the same step without a collective of our own. No rank ever leaves the
step early, which is what makes the others wait for ever.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

Channel = Literal["none", "gradient", "collective"]


class Ranks:
    """The ranks that train one model together.

    Attributes:
        rank: This rank.
        world: How many ranks there are.
        sharded: Whether parameters are sharded over them (FSDP2).
        channel: What carries a rank's verdict to the others: nothing to carry it to, the
            reduced gradient, or one small all-reduce a step.
        group: The process group for control messages.
    """

    def __init__(self, models: Sequence[nn.Module], *, together: bool, scaled: bool) -> None:
        ready = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if ready else 0
        self.world = dist.get_world_size() if ready and together else 1
        self.sharded = any(is_sharded(p) for model in models for p in model.parameters())
        reduced = self.sharded or all(isinstance(m, DistributedDataParallel) for m in models)
        self.channel: Channel = "none"
        if self.world > 1:
            # With a GradScaler a NaN gradient means overflow, so it cannot mean anything else.
            self.channel = "gradient" if reduced and not scaled else "collective"
        self.group: Any = _control_group() if self.world > 1 else None

    @property
    def first(self) -> bool:
        """Whether this rank does what is done once for all ranks."""
        return self.rank == 0 or self.world == 1

    def tells_of(self, rank: int) -> bool:
        """Returns whether this is the one rank that tells others of what happened on a rank."""
        if self.world > 1:
            return self.rank == rank
        return os.environ.get("RANK", "0") == "0"  # started by a launcher, and not joined

    def seed(self, loss: Tensor, good: Tensor) -> Tensor | None:
        """Returns the gradient to start backward from: NaN if this rank's loss is bad."""
        if self.channel != "gradient":
            return None
        one = torch.ones_like(loss)
        return torch.where(good, one, torch.full_like(one, float("nan")))

    def agree(self, good: Tensor) -> Tensor:
        """Returns whether a 0-dim bool holds on every rank; costs one small all-reduce."""
        if self.channel == "none":
            return good
        flag = good.to(torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return flag > 0

    def any(self, flag: Tensor) -> Tensor:
        """Returns whether a 0-dim bool holds on any rank; costs one small all-reduce."""
        return ~self.agree(~flag)

    def gather(self, mine: Any) -> list[Any]:
        """Returns what every rank has to say. Only an incident or a snapshot talks."""
        if self.world == 1:
            return [mine]
        everything: list[Any] = [None] * self.world
        dist.all_gather_object(everything, mine, group=self.group)
        return everything

    def smallest(self, number: int) -> int:
        """Returns the smallest of one number per rank."""
        if self.world == 1:
            return number
        tensor = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self.group)
        return int(tensor)


_control: tuple[Any, Any] = (None, None)


def _control_group() -> Any:
    """Returns the process group for control messages, one for all guards of a process.

    They travel on CPU, so that they never make a host wait for its device. The group ends with
    the process group it belongs to: a rank that ended it earlier could leave another one waiting.
    """
    global _control
    if _control[0] is not dist.group.WORLD:
        _control = (dist.group.WORLD, dist.new_group(backend="gloo"))
    return _control[1]


def is_sharded(tensor: Tensor) -> bool:
    """Returns whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local")
