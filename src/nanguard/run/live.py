"""Guards the steps of a script that knows nothing of it, in the process that runs it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import math
import multiprocessing
import os
import sys
import time
import weakref
from collections import deque
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from nanguard.guard.held import BufferPlaces, Held
from nanguard.guard.optimizers import learning_rate, pass_over, scaled_lr
from nanguard.guard.policy import Action, Decision
from nanguard.guard.verdicts import Verdicts
from nanguard.numerics import all_finite
from nanguard.replay.copies import LastGood
from nanguard.replay.frames import called_from, terms_of
from nanguard.replay.patches import Patches, comes_from_signal
from nanguard.replay.starts import Starts
from nanguard.replay.update import may_go_wrong
from nanguard.replay.watch import Watch, as_number, is_good, single_number
from nanguard.run.attach import is_launcher
from nanguard.run.bad_steps import BadSteps
from nanguard.run.by_script import ByScript
from nanguard.run.control import Heartbeat
from nanguard.run.good_steps import GoodSteps, Tracked, reading_of
from nanguard.run.incident_writer import IncidentWriter
from nanguard.run.late import Late
from nanguard.run.second_run import become_replay
from nanguard.run.together import Together
from nanguard.run.unusual_steps import (
    FuncSteps,
    GraphSteps,
    Overflows,
    grad_by_hand,
    starts_without_backward,
    step_by_hand,
    step_with_closure,
)
from nanguard.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from nanguard.guard.verdicts import Symptom
    from nanguard.replay.patches import FuncGradients
    from nanguard.replay.start import Start
    from nanguard.run.control import Options

_AS_IT_IS = contextlib.nullcontext()
current: Live | None = None  # what guards this process, if anything does
# The first steps, after each of which parameters are looked at, and steps between two looks later.
_CAREFUL, _SCAN = 16, 64
_NOT_ALL = -(1 << 62)  # instead of how many losses are finite, once one is not
# What a script imports that has a guard of its own, which says by itself what it has met.
_GUARDS = {"nanguard.guard.guard", "nanguard.guard.driven"}
_TIMED = 32  # steps whose time is remembered


def begin(options: Options) -> None:
    """Guards this process from now on, unless it only starts others."""
    if is_launcher() or multiprocessing.current_process().daemon:
        return
    global current  # a guard that the script makes has to know
    current = live = Live(options)
    live.patches.put_on()
    if options.again is None:
        live.open()
    else:
        become_replay(live, options)


@contextlib.contextmanager
def guarding(options: Options) -> Iterator[None]:
    """Guards the steps that are made inside, such as those of a notebook's cell."""
    global current  # a guard that the code makes has to know
    current, before = Live(options), current
    live = current
    live.patches.put_on()
    live.patches.take_in([one for one in gc.get_objects() if issubclass(type(one), Optimizer)])
    live.open()
    try:
        yield
    finally:
        atexit.unregister(live.close)
        live.close()
        current = before


