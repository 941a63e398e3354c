"""The guard around a training loop: watch the batches, call backward, step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nanguard import numerics
from nanguard.errors import UsageError
from nanguard.guard import events
from nanguard.guard.applying import Clipping, ClosureStep, apply_gated, apply_read
from nanguard.guard.flights import Flights, Place
from nanguard.guard.models import check_loss, trained
from nanguard.guard.optimizers import can_be_gated, learning_rate, parameters_of
from nanguard.guard.parts import assemble, recovery_for
from nanguard.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.guard.flights import Flight
    from nanguard.guard.models import Models, Optimizers
    from nanguard.guard.rng import Stream
    from nanguard.guard.summary import Event, Summary


class Guard:
    """Keeps bad steps away from the weights.

    A step whose loss or gradient is not finite, or spikes, changes nothing: parameters,
    optimizer state, buffers, EMA, schedulers, loss scale and random streams are as they were
    before it. A run that met bad batches ends bit-identical to the run that never saw them::

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
        generators: Random generators of the loop's own, to be rewound with the others.
        on_event: Called with every event, in the training thread.
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
        generators: Sequence[Stream] = (),
        on_event: Callable[[Event], None] | None = None,
        settings: Settings | None = None,
    ) -> None:
        self.settings = settings or Settings()
        self._scheduler_every = scheduler_every
        self._parts = assemble(
            model,
            optimizer,
            scheduler=scheduler,
            scaler=scaler,
            ema=ema,
            run_dir=run_dir,
            generators=generators,
            on_event=on_event,
            settings=self.settings,
        )
        self._flights = Flights(self._parts)
        self._flights.recovery = recovery_for(self._parts, Place(self._flights))
        self._usual_backwards = 0
        self._known_parameters: dict[int, tuple[int, list[Tensor]]] = {}

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

    def watch(self, loader: Iterable[Any]) -> Watched:
        """Returns an iterable over the batches of a loader, for one epoch.

        Batches whose step came after a bad one, before the host knew, are given out again.
        """
        return Watched(self._flights, loader)

    def loss(self, **terms: Tensor | float) -> Tensor:
        """Returns the sum of named loss terms; if one goes bad, it is reported by name."""
        total: Tensor | None = None
        flight = self._flights.begin()
        for name, value in terms.items():
            term = torch.as_tensor(value, device=self._parts.devices[0])
            check_loss(term, self._parts.devices, f"guard.loss({name}=...)", needs_grad=False)
            seen = _number(term)
            flight.terms[name] = flight.terms[name] + seen if name in flight.terms else seen
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
        if self._flights.void is not None:
            return
        check_loss(loss, self._parts.devices, "guard.backward(loss)")
        flight = self._flights.begin()
        value = _number(loss)
        flight.loss = value if flight.loss is None else flight.loss + value
        flight.backwards += 1
        scaled = self._parts.scaling.scale(loss)
        scaled.backward(self._seed(flight, scaled), **options)

    def step(
        self,
        optimizer: Optimizer | None = None,
        *,
        max_norm: float | None = None,
        max_value: float | None = None,
        grad_norm: Tensor | None = None,
        closure: Callable[[], Tensor] | None = None,
    ) -> None:
        """Clips, steps, advances schedulers and EMA, and zeroes the gradients, if all is well.

        Args:
            optimizer: Which optimizer to step; all of them by default.
            max_norm: Scales the gradients down to this global norm.
            max_value: Bounds every element of the gradients, after the norm was judged.
            grad_norm: The norm, if the loop has clipped by itself.
            closure: Evaluates the loss, for optimizers that do so themselves (LBFGS).
        """
        if self._flights.void is not None:
            return
        lane, optimizers = self._choose(optimizer)
        flight = self._flights.begin()
        self._prepare(flight, lane, optimizers)
        if closure is not None:
            self._step_with_closure(flight, optimizers[0], closure)
            return
        if flight.loss is None:
            raise UsageError(
                "guard.step() was called, but guard.backward(loss) was not since the last step.",
                where="guard.step()",
                do="Call guard.backward(loss) instead of loss.backward(), then guard.step().",
            )
        self._usual_backwards = flight.backwards
        self._parts.scaling.unscale(optimizers)
        parameters = self._parameters(lane, optimizers)
        norm = numerics.grad_norm(parameters) if grad_norm is None else grad_norm
        clipping = Clipping(parameters, norm, max_norm, max_value)
        values = {"loss": flight.loss, "grad_norm": _wide(numerics.whole(norm))}
        values.update(self._parts.scaling.readings(optimizers))
        values.update({f"term.{name}": term for name, term in flight.terms.items()})
        self._parts.gate.close_unless(self._is_good(flight, values))
        watched = self._flights.feed is not None
        if self._parts.lag and watched and all(map(can_be_gated, optimizers)):
            apply = self._apply_late
        else:
            apply = self._apply_read
        apply(flight, optimizers, values, clipping)

    def end_epoch(self, **metrics: float) -> None:
        """Adds a row to ``training_history.csv`` and steps schedulers that count epochs.

        Args:
            metrics: What the row shows beside the epoch and the mean training loss, for example
                ``val_loss`` and ``val_acc``. A plateau scheduler looks at ``val_loss``.
        """
        train_loss = self._parts.journal.epoch(self.epoch, metrics)
        if self._scheduler_every == "epoch":
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
        manifest = self._flights.recovery.resume()
        if manifest is None:
            return False
        message = f"resumed after update {manifest['update']}"
        self._parts.journal.say(events.RESUMED(message, step=self.steps))
        return True

    def state_dict(self) -> dict[str, Any]:
        """Returns where the run is and what the guard has learned, for your own checkpoint."""
        return self._flights.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from what ``state_dict`` returned, with the next watched loop."""
        self._flights.load_state_dict(state)

    def close(self) -> None:
        """Ends the guard: nothing of it is left on model or optimizer, all files are written."""
        self._flights.abandon()
        self._flights.recovery.close()
        self._parts.journal.close()
        self._parts.ranks.close()

    def __enter__(self) -> Guard:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _choose(self, optimizer: Optimizer | None) -> tuple[int, list[Optimizer]]:
        known = self._parts.optimizers
        if optimizer is None or len(known) == 1:
            return -1, known
        for lane, candidate in enumerate(known):
            if candidate is optimizer:
                return lane, [candidate]
        raise UsageError(
            f"{type(optimizer).__name__} is not one of the guard's {len(known)} optimizers.",
            where="guard.step(optimizer)",
            do="Give the guard every optimizer when it is made: Guard(models, [opt_a, opt_b]).",
        )

    def _parameters(self, lane: int, optimizers: Sequence[Optimizer]) -> list[Tensor]:
        """Returns the parameters of some optimizers; looks them up again when a group is added."""
        count = sum(len(group["params"]) for o in optimizers for group in o.param_groups)
        known = self._known_parameters.get(lane)
        if known is None or known[0] != count:
            known = self._known_parameters[lane] = (count, parameters_of(optimizers))
        return known[1]

    def _prepare(self, flight: Flight, lane: int, optimizers: Sequence[Optimizer]) -> None:
        flight.lane = lane
        flight.lr = learning_rate(optimizers) * self._parts.policy.lr_factor
        flight.limits = self._parts.judges[lane].limits(self._flights.ahead(lane))

    def _seed(self, flight: Flight, loss: Tensor) -> Tensor | None:
        """Returns what backward starts from where the gradient tells other ranks the verdict."""
        if self._parts.ranks.channel != "gradient" or flight.loss is None:
            return None
        limit = float("inf")
        if len(self._parts.optimizers) == 1 and flight.backwards == self._usual_backwards:
            # Only the last backward of a step sees the whole loss that the limit is about.
            judge = self._parts.judges[-1]
            limit, _ = judge.acts_on(judge.limits(self._flights.ahead(-1)))
        return self._parts.ranks.seed(loss, numerics.within(flight.loss, limit))

    def _is_good(self, flight: Flight, values: dict[str, Tensor]) -> Tensor:
        """Returns, on the device, whether a step may be applied; the same on every rank."""
        loss_limit, norm_limit = self._parts.judges[flight.lane].acts_on(flight.limits)
        norm_good = numerics.within(values["grad_norm"], norm_limit)
        if "overflow" in values:
            # A scaler deals with overflow by itself, as long as its scale can be to blame.
            norm_good = norm_good | ((values["overflow"] > 0) & (values["scale"] > 1.0))
        if self._parts.ranks.channel == "gradient":
            return norm_good
        return self._parts.ranks.agree(norm_good & numerics.within(values["loss"], loss_limit))

    def _apply_late(
        self,
        flight: Flight,
        optimizers: Sequence[Optimizer],
        values: dict[str, Tensor],
        clipping: Clipping,
    ) -> None:
        """Applies a step through the gate; the host will look at it later."""
        parts, latch = self._parts, self._parts.gate.latch
        self._flights.before_update()
        clipping.apply()
        apply_gated(optimizers, latch, parts.scaling, parts.policy.lr_factor)
        self._after_update(optimizers, latch)
        parts.unchanged.restore_if(latch)
        values = {"latch": latch, **values}
        poisoned = self._scan(optimizers)
        if poisoned is not None:
            values["poisoned"] = poisoned.to(latch.dtype)
        flight.tickets = [parts.gate.post(values)]
        if poisoned is not None:
            parts.gate.close_unless(~poisoned)
        self._flights.launch(flight, keep=parts.lag)

    def _apply_read(
        self,
        flight: Flight,
        optimizers: Sequence[Optimizer],
        values: dict[str, Tensor],
        clipping: Clipping,
    ) -> None:
        """Applies a step after the host has seen that it is good."""
        parts, gate = self._parts, self._parts.gate
        flight.tickets = [gate.post({"latch": gate.latch, **values})]
        reading = flight.read()
        if reading.closed:
            flight.suspects = _bad_gradients(trained(parts.models, optimizers))
        else:
            self._flights.before_update()
            clipping.apply()
            apply_read(optimizers, parts.scaling, parts.policy.lr_factor, overflow=reading.overflow)
            self._after_update(optimizers, None)
            poisoned = self._scan(optimizers)
            if poisoned is not None:
                flight.tickets.append(gate.post({"poisoned": poisoned.to(gate.latch.dtype)}))
        self._flights.launch(flight, keep=0)

    def _after_update(self, optimizers: Sequence[Optimizer], latch: Tensor | None) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self._scheduler_every == "step":
            for scheduler in self._parts.schedulers:
                if any(scheduler.optimizer is optimizer for optimizer in optimizers):
                    scheduler.step()
        self._parts.unchanged.update_average(latch, optimizers)

    def _scan(self, optimizers: Sequence[Optimizer]) -> Tensor | None:
        """Returns, now and then, whether parameters are non-finite, as a bool on the device."""
        due = (self.updates + 1) % self.settings.scan_every == 0
        if not due and self.steps not in self._flights.suspicious:
            return None
        bad = numerics.non_finite(parameters_of(optimizers), self._parts.devices[0])
        return self._parts.ranks.any(bad) if self._parts.ranks.sharded else bad

    def _step_with_closure(
        self, flight: Flight, optimizer: Optimizer, closure: Callable[[], Tensor]
    ) -> None:
        """Lets an optimizer evaluate the loss by itself; undoes all of it if that goes wrong."""
        parts, gate = self._parts, self._parts.gate
        self._flights.before_update()
        attempt = ClosureStep(optimizer, self._quietly(flight, closure))
        attempt.run(parts.policy.lr_factor)
        flight.loss = None if attempt.loss is None else _number(attempt.loss)
        if flight.loss is None:
            raise UsageError(
                f"{type(optimizer).__name__} did not call the closure it was given.",
                where="guard.step(closure=...)",
                do="Leave closure out for optimizers that do not need one.",
            )
        norm = _wide(numerics.whole(numerics.grad_norm(parameters_of([optimizer]))))
        values = {"loss": flight.loss, "grad_norm": norm}
        finite = torch.tensor(attempt.is_finite(), device=gate.latch.device)
        loss_limit, _ = parts.judges[flight.lane].acts_on(flight.limits)
        gate.close_unless(parts.ranks.agree(finite & numerics.within(flight.loss, loss_limit)))
        flight.tickets = [gate.post({"latch": gate.latch, **values})]
        if flight.read().closed:
            attempt.undo()
        else:
            self._after_update([optimizer], None)
        self._flights.launch(flight, keep=0)

    def _quietly(self, flight: Flight, closure: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Returns the closure, made to start a step's sums anew at each evaluation."""

        def evaluate() -> Tensor:
            flight.loss, flight.terms, flight.backwards = None, {}, 0
            with torch.enable_grad():
                return closure()

        return evaluate


class Watched:
    """The batches of one epoch under a guard."""

    def __init__(self, flights: Flights, loader: Iterable[Any]) -> None:
        self._flights = flights
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return self._flights.iterate(self._loader)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]


def _number(value: Tensor) -> Tensor:
    """Returns a copy of a scalar that is wide enough for sums and comparisons."""
    return _wide(value.detach().clone())


def _wide(value: Tensor) -> Tensor:
    return value.reshape(()).to(torch.float64 if value.dtype == torch.float64 else torch.float32)


def _bad_gradients(parameters: dict[str, Tensor]) -> list[str]:
    return [
        name
        for name, parameter in parameters.items()
        if parameter.grad is not None and not numerics.all_finite([parameter.grad])
    ]
