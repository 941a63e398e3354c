"""Where batches come from: the user's loader, or those that must be given out again."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset

from nanguard.errors import UsageError
from nanguard.guard.rng import same

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nanguard.guard.batches import Keeper, Kept
    from nanguard.guard.ranks import Ranks
    from nanguard.guard.rng import RandomStreams

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
