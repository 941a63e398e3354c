"""Snapshots in host memory, copied without making the device wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nanguard.numerics import local, non_finite
from nanguard.snapshots.training_state import map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor


class Snapshot:
    """A copy of a run's state in host memory.

    Attributes:
        update: How many updates the state has seen.
        step: The step it was taken after.
        on_disk: Whether it is to be written to disk once it is known to be good.
        tree: The state.
    """

    def __init__(self, update: int, step: int, slot: Slot, *, on_disk: bool = False) -> None:
        self.update = update
        self.step = step
        self.on_disk = on_disk
        self.tree: dict[str, Any] = {}
        self._slot = slot
        self._holders = 1
        self._flag: Tensor | None = None
        self._done: torch.cuda.Event | None = None

    def is_good(self) -> bool:
        """Returns whether every number in it is finite; waits until it is copied."""
        self.wait()
        return self._flag is None or not bool(self._flag)

    def wait(self) -> None:
        """Waits until the copy is complete."""
        if self._done is not None:
            self._done.synchronize()

    def hold(self) -> Snapshot:
        """Keeps its memory from being used again until it is released once more."""
        self._holders += 1
        return self

    def release(self) -> None:
        """Gives its memory back when no one holds it any more."""
        self._holders -= 1
        if self._holders == 0:
            self._slot.free = True

    def fill(self, tree: dict[str, Any], copied_at_once: tuple[str, ...], bad: Tensor) -> None:
        """Starts copying a live tree.

        Args:
            tree: The live state.
            copied_at_once: The parts that the next forward pass changes, so that their copy
                must not lag behind.
            bad: Whether the state is non-finite, as a 0-dim bool on the device.
        """
        first = {name: part for name, part in tree.items() if name in copied_at_once}
        rest = {name: part for name, part in tree.items() if name not in copied_at_once}
        self._slot.begin()
        if bad.device.type != "cuda":
            self.tree = {**self._slot.copy(first), **self._slot.copy(rest)}
            self._flag = bad.clone()
            return
        side = self._slot.stream(bad.device)
        self.tree = self._slot.copy(first)
        side.wait_stream(torch.cuda.current_stream(bad.device))
        with torch.cuda.stream(side):
            self.tree.update(self._slot.copy(rest))
            bad.record_stream(side)
            self._flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._flag.copy_(bad, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record(side)

    def fence(self) -> None:
        """Makes the device, not the host, wait for the copy before it goes on."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)


class Slot:
    """Host memory for one snapshot, used again for the next."""

    def __init__(self) -> None:
        self.free = True
        self._memory: list[Tensor] = []
        self._next = 0
        self._stream: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """Starts again at the first tensor."""
        self._next = 0

    def stream(self, device: torch.device) -> torch.cuda.Stream:
        """Returns the stream that copies run on, beside the training."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        return self._stream

    def copy(self, tree: Any) -> Any:
        """Returns a tree of host copies."""
        return map_tensors(tree, self._copy_tensor)

    @torch.no_grad()
    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        source = local(tensor.detach())
        if source.layout != torch.strided:
            return source.to("cpu", copy=True)
        index, self._next = self._next, self._next + 1
        if index == len(self._memory):
            self._memory.append(_host_like(source))
        memory = self._memory[index]
        if not _is_like(memory, source):
            memory = self._memory[index] = _host_like(source)
        # Only the device that the copying stream belongs to can be waited for later.
        beside = self._stream is not None and source.device == self._stream.device
        return memory.copy_(source, non_blocking=beside)


class MemorySnapshots:
    """The last good snapshot in memory, and those that may replace it.

    Each takes a slot: the last good one, the next one, which may turn out bad, and one that is
    still being written to disk.

    Attributes:
        last_good: The newest snapshot known to be good.
    """

    def __init__(
        self,
        *,
        slots: int,
        copied_at_once: tuple[str, ...],
        floats: Callable[[dict[str, Any]], Mapping[str, Tensor]],
        agree: Callable[[Tensor], Tensor],
    ) -> None:
        self._agree = agree
        self._copied_at_once = copied_at_once
        self._floats = floats
        self._slots = [Slot() for _ in range(slots)]
        self._copying: Snapshot | None = None
        self.last_good: Snapshot | None = None

    @property
    def has_room(self) -> bool:
        """Whether there is a free slot."""
        return any(slot.free for slot in self._slots)

    def flag(self, tree: dict[str, Any], bad: Tensor) -> Tensor:
        """Returns, on the device, whether a state is bad or holds a non-finite number, anywhere."""
        return self._agree(bad | non_finite(self._floats(tree).values(), bad.device))

    def take(
        self, tree: dict[str, Any], update: int, step: int, bad: Tensor, *, on_disk: bool = False
    ) -> Snapshot:
        """Starts a snapshot of a live tree; there must be room for it.

        Args:
            tree: The live state.
            update: How many updates it has seen.
            step: The step it is taken after.
            bad: Whether anything else than non-finite numbers in the tree makes it bad.
            on_disk: Whether it is to be written to disk once it is known to be good.
        """
        slot = next(slot for slot in self._slots if slot.free)
        slot.free = False
        snapshot = Snapshot(update, step, slot, on_disk=on_disk)
        snapshot.fill(tree, self._copied_at_once, self.flag(tree, bad))
        self._copying = snapshot
        return snapshot

    def fence(self) -> None:
        """Call before the weights change: the device waits for a copy that is under way."""
        if self._copying is not None:
            self._copying.fence()
            self._copying = None

    def settle(self, snapshot: Snapshot, *, good: bool) -> bool:
        """Ends a snapshot whose step is now known; returns whether it became the last good one."""
        if not (good and snapshot.is_good()):
            snapshot.wait()
            snapshot.release()
            return False
        self.forget()
        self.last_good = snapshot
        return True

    def forget(self) -> None:
        """Lets go of the last good snapshot."""
        if self.last_good is not None:
            self.last_good.release()
        self.last_good = None


def bytes_of(tree: Any) -> int:
    """Returns how much host memory one snapshot of a live tree takes."""
    return sum(local(t).numel() * t.element_size() for _, t in tensors_in(tree))


def _host_like(tensor: Tensor) -> Tensor:
    # Fused optimizers walk memory without looking at strides, so a copy must be laid out alike.
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")


def _is_like(memory: Tensor, tensor: Tensor) -> bool:
    same = memory.shape == tensor.shape and memory.dtype == tensor.dtype
    return same and memory.stride() == _dense_strides(tensor)


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Returns the strides that a copy which keeps the layout of a tensor has."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()
