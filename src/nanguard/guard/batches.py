"""Batches: where they come from, and how one is kept until its step is known to be good.

They come from the user's loader, or are given out again. To keep one a reference is enough, unless
the loader writes the next batch into the same memory or the loop changes the batch in place. Both
are noticed: a few batches are copied at first and compared, and copying goes on for good if either
happens.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from nanguard.errors import UsageError
from nanguard.guard.rng import same

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from nanguard.guard.ranks import Ranks
    from nanguard.guard.rng import RandomStreams

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


log = logging.getLogger("nanguard")

Drawn = tuple[int, "Kept"]

# Draws that are looked at, to find out whether the loader uses the run's random streams, and how
# many of them come with nothing in flight.
LOOKS = 64
_TRIAL = 4


class Feed:
    """Gives out the batches of one pass over a loader.

    Attributes:
        began: The random streams at the start of the pass, from which a shuffle can be repeated.
        position: The index of the next batch to be drawn from the loader.
        draws: Whether the loader takes random numbers from the run's own streams between batches;
            None until that is known.
        looks: How many more draws will be looked at to find out.
        dropped: Whether this rank had batches left when another rank had none.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        ranks: Ranks,
        keeper: Keeper,
        streams: RandomStreams,
        draws: bool | None = None,
        looks: int = LOOKS,
        start: int = 0,
        began: dict[str, Any] | None = None,
    ) -> None:
        self._ranks = ranks
        self._keeper = keeper
        self._streams = streams
        self._again: deque[Drawn] = deque()
        self.draws = draws
        self.looks = looks
        self.dropped = False
        self._ended = False
        self.position = 0
        now = streams.capture()
        if began is not None:
            streams.restore(began)
        self.began = began or now
        self._length = self._agreed_length(loader)
        self._iterator = _iterate(loader)
        if start:
            self._fast_forward(start)
        if began is not None:
            streams.restore(now)

    def next(self, kept: Sequence[Kept]) -> Drawn | None:
        """Returns the next batch, one to be given out again first; None at the end.

        Args:
            kept: The batches still in flight.
        """
        if self._again:
            return self._again.popleft()
        if self._ended:
            # Some iterators begin anew when they are asked again after their end.
            return None
        if self._length is not None and self.position >= self._length:
            self.dropped = self.dropped or self._had_more
            return None
        # The first batch draws the seed of a shuffle, which says nothing about the others. Some
        # samplers draw for many batches at once.
        looks = self.draws is not True and self.looks > 0 and self.position > 0
        before = self._streams.capture() if looks else None
        found, batch = self._draw()
        if not found:
            self._ended = True
            return None
        if before is not None:
            self.looks -= 1
            if not same(before, self._streams.capture()):
                self.draws = True
            elif self.looks == LOOKS - _TRIAL:
                self.draws = False
        index, self.position = self.position, self.position + 1
        return index, self._keeper.keep(batch, kept)

    @property
    def upcoming(self) -> int:
        """The index of the batch that will be given out next."""
        return self._again[0][0] if self._again else self.position

    def give_back(self, batches: Sequence[Drawn]) -> None:
        """Takes batches that will be given out again, before any other."""
        self._again.extendleft(reversed(batches))

    def _draw(self) -> tuple[bool, Any]:
        try:
            found, batch = True, next(self._iterator)
        except StopIteration:
            found, batch = False, None
        if self._length is None and self._ranks.world > 1:
            everyone = self._ranks.smallest(int(found)) == 1
            self.dropped = self.dropped or (found and not everyone)
            return everyone, batch
        if not found and self._length is not None:
            raise UsageError(
                f"the loader ended after {self.position} batches; its length promised "
                f"{self._length} on every rank.",
                where=f"guard.watch(loader) on rank {self._ranks.rank}",
                do="Correct the loader's __len__, or hide it (iter(loader)) so that the ranks "
                "agree before every batch.",
            )
        return found, batch

    def _agreed_length(self, loader: Iterable[Any]) -> int | None:
        """Returns how many batches every rank has; None where that cannot be known."""
        self._had_more = False
        if self._ranks.world == 1:
            return None
        mine = _length_of(loader)
        known = self._ranks.smallest(-1 if mine is None else mine)
        if known < 0:
            return None
        self._had_more = mine is not None and mine > known
        return known

    def _fast_forward(self, start: int) -> None:
        log.info("nanguard: resuming in the middle of a pass: drawing %d batches again", start)
        for _ in range(start):
            found, _batch = self._draw()
            if not found:
                raise UsageError(
                    f"the loader ended after {self.position} batches, before batch {start} "
                    "where the run is to be resumed.",
                    where="guard.watch(loader)",
                    do="Resume with the data and the batch size that the run was started with.",
                )
            self.position += 1


def _iterate(loader: Iterable[Any]) -> Iterator[Any]:
    try:
        return iter(loader)
    except TypeError as error:
        raise UsageError(
            f"{type(loader).__name__} cannot be iterated over.",
            where="guard.watch(loader)",
            do="Give a DataLoader, a list of batches, a generator, or anything else that a for "
            "loop takes.",
        ) from error


def _length_of(loader: Iterable[Any]) -> int | None:
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return None  # its length is a promise that workers and ranks often break
    try:
        return len(loader)  # type: ignore[arg-type]
    except TypeError:
        return None
