"""The watched loop: which batch comes next, and what is done between two of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from nanguard.errors import UsageError
from nanguard.guard import events
from nanguard.guard.feed import LOOKS, Feed
from nanguard.numerics import all_finite

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nanguard.guard.feed import Drawn
    from nanguard.guard.flight import Flight
    from nanguard.guard.flights import Flights
    from nanguard.guard.parts import Parts


class Loop:
    """Gives out batches, those of gated steps again, and knows where the loop's body begins."""

    def __init__(self, parts: Parts, flights: Flights) -> None:
        self._parts = parts
        self._flights = flights
        # With several ranks it is not looked at: they would have to find out together.
        self._draws: bool | None = None if parts.ranks.world == 1 else False
        self._looks = LOOKS if parts.ranks.world == 1 else 0

    def iterate(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Yields the batches of one pass with their indices, those of gated steps again."""
        flights = self._flights
        if flights.feed is not None:
            raise UsageError(
                "guard.watch() was called inside of a loop that is already watched.",
                where="guard.watch(loader)",
                do="Watch the training loader only; go over other loaders (evaluation) as usual.",
            )
        feed = flights.feed = self._new_feed(loader)
        finished = False
        try:
            while True:
                self._between_batches(feed)
                drawn = self._draw(feed)
                if drawn is None and flights.ahead():
                    flights.settle()
                    drawn = feed.next(flights.kept())
                if drawn is None:
                    break
                yield drawn[0], self._give(drawn)
            finished = True
        finally:
            self._leave(feed, finished=finished)

    def _new_feed(self, loader: Iterable[Any]) -> Feed:
        parts, flights = self._parts, self._flights
        # A step that was interrupted half-way may have left the gate closed.
        parts.gate.open()
        parts.unchanged.look_again()
        resume, flights.resume = flights.resume, None
        if resume:
            # The loader may draw the seed of a shuffle from here.
            parts.streams.restore(resume["mark"]["streams"])
        return Feed(
            loader,
            ranks=parts.ranks,
            keeper=parts.keeper,
            streams=parts.streams,
            draws=self._draws,
            looks=self._looks,
            start=resume["position"] if resume else 0,
            began=resume["began"] if resume else None,
        )

    def _between_batches(self, feed: Feed) -> None:
        flights = self._flights
        flights.end_void()
        if flights.open is not None and flights.open.passed_over:
            self._pass_over(flights.open)
        flights.take_snapshot()
        flights.between()
        if feed.draws is not False:
            # What the loader draws depends on what the steps before it drew, so they come first.
            flights.settle()

    def _draw(self, feed: Feed) -> Drawn | None:
        flights = self._flights
        drawn = feed.next(flights.kept())
        if feed.draws and not self._draws and self._parts.lag:
            message = "the loader draws from the run's random streams: steps are read one by one"
            self._parts.journal.say(events.LOADER_DRAWS(message, step=flights.steps))
        self._draws, self._looks = feed.draws, feed.looks
        return drawn

    def _pass_over(self, flight: Flight) -> None:
        """Ends a batch that the body passed over, for example because it saw that it was bad.

        What its forward pass did stays, as it would without a guard, unless it poisoned a buffer.
        """
        parts, flights = self._parts, self._flights
        # If a step before it was bad, this batch comes again, and must not be seen twice.
        parts.unchanged.restore_if(parts.gate.latch)
        good = all_finite(flights.way_back.recovery.finite_buffers().values())
        if flight.backwards:
            # It is one of several batches for one step, and one bad batch voids them all.
            if not good:
                parts.gate.write("loss", torch.full((), math.nan))
            return
        if not good:
            parts.unchanged.restore(flight.mark)
        flight.mark, flight.written = flights.new().mark, {}

    def _give(self, drawn: Drawn) -> Any:
        flights = self._flights
        if flights.open is None or not flights.open.begun:
            flights.open = flights.new()
        flights.open.batches.append(drawn)
        flights.open.seen_backwards = flights.open.backwards
        return drawn[1].give()

    def _leave(self, feed: Feed, *, finished: bool) -> None:
        parts, flights = self._parts, self._flights
        if not finished:
            flights.abandon()
            # The body may not be over, and other ranks may be somewhere else.
            if parts.ranks.world == 1 and not flights.several_steps:
                flights.take_snapshot()
        else:
            flights.epoch += 1
            if feed.dropped:
                message = f"another rank ran out of data after {feed.position} batches; the rest "
                message += "of this rank's was left out"
                parts.journal.say(events.UNEVEN_RANKS(message))
        flights.feed = None
        flights.open = flights.open or flights.new()
