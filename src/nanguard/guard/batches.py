"""Keeping a batch until its step is known to be good, so that it can be given out again.

A reference is enough, unless the loader writes the next batch into the same memory or the loop
changes the batch in place. Both are noticed: a few batches are copied at first and compared, and
copying goes on for good if either happens.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

# How deep the containers of a batch may nest; what lies deeper is kept by reference.
_DEPTH = 8


class Keeper:
    """Decides how batches are kept.

    Attributes:
        copying: Whether batches are copied rather than referenced.
        reason: Why copying is needed for good; None while it is not.
    """

    def __init__(self, trial: int, *, late: bool = True) -> None:
        self._trial = trial
        self._late = late
        self._recent: list[Kept] = []
        self.reason: str | None = None

    @property
    def copying(self) -> bool:
        """Whether the next batch will be copied."""
        return self._trial > 0 or self.reason is not None

    def keep(self, batch: Any, others: Iterable[Kept]) -> Kept:
        """Keeps a batch just drawn from the loader.

        Args:
            batch: The batch as the loader gave it.
            others: The batches still kept, whose memory the loader must not have used again.
        """
        if not self._late:
            return Kept(batch, follow=False)
        new = Kept(batch, copied=self.copying)
        for kept in (*others, *self._recent):
            if not new.memory.isdisjoint(kept.memory) and not kept.intact():
                self._notice("the loader writes batches into memory that it uses again", kept)
        if self.reason is not None and not new.copied:
            new = Kept(batch, copied=True)
        self._trial -= self._trial > 0
        self._recent = [*self._recent, new] if self._trial else []
        return new

    def check(self, kept: Kept) -> None:
        """Looks whether the loop changed a batch in place."""
        if kept.written():
            self._notice("the training loop changes batches in place", kept)

    def _notice(self, reason: str, kept: Kept) -> None:
        self.reason = self.reason or reason
        kept.stale = kept.stale or not kept.copied


class Kept:
    """One batch, as it was when it was drawn.

    Attributes:
        memory: The addresses its arrays lie at.
        copied: Whether the arrays were copied.
        stale: Whether it is no longer what was drawn, because a reference was overwritten.

    Without ``follow`` it is handed on as it is, for a host that is never late.
    """

    def __init__(self, batch: Any, *, copied: bool = False, follow: bool = True) -> None:
        self.copied = copied
        self.stale = False
        self._given: Any = batch
        self._arrays: list[Any] = []
        self._batch = rebuild(batch, self._take_in) if follow else None
        self._versions = _versions(self._arrays)
        self.memory = {_address(array) for array in self._arrays} - {0}

    def give(self) -> Any:
        """Returns the batch: the loader's own object first, then one like it every time."""
        given, self._given = self._given, None
        return given if given is not None else rebuild(self._batch, self._leaf)

    def written(self) -> bool:
        """Returns whether torch wrote to a tensor of the batch since it was drawn."""
        return _versions(self._arrays) != self._versions

    def intact(self) -> bool:
        """Returns whether the loader's memory still holds this batch.

        Writes that go past torch, through NumPy say, leave no trace but the values. They can be
        seen where there is a copy to compare with.
        """
        if self.written():
            return False
        return not self.copied or all(map(_equal, arrays_in(self._batch), self._arrays))

    def _take_in(self, array: Any) -> Any:
        self._arrays.append(array)
        return self._leaf(array)

    def _leaf(self, array: Any) -> Any:
        # NumPy keeps no account of who wrote to an array, so those are always copied.
        if self.copied or not isinstance(array, torch.Tensor):
            return _copy(array)
        return _reference(array)


def rebuild(batch: Any, leaf: Callable[[Any], Any], depth: int = _DEPTH) -> Any:
    """Returns a batch with new containers and with every array replaced by ``leaf`` of it."""
    if isinstance(batch, torch.Tensor) or _is_numpy(batch):
        return leaf(batch)
    if depth == 0 or batch is None or isinstance(batch, (str, bytes, int, float)):
        return batch
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(rebuild(item, leaf, depth - 1) for item in batch))
    if type(batch) in (list, tuple):
        return type(batch)([rebuild(item, leaf, depth - 1) for item in batch])
    if type(batch) is dict:
        return {key: rebuild(value, leaf, depth - 1) for key, value in batch.items()}
    return _rebuild_object(batch, leaf, depth)


def _rebuild_object(batch: Any, leaf: Callable[[Any], Any], depth: int) -> Any:
    """Rebuilds a mapping of another type, a dataclass, or an object with attributes."""
    if isinstance(batch, type) or callable(batch):
        return batch
    inner = vars(batch) if hasattr(batch, "__dict__") else {}
    if dataclasses.is_dataclass(batch):
        inner = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    elif not isinstance(batch, dict):
        # What hangs deeper below an unknown object is not the batch any more.
        depth = min(depth, 2)
    items = list(batch.items()) if isinstance(batch, dict) else []
    if not inner and not items:
        return batch
    new = copy.copy(batch)
    for key, value in inner.items():
        object.__setattr__(new, key, rebuild(value, leaf, depth - 1))
    for key, value in items:
        new[key] = rebuild(value, leaf, depth - 1)
    return new


def arrays_in(batch: Any) -> list[Any]:
    """Returns every tensor and NumPy array of a batch, in order."""
    found: list[Any] = []

    def collect(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    rebuild(batch, collect)
    return found


def _is_numpy(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _copy(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().clone().requires_grad_(leaf.requires_grad)
    return leaf.copy()


def _reference(leaf: Tensor) -> Tensor:
    return leaf.detach().requires_grad_(leaf.requires_grad)


def _address(leaf: Any) -> int:
    if isinstance(leaf, torch.Tensor):
        return leaf.data_ptr() if leaf.layout == torch.strided else 0
    return int(leaf.__array_interface__["data"][0])


def _versions(arrays: list[Any]) -> list[int]:
    return [a._version for a in arrays if isinstance(a, torch.Tensor) and not a.is_inference()]


def _equal(left: Any, right: Any) -> bool:
    if not isinstance(left, torch.Tensor):
        return bool(left.tobytes() == right.tobytes())
    if left.is_floating_point():
        left, right = left.nan_to_num(), right.nan_to_num()
    return torch.equal(left, right)
