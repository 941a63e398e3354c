"""The guard around a training loop: watch the batches, call backward, step."""

from __future__ import annotations

import contextlib
import math
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nanguard.errors import UsageError
from nanguard.guard import events
from nanguard.guard.batches import LOOKS, Feed
from nanguard.guard.flights import Flights
from nanguard.guard.parts import assemble, check_loss, is_replaying, recovery_for
from nanguard.guard.policy import Action
from nanguard.guard.stepping import Stepper
from nanguard.guard.wayback import Place, WayBack
from nanguard.numerics import all_finite
from nanguard.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.guard.batches import Drawn
    from nanguard.guard.flights import Flight
    from nanguard.guard.journal import Event, Summary
    from nanguard.guard.parts import Models, Optimizers, Parts
    from nanguard.guard.rng import Stream

# Backward passes without a single step after which somebody has forgotten it.
_FORGOTTEN = 100


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
            flights.miss_step()
            if feed.dropped:
                message = f"another rank ran out of data after {feed.position} batches; the rest "
                message += "of this rank's was left out"
                parts.journal.say(events.UNEVEN_RANKS(message))
        flights.feed = None
        flights.open = flights.open or flights.new()


class Guard:
    """Keeps bad steps away from the weights.

    A step whose loss or gradient is not finite, or spikes, changes nothing: parameters,
    optimizer state, buffers, EMA, schedulers, loss scale and random streams are as they were
    before it. A run that met bad batches ends bit-identical to the run that never saw them:

        guard = Guard(model, optimizer, scheduler=scheduler)
        for batch in guard.watch(loader):
            loss = model(batch)
            guard.backward(loss)
            guard.step(max_norm=1.0)

    On CUDA with a fused optimizer the host never waits for the device: it learns of a bad step
    a little late, the device ignores the steps in between, and ``watch`` gives out their batches
    again. Elsewhere the guard reads from the device once before each step.

    Args:
        model: The trained module, or several.
        optimizer: The optimizer, or several. ``step`` steps all of them or the one it is given.
        scheduler: Learning-rate schedulers, stepped together with their optimizer.
        scheduler_every: Whether they count steps, or epochs (then ``end_epoch`` steps them).
        scaler: The GradScaler, where fp16 needs one.
        ema: The moving average of the first model; the guard updates it after each step.
        run_dir: A folder for the run record and for snapshots on disk.
        incidents: Whether bad steps become incidents, replayed and explained, in the run folder,
            as those of ``nanguard run`` do; or another folder for them.
        quarantine: Whether samples that were found bad are left out of the loaders from then on,
            and listed in ``.nanguard/quarantine.jsonl``; this needs ``incidents``.
        trackers: Where else the run is written to: ``tensorboard``, ``wandb``, ``trackio``,
            ``mlflow``; by default what the environment variable ``NANGUARD_TRACK`` names.
        generators: Random generators of the loop's own, to be rewound with the others.
        on_event: Called with every event, in the training thread; ``nanguard.notify`` makes one.
        settings: Everything else.
    """

    def __init__(
        self,
        model: Models,
        optimizer: Optimizers,
        *,
        scheduler: Any = None,
        scheduler_every: Literal["step", "epoch"] = "step",
        scaler: Any = None,
        ema: Any = None,
        run_dir: str | Path | None = None,
        incidents: str | Path | bool | None = None,
        quarantine: bool = False,
        trackers: Sequence[str] | None = None,
        generators: Sequence[Stream] = (),
        on_event: Callable[[Event], None] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self._parts = assemble(
            model,
            optimizer,
            scheduler=scheduler,
            scheduler_every=scheduler_every,
            scaler=scaler,
            ema=ema,
            run_dir=run_dir,
            incidents=incidents,
            quarantine=quarantine,
            trackers=trackers,
            generators=generators,
            on_event=on_event,
            settings=self.settings,
        )
        self._flights = Flights(self._parts)
        self._loop = Loop(self._parts, self._flights)
        self._place = Place(self._parts, self._flights)
        self._recovery = recovery_for(self._parts, self._place)
        self._flights.way_back = WayBack(self._parts, self._recovery, self._place)
        self._stepper = Stepper(self._parts, self._flights)
        self._bypass = Bypass(self._parts.optimizers, self._flights)
        self._closed = False
        self._flights.between()

    @property
    def epoch(self) -> int:
        """How many watched loops have come to their end; where to go on after a resume."""
        return self._flights.epoch

    @property
    def steps(self) -> int:
        """How many steps were tried so far."""
        return self._flights.steps

    @property
    def updates(self) -> int:
        """How many of them changed the weights, as far as is known."""
        return self._flights.updates

    @property
    def last_step_skipped(self) -> bool:
        """Whether the last step whose verdict is known left the weights as they were.

        On CUDA with a fused optimizer that is the step before the last one, or the one before it.
        """
        settled = self._flights.settled
        return settled is not None and settled[1] is not Action.STEP

    def watch(self, loader: Iterable[Any]) -> Watched:
        """Returns an iterable over the batches of a loader, for one epoch.

        Batches whose step came after a bad one, before the host knew, are given out again.
        """
        return Watched(self._loop, loader)

    def enumerate(self, loader: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Yields each batch of a loader with its index in the epoch, for one epoch.

        Other than with ``enumerate(guard.watch(loader))``, a batch that is given out again has
        the same index again, and a resumed epoch goes on with the index it had come to.
        """
        return self._loop.iterate(loader)

    def loss(self, **terms: Tensor | float) -> Tensor:
        """Returns the sum of named loss terms; if one goes bad, it is reported by name."""
        total: Tensor | None = None
        # After a bad step the rest of the loop's body is void, and so are its terms.
        void = self._flights.void is not None or is_replaying(self._parts.recorder)
        flight = None if void else self._flights.begin()
        for name, value in terms.items():
            term = torch.as_tensor(value, device=self._parts.devices[0])
            check_loss(term, self._parts.devices, f"guard.loss({name}=...)", needs_grad=False)
            if flight is not None:
                flight.sum(self._parts.gate, f"term.{name}", self._share(term))
            total = term if total is None else total + term
        if total is None:
            raise UsageError(
                "guard.loss() was called without a loss term.",
                where="guard.loss()",
                do="Name the terms: guard.loss(text=text_loss, latent=0.1 * latent_loss).",
            )
        return total

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Computes gradients, as ``loss.backward()`` does; scales the loss if there is a scaler.

        Args:
            loss: A scalar.
            options: Passed on to ``Tensor.backward``.
        """
        if is_replaying(self._parts.recorder):
            self._go_back(loss, None, options)
            return
        if self._flights.void is not None:
            return
        check_loss(loss, self._parts.devices, "guard.backward(loss)")
        flight = self._flights.begin()
        flight.sum(self._parts.gate, "loss", self._share(loss))
        flight.backwards += 1
        if flight.backwards == _FORGOTTEN:
            self._flights.miss_step()
        self._go_back(loss, self._stepper.seed(flight, loss), options)

    def _share(self, loss: Tensor) -> Tensor:
        """Returns what a loss adds to the loss of its step."""
        return loss

    def _go_back(self, loss: Tensor, seed: Tensor | None, options: dict[str, Any]) -> None:
        """Runs the backward pass."""
        self._parts.scaling.scale(loss).backward(seed, **options)

    def step(
        self,
        optimizer: Optimizer | None = None,
        *,
        max_norm: float | None = None,
        max_value: float | None = None,
        grad_norm: Tensor | float | None = None,
        closure: Callable[[], Tensor] | None = None,
    ) -> bool | None:
        """Clips, steps, advances schedulers and EMA, and zeroes the gradients, if all is well.

        Returns whether the step was made; None where the device has not answered yet.

        Args:
            optimizer: Which optimizer to step; all of them by default.
            max_norm: Scales the gradients down to this global norm.
            max_value: Bounds every element of the gradients, after the norm was judged.
            grad_norm: The norm, if the loop has clipped by itself.
            closure: Evaluates the loss, for optimizers that do so themselves (LBFGS).
        """
        lane, optimizers = self._choose(optimizer)
        recorder = self._parts.recorder
        if recorder is not None and recorder.replaying:
            if closure is not None:
                closure()
            recorder.judge_again(optimizers)
        if self._flights.void is not None or is_replaying(recorder):
            return False
        flight = self._flights.begin()
        with self._bypass.allowed():
            if closure is not None:
                self._stepper.step_with_closure(flight, lane, optimizers[0], closure)
            else:
                self._stepper.step(
                    flight,
                    lane,
                    optimizers,
                    max_norm=max_norm,
                    max_value=max_value,
                    grad_norm=grad_norm,
                )
        settled = self._flights.settled
        known = settled is not None and settled[0] == flight.step
        return settled[1] is Action.STEP if settled is not None and known else None

    def end_epoch(self, **metrics: float) -> None:
        """Adds a row to ``training_history.csv`` and steps schedulers that count epochs.

        Args:
            metrics: What the row shows beside the epoch and the mean training loss, for example
                ``val_loss`` and ``val_acc``. A plateau scheduler looks at ``val_loss``.
        """
        # A scheduler must hear the same on every rank.
        gathered = self._parts.ranks.gather(self._parts.journal.take_losses())
        total, count = (sum(numbers) for numbers in zip(*gathered, strict=True))
        train_loss = total / count if count else math.nan
        self._parts.journal.epoch(self.epoch, {"train_loss": train_loss, **metrics})
        if self._parts.scheduler_every == "epoch":
            for scheduler in self._parts.schedulers:
                if isinstance(scheduler, ReduceLROnPlateau):
                    scheduler.step(metrics.get("val_loss", train_loss))
                else:
                    scheduler.step()

    def summary(self) -> Summary:
        """Returns the counts of everything the guard did so far."""
        self._parts.journal.hear_threads()
        return self._parts.journal.summary

    def resume(self) -> bool:
        """Goes back to the last good snapshot on disk; returns whether there was one.

        Call it before the loop, and go on from ``guard.epoch``: the first watched loop begins at
        the batch where the snapshot was taken.
        """
        self._place.refuse_inside_loop("guard.resume()")
        manifest = self._recovery.resume()
        if manifest is None:
            # The run begins anew; what one left behind that came to no snapshot is not its record.
            self._parts.journal.go_back(self.steps, self.epoch)
            return False
        message = f"resumed after update {manifest['update']}"
        again = self._parts.journal.go_back(self.steps, self.epoch)
        if again:
            message += f"; {again} step{'s' * (again > 1)} after it will be made again"
        self._parts.journal.say(events.RESUMED(message, step=self.steps))
        return True

    def state_dict(self) -> dict[str, Any]:
        """Returns where the run is and what the guard has learned, for your own checkpoint.

        A bad step that the host has not dealt with yet is not part of it: the run that continues
        from here meets its batch again.
        """
        self._flights.accept_good()
        moment = self._place.moment(self._flights.first_unsettled())
        shapes = self._place.shapes()
        learned, rank = self._place.learned(), self._parts.ranks.rank
        return {"moment": moment, "rank": rank, "learned": learned, "shapes": shapes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what ``state_dict`` returned, with the next watched loop."""
        self._place.load_state_dict(state)
        self._parts.journal.go_back(self.steps, self.epoch)

    def close(self) -> None:
        """Ends the guard: nothing of it is left on model or optimizer, all files are written."""
        if self._closed:
            return
        self._closed = True
        self._bypass.close()
        self._flights.abandon()
        self._flights.look_at_the_end()
        self._parts.unchanged.close()
        self._recovery.close()
        if self._parts.recorder is not None:
            self._parts.recorder.close()
        self._parts.journal.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _choose(self, optimizer: Optimizer | None) -> tuple[int, list[Optimizer]]:
        known = self._parts.optimizers
        if optimizer is None or (len(known) == 1 and known[0] is optimizer):
            return -1, known
        for lane, candidate in enumerate(known):
            if candidate is optimizer:
                return lane, [candidate]
        raise UsageError(
            f"{type(optimizer).__name__} is not one of the guard's {len(known)} optimizers.",
            where="guard.step(optimizer)",
            do="Give the guard every optimizer when it is made: Guard(models, [opt_a, opt_b]).",
        )


class Bypass:
    """Notices an optimizer that is stepped past its guard, with gradients that were not judged."""

    def __init__(self, optimizers: Sequence[Optimizer], flights: Flights) -> None:
        self._allowed = False
        # A guard that nobody has closed, and nobody needs any more, is let go of.
        here, steps = weakref.ref(self), weakref.ref(flights)

        def refuse(optimizer: Optimizer, *_call: Any) -> None:
            bypass, known = here(), steps()
            if bypass is None or known is None or bypass._allowed or known.driven:
                return
            step = f"{type(optimizer).__name__}.step()"
            if known.open is not None and known.open.backwards:
                raise UsageError(
                    f"{step} was called after guard.backward(loss): a bad step would reach the "
                    "weights.",
                    where="optimizer.step()",
                    do="Call guard.step() instead; it steps the optimizer if all is well.",
                )
            if known.watched:
                raise UsageError(
                    f"{step} was called in a loop over guard.watch(loader), which knows nothing of "
                    "its gradients: a bad step would reach the weights.",
                    where="optimizer.step()",
                    do="Call guard.backward(loss) instead of loss.backward(), and guard.step() "
                    "instead of optimizer.step().",
                )

        self._hooks = [optimizer.register_step_pre_hook(refuse) for optimizer in optimizers]

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Lets the guard step the optimizers."""
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False

    def close(self) -> None:
        """Leaves the optimizers as they were."""
        for hook in self._hooks:
            hook.remove()


class Watched:
    """The batches of one epoch under a guard."""

    def __init__(self, loop: Loop, loader: Iterable[Any]) -> None:
        self._loop = loop
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, batch in self._loop.iterate(self._loader))

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]