class Live(Watch):
    """The guard around an unmodified script.

    Attributes:
        patches: What makes torch tell us things.
        writer: Writes incidents.
        starts: What its steps began with.
        verdicts: Decides about its steps.
        held: The buffers as they were before the step.
        together: What the ranks know of each other.
        good_steps: What is done about good steps.
        bad_steps: What is done about bad steps.
        by_script: The bad steps that the script has dealt with by itself.
        last_good: The last good state, if there is a copy of it.
        step_times: The seconds that each of the last steps took.
        is_aside: Whether nothing is guarded any more.
        acts_on_spikes: Whether a step that is only unusual is held back, too.
    """

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self.acts_on_spikes = options.spikes == "act"
        settings = Settings(
            on_bad=options.on_bad,  # type: ignore[arg-type]
            max_bad=options.max_bad,
            spikes=options.spikes,  # type: ignore[arg-type]
        )
        # Each optimizer is a lane of its own, as long as it is there.
        self.verdicts = Verdicts(settings, lanes=weakref.WeakKeyDictionary())
        self._late = Late(self)
        self.last_good = LastGood(self, wanted=options.on_bad == "rollback")
        self.together = Together()
        self.good_steps = GoodSteps(self)
        self.bad_steps = BadSteps(self)
        self._pid = os.getpid()
        self.is_aside = False
        self.heartbeat: Heartbeat | None = None
        self.tracked: Tracked | None = None
        self.by_script = ByScript(self)
        self._func_steps = FuncSteps(self)
        self._graph_steps = GraphSteps(self, _SCAN)
        self._overflows = Overflows(self)
        # How many losses of this step were read and are finite, and their sum.
        self._read_losses, self._sum_of_losses = 0, 0.0
        # Which optimizers are looked at after each of their steps.
        self._doubtful: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self.step_times: deque[float] = deque(maxlen=_TIMED)
        self._began_step = time.perf_counter()
        self.writer = IncidentWriter(options)
        self.held: Held | None = None
        self.patches = Patches(self, self._left_alone)
        self.starts = Starts(on_left=self._script_left, models=self.models)
        if self.writer.quarantine is not None:
            self.left_out = self.writer.quarantine.without_bad

    def open(self) -> None:
        """Begins."""
        self.writer.attached()
        if self.options.recover:
            self.heartbeat = Heartbeat(Path(self.options.control))
            self.heartbeat.listen()
        if self.writer.rank == 0:
            self.tracked = Tracked(self, self.options.run_dir)
        self.starts.begin()
        self.by_script.listen()
        atexit.register(self.close)

    def stand_aside(self) -> None:
        """Leaves the run to a guard of its own."""
        if not self.is_aside:
            self.is_aside = True
            self.starts.close()
            self.writer.say("the script has a Guard of its own, which decides about its steps")

    def _left_alone(self, thread: str, watched: str) -> None:
        """Says which of two threads that train at the same moment is not guarded."""
        self.writer.say(
            f"{thread} trains at the same time as {watched}: the steps of {thread} are not guarded"
        )

    # The script must run, whatever is wrong with us.

    def made(self, optimizer: Optimizer) -> None:
        """Marks the buffers of what the new optimizer trains, as its first step may be bad."""
        super().made(optimizer)
        self.own(self._mark_all)

    def loaded(self, state: Any) -> None:
        """Marks the buffers anew: what was loaded is not what a bad step has changed."""
        if not self.is_aside:
            self.own(lambda: super(Live, self).loaded(state))
            if self.starts.current is None:  # in a step, buffers may be what it has made of them
                self.own(self._mark_all)

    def step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Lets an optimizer step if all is well."""
        return self._guarded(super().step, optimizer, call, closure)

    def scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Lets a GradScaler step."""
        return self._guarded(partial(super().scaler_step, scaler), optimizer, call)

    def _guarded(
        self, step: Callable[..., Any], optimizer: Any, call: Callable[..., Any], *given: Any
    ) -> Any:
        """Makes a step under the guard; without it, if the guard fails before the step is made."""
        begun, result, own = False, None, None

        def made(*args: Any) -> Any:
            nonlocal begun, result, own
            begun = True
            try:
                result = call(*args)
            except BaseException as error:  # the script's, whatever it is: it goes on
                own = error
                raise
            return result

        try:
            return step(optimizer, made, *given)
        except Exception as error:  # whatever it is, it is ours: the script's own is raised again
            if error is own or self.patches.watcher is not self or comes_from_signal(error):
                raise
            self._give_up(error)
            return result if begun else call()
        finally:
            own = None  # it holds this frame, and with it whatever the step held

    def own(self, look: Callable[..., Any], *given: Any) -> None:
        """Does something of our own; gives up guarding if it fails."""
        try:
            look(*given)
        except Exception as error:  # whatever it is, the script must not end with it
            if self.patches.watcher is not self or comes_from_signal(error):
                raise
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if not self.is_aside:
            self.is_aside = True
            self.starts.close()
            self.writer.say(f"this process is not guarded any more: {error!r}")

    # The step.

    def next_batch(self, own: Any, draw: Callable[[Any], Any]) -> Any:
        """Hands on a batch."""
        batch = draw(own)
        if not self.is_aside:
            self.starts.drew(own, batch, self.indices_of(own))
        return batch

    def before_backward(self, losses: list[Tensor]) -> None:
        """Looks at the loss while its terms can still be named."""
        if self.is_aside:
            return
        if self.backwards == 0:
            self.writer.stepped()
        self.own(self.starts.before_backward, losses)
        if not losses or not losses[0].is_cpu:
            self.by_script.carried = None
            return
        if self._are_good(losses):
            self.by_script.note_thrown_away()
            return
        self.by_script.carried = None
        if self.starts.current is not None:
            self.starts.current.bad = True
        # Terms are a nicety: what cannot be read as a number is left out.
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            self.terms = terms_of(losses[0], sys._getframe(2))

    def _are_good(self, losses: list[Tensor]) -> bool:
        """Reads the losses of a pass, once; returns whether all of them are finite."""
        for loss in losses:
            if type(loss) is not torch.Tensor or loss.is_complex() or loss.is_meta:
                return all(map(is_good, losses))
            value = as_number(loss)
            if not math.isfinite(value):
                self._read_losses = _NOT_ALL
                return False
            self._read_losses += 1
            self._sum_of_losses += value
        return True

    def bad_loss(self) -> Symptom | None:
        """Returns what is wrong with the losses of this step."""
        return None if self._read_losses == len(self.losses) else super().bad_loss()

    def loss_value(self) -> float | None:
        """Returns the sum of the losses of this step."""
        if self._read_losses == len(self.losses) > 0:
            return self._sum_of_losses
        return super().loss_value()

    def forget_step(self) -> None:
        """Forgets what belonged to the step that is over."""
        super().forget_step()
        self._read_losses, self._sum_of_losses = 0, 0.0

    def after_backward(self) -> None:
        """Counts a step where there is no optimizer that would."""
        if self.is_aside:
            return
        self.starts.after_backward()
        by_script = self.by_script
        if by_script.found is not None or by_script.unstepped is not None:
            # The graph of this step is gone by now, so that nobody minds a replay.
            self.own(by_script.meet)
        if not self.made_by:
            self.own(lambda: step_by_hand(self))

    def judged_step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Makes a step only if loss and gradients are finite."""
        if "nanguard.guard.guard" in sys.modules and called_from("nanguard.guard.guard"):
            self.stand_aside()
        if self.is_aside:
            return call()
        if self.ordinal == 0:
            self.writer.stepped()
        self.starts.step_begins()
        self.by_script.unstepped = None
        if self.round.enter(optimizer, self.backwards):
            self.bad_steps.hold_along(optimizer)
            return None
        rate = self.bad_rate(optimizer)
        plain = rate is None and closure is None
        if plain and self._scaler is None and self._late.can_take(optimizer):
            return self._late.step(optimizer, call)
        if self._late.flights:
            self._late.look()
        if rate is not None:
            self.bad_steps.meet(rate, optimizer, update=call)
            return None
        if closure is not None:
            return step_with_closure(self, optimizer, call, closure)
        return self._judged(optimizer, call)

    def _judged(self, optimizer: Optimizer, call: Callable[..., Any]) -> Any:
        """Judges a step whose numbers are at hand, and makes it if all is well."""
        loss, gradient = self.verdict(optimizer)
        symptom = None
        if loss is not None or gradient is not None:
            symptom = self.together.agree(loss, gradient, self.ordinal)
        elif self.acts_on_spikes:
            symptom = self._spike(optimizer)
        if symptom is not None:
            symptom.scaled_by_hand = self._scaler is not None
            starts = self.starts.ended or starts_without_backward(self, optimizer)
            self.bad_steps.meet(symptom, optimizer, starts=starts)
            return None
        return self._make(optimizer, call, loss)

    def _make(self, optimizer: Optimizer, call: Callable[..., Any], loss: Symptom | None) -> Any:
        """Makes a step.

        Args:
            optimizer: Whose step it is.
            call: Makes it.
            loss: What is wrong with the loss on this rank, if others make the step good.
        """
        if len(self.losses) > 1:
            self.by_script.note_discarded()
        if self.bad_steps.doubt is not None:
            self.own(self.bad_steps.settle_doubt)
        if self.ordinal < _CAREFUL or self._is_doubtful(optimizer):
            self.own(self.last_good.before_step, optimizer)
        with self.cut_rate(optimizer):
            result = call()
        if loss is None:
            self.look_after(optimizer, call)
        else:
            reason = "the gradients of all ranks together are finite, so the step was made"
            decision = Decision(Action.NOTED, reason)
            self.own(lambda: self.bad_steps.note(loss, optimizer, decision))
        return result

    def judged_scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Lets the scaler do its work; a bad loss is none of it."""
        if self.is_aside:
            return call()
        self.starts.step_begins()
        self.by_script.unstepped = None
        if self.round.enter(optimizer, self.backwards):
            pass_over(scaler, optimizer)
            self.bad_steps.hold_along(optimizer)
            return None
        self._late.look()
        here = self.bad_loss()
        symptom = self.together.agree_on_loss(here) or self.bad_rate(optimizer)
        if symptom is not None:
            pass_over(scaler, optimizer)
            symptom.scale = scaler.get_scale()
            self.bad_steps.meet(symptom, optimizer)
            return None
        with self.cut_rate(optimizer):
            result = call()
        if here is None:
            self.own(self._overflows.note, scaler, optimizer, self._is_made)
            self.look_after(optimizer)
        else:
            reason = "the gradients of all ranks are bad, and their scalers leave the step out"
            decision = Decision(Action.SKIP, reason)
            self.own(lambda: self.bad_steps.note(here, optimizer, decision))
        return result

    @property
    def lr_factor(self) -> float:
        """What the ladder multiplies the learning rate with."""
        return self.verdicts.policy.lr_factor

    def cut_rate(self, optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the learning rate is what the ladder has made of it."""
        factor = self.verdicts.policy.lr_factor
        return _AS_IT_IS if factor == 1.0 else scaled_lr([optimizer], factor)

    def _mark_all(self) -> None:
        self.held = Held(BufferPlaces(self.models()))
        self.held.mark()

    def boundary(self) -> None:
        """Marks what the next step may change."""
        if self.heartbeat is not None:
            self.heartbeat.beat(self.tried)
            if self.ordinal == 1:
                self.heartbeat.rate(learning_rate(self.optimizers()))
        if not self.is_aside:
            self.own(self._begin_step)

    @property
    def tried(self) -> int:
        """How many steps are over: those of the optimizer that has made most of them."""
        return self.most_steps(default=self.ordinal)

    def heard_of_bad(self) -> None:
        """Notes a bad step that the script's own guard has met."""
        if self.heartbeat is not None:
            self.heartbeat.bad(self.tried)

    def heard_of_held_back(self, optimizers: Sequence[Optimizer]) -> None:
        """Counts a step that the script's own guard has held back: no optimizer tells of it."""
        self.ordinal += 1
        for optimizer in optimizers:
            self.add_step(optimizer)
        if self.heartbeat is not None:
            self.heartbeat.beat(self.tried)

    def _begin_step(self) -> None:
        now = time.perf_counter()
        self.step_times.append(now - self._began_step)
        self._began_step = now
        if self.held is None:
            self.held = Held(BufferPlaces(self.models()))
        self.held.mark()
        self.starts.step_ended()

    def track_step(self) -> None:
        """Counts a good step that no optimizer makes."""
        self.good_steps.add(None, self.ordinal, self.good_steps.numbers_at_hand())

    def good(self, optimizer: Any) -> None:
        """Counts the step that is being made, which is good."""
        self.good_steps.add(optimizer, self.number_of(optimizer), self.good_steps.numbers_at_hand())
        self.starts.good = self.starts.ended
        self.last_good.after_good_step()

    def look_after(self, optimizer: Optimizer, call: Callable[..., Any] | None = None) -> None:
        """Looks at what a step has made of the run, now and then; counts it.

        Args:
            optimizer: Whose step it was.
            call: Makes it again; None if that cannot be done by itself.
        """
        due = self.ordinal < _CAREFUL or self.ordinal % _SCAN == 0
        looks = due or self._is_doubtful(optimizer)
        symptom = (self.bad_state(optimizer) if looks else None) or self.bad_buffers()
        if due and symptom is None:
            self.own(lambda: self.curves.look(self.ordinal, self.named_parameters()))
        if symptom is not None:
            self.bad_steps.meet(symptom, optimizer, update=call)
        else:
            self.good(optimizer)

    def _is_doubtful(self, optimizer: Optimizer) -> bool:
        known = self._doubtful.get(optimizer)
        if known is None:
            known = self._doubtful[optimizer] = may_go_wrong(optimizer)
        return known

    def lane_of(self, optimizer: Any) -> Any:
        """Returns the lane of an optimizer's steps, which is the optimizer itself."""
        if not self.verdicts.knows(optimizer):
            lag = self._late.lag_of(optimizer)
            self.verdicts.add_lane(optimizer, lag=lag, adversarial=len(self.optimizers()) > 1)
        return optimizer

    def _spike(self, optimizer: Optimizer) -> Symptom | None:
        """Returns what is unusual about a step, if that is enough not to make it."""
        if self.together.active or self.grad_norm is None:
            return None
        reading = reading_of(self.good_steps.numbers_at_hand())
        if reading is None:
            return None
        limits = self.verdicts.limits(self.lane_of(optimizer), len(self._late.flights))
        return self.verdicts.spike(optimizer, reading, limits)

    # What a script deals with by itself.

    def captured(self, optimizer: Optimizer) -> None:
        """Says what can be done for steps that a CUDA graph takes up."""
        if not self.is_aside:
            self._graph_steps.captured(optimizer)

    def replayed_graph(self) -> None:
        """Looks at what graphs have made of the parameters, now and then."""
        if not self.is_aside:
            self._graph_steps.replayed()

    def collective(self) -> None:
        """Notes what a forward pass does together with other ranks."""
        self.together.note_collective(self.starts.current)

    def clipped(self, parameters: list[Tensor], norm: Any) -> None:
        """Notes the norm of gradients; a script that sees it may leave out the step."""
        super().clipped(parameters, norm)
        if isinstance(norm, torch.Tensor) and not self.is_aside:
            self.by_script.unstepped = (list(self.starts.ended), norm)

    def grad(self, call: Callable[[], Any], outputs: Any) -> Any:
        """Follows gradients that the script applies by itself."""
        loss = single_number(outputs)
        if self.is_aside or loss is None:
            return call()
        self.own(lambda: self.starts.before_backward([loss]))
        if self.starts.current is not None:
            self.starts.current.only_asked = True
        self.losses.append(loss)
        found = call()
        self.starts.after_backward()
        if not self.made_by:
            self.own(lambda: grad_by_hand(self, found))
        return found

    def func_grad(self, found: FuncGradients) -> Any:
        """Follows gradients of ``torch.func`` that the script applies by itself."""
        if self.is_aside or self.made_by or self.backwards:
            return found.result
        given: list[Any] = []
        self.own(lambda: given.append(self._func_steps.judged(found)))
        return given[0] if given else found.result

    def read(self, tensor: Tensor, value: float) -> None:
        """Hears of a bad number that the script has read."""
        self.by_script.read(tensor, value, in_optimizer=bool(self._depth))

    def _script_left(
        self,
        start: Start,
        names: Any,
        others: Sequence[Any],
        carried: bool,  # noqa: FBT001
    ) -> None:
        """Undoes what a step has done to the buffers that the script has left as it was bad."""
        if self.by_script.left(start, names, others, carried=carried) and self.held is not None:
            self.held.restore(self.held.shape)

    def look(self) -> None:
        """Looks at the steps that nobody has looked at yet."""
        self._late.close()
        self.own(self.good_steps.look)

    def close(self) -> None:
        """Ends the guard, and says what it met."""
        if os.getpid() != self._pid:
            return
        self._late.close()
        self.own(self._graph_steps.look)
        self.own(self.by_script.note_unfinished)
        self.own(self.by_script.meet)
        self.own(self.by_script.meet_unused_gradient)
        bad = len(self.bad_steps.ordinals) + self.by_script.count
        if bad or not (self.is_aside or _GUARDS & sys.modules.keys()):
            self.writer.summary(self.ordinal, bad)
        if self.heartbeat is not None:
            self.heartbeat.end(finite=self._is_finite())
        self.own(self.good_steps.look)
        if self.tracked is not None:
            self.tracked.close()
        self.starts.close()
        self.patches.take_off()

    def _is_finite(self) -> bool:
        """Returns whether what was trained is finite; yes where that cannot be told any more."""
        try:
            return all_finite([p for p in self.named_parameters().values() if p.requires_grad])
        except RuntimeError:  # of a device that has failed
            return True
