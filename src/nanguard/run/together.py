"""Several ranks, one decision: all of them skip a step, or none does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from nanguard.guard.ranks import is_sharded
from nanguard.replay.task import Task
from nanguard.replay.tracer.modules import all_modules

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.guard.verdicts import Symptom
    from nanguard.replay.inplace import InPlace
    from nanguard.replay.start import Start

# How long the first rank waits to hear that a bad step began somewhere else.
_PATIENCE = timedelta(seconds=2)
# How long a rank waits for the next replay of the one that explains, before it takes that for dead
# and goes on. The time of a collective is longer by default, so that the others wait for it.
_LEADER = timedelta(seconds=120)


class Together:
    """What the ranks know of each other.

    Under DDP and FSDP the gradients are the same on all ranks when the optimizer steps, so they
    carry the verdict, and no rank has to ask. A loss that is bad on one rank alone decides nothing:
    its gradient does. Only the report is agreed on, through the store of the process group and
    never through a collective: a rank that is bad by itself must not wait for the others.

    Attributes:
        mine: Whether the last bad step began on this rank, so that this rank reports it.
    """

    def __init__(self) -> None:
        self.mine = True
        self._reduced: bool | None = None
        self._needs_all: bool | None = None
        self._talks = False

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

    def agree(self, loss: Symptom | None, gradient: Symptom | None, ordinal: int) -> Symptom | None:
        """Returns what is wrong with a step, the same verdict on every rank.

        Args:
            loss: What is wrong with the loss, here.
            gradient: What is wrong with the gradients, which all ranks have alike.
            ordinal: The step.
        """
        if not self.active:
            return loss or gradient
        if gradient is None:
            return None
        self.mine = self._reports(loss is not None, f"nanguard/{ordinal}")
        return loss or gradient

    @property
    def in_lockstep(self) -> bool:
        """Whether a forward or backward pass needs all ranks, so that none can replay alone."""
        if not self.active:
            return False
        if self._talks:
            return True
        if self._needs_all is None:
            self._needs_all = any(
                isinstance(module, nn.SyncBatchNorm)
                or any(is_sharded(p) for p in module.parameters(recurse=False))
                for module in all_modules()
            )
        return self._needs_all

    def note_collective(self, start: Start | None) -> None:
        """Notes something that ranks do together, if that is in a forward pass.

        That may be a norm over all of them, or a loss that is gathered for a log: all ranks do the
        same, so all of them know that none can replay alone.

        Args:
            start: What the step has begun with that goes on; None if none does.
        """
        self._talks = self._talks or (start is not None and start.is_in_forward)

    def lead(self, replayer: InPlace, ordinal: int) -> contextlib.AbstractContextManager[None]:
        """Makes the other ranks do, as long as it lasts, each replay that this one does."""
        return _led(replayer, _Announcements(ordinal))

    def follow(self, replayer: InPlace, ordinal: int) -> None:
        """Does each replay that the rank does which explains a step, until that is over."""
        announced = _Announcements(ordinal)
        while (note := announced.next()) is not None:
            # What is wrong with a sample is wrong with one of another rank's.
            task = Task(**{**note["task"], "without": (), "trace": False, "folder": None})
            replayer.replay(task, note["variant"])

    def agree_on_loss(self, loss: Symptom | None) -> Symptom | None:
        """Returns what is wrong with a loss, where a scaler hides what the gradients say."""
        return None if self.active else loss

    @staticmethod
    def _reports(bad_here: bool, key: str) -> bool:  # noqa: FBT001
        store: Any = distributed_c10d._get_default_store()
        try:
            if bad_here:
                # The first to come here reports; a second bad rank has nothing to add.
                return bool(store.add(key, 1) == 1)
            if dist.get_rank() == 0:
                store.wait([key], _PATIENCE)
        except (RuntimeError, ValueError):
            # Nobody has a bad loss: the gradient alone is bad, or the store is gone.
            return bad_here or dist.get_rank() == 0
        return False


class _Announcements:
    """What the rank that explains a step announces, through the store of the ranks' group."""

    def __init__(self, ordinal: int) -> None:
        self._key = f"nanguard/again/{ordinal}"
        self._count = 0
        self._store: Any = distributed_c10d._get_default_store()

    def tell(self, note: dict[str, Any] | None) -> None:
        """Announces a replay; None for the end."""
        self._store.set(self._next_key(), json.dumps(note))

    def next(self) -> dict[str, Any] | None:
        """Returns the next replay; None at the end, or if the rank that leads is gone."""
        key = self._next_key()
        try:
            self._store.wait([key], _LEADER)
            found: dict[str, Any] | None = json.loads(self._store.get(key))
        except (RuntimeError, ValueError):
            return None
        return found

    def _next_key(self) -> str:
        self._count += 1
        return f"{self._key}/{self._count}"


@contextlib.contextmanager
def _led(replayer: InPlace, announced: _Announcements) -> Iterator[None]:
    def announce(task: Task, variant: int) -> None:
        plain = dataclasses.asdict(dataclasses.replace(task, answer=None))
        announced.tell({"task": plain, "variant": variant})

    replayer.announce = announce
    try:
        yield
    finally:
        replayer.announce = None
        with contextlib.suppress(RuntimeError):
            announced.tell(None)
