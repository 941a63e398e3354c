"""Guards the steps of a script that knows nothing of it, in the process that runs it."""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import inspect
import math
import multiprocessing
import os
import statistics
import sys
import time
import weakref
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanguard.diagnosis.limits import load_now
from nanguard.guard.held import BufferPlaces, Held
from nanguard.guard.judge import Judge, Reading
from nanguard.guard.optimizers import gradients_of, learning_rate, scaled_lr
from nanguard.guard.policy import Action, Decision, Policy, Trouble
from nanguard.launch.attach import is_launcher
from nanguard.launch.closures import step_with_closure
from nanguard.launch.incident_writer import BadStep, IncidentWriter
from nanguard.launch.known_faults import items_drawn
from nanguard.launch.lastgood import LastGood
from nanguard.launch.late import Late
from nanguard.launch.pulse import Pulse
from nanguard.launch.second_run import become_replay
from nanguard.launch.together import Together
from nanguard.launch.tracked import Tracked
from nanguard.numerics import all_finite, whole
from nanguard.replay.inplace import InPlace
from nanguard.replay.patches import Patches
from nanguard.replay.starts import Starts
from nanguard.replay.terms import terms_of
from nanguard.replay.watch import Watch, is_good, leaves_of, pass_over, single_number
from nanguard.settings import Settings
from nanguard.tracer.sites import is_installed, is_users, users_frame
from nanguard.tracer.symptom import Symptom

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import FrameType, TracebackType

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.launch.known_faults import Drawn
    from nanguard.launch.options import Options
    from nanguard.replay.start import Start

STOPPED = 3
_AS_IT_IS = contextlib.nullcontext()
# What guards this process; None if nothing does.
current: Live | None = None
# The first steps, after each of which parameters are looked at, and steps between two looks later.
_CAREFUL = 16
_SCAN = 64
# Functions of the script, from the innermost one outwards, that an evaluation is looked for in.
_OUTWARDS = 4
# What one replay may take: so many steps' time, and so many seconds at least.
_MOST_STEPS = 50
_SHORTEST_LIMIT = 10.0
# Bad numbers of evaluations that are looked into; a metric may be undefined each time.
_EVALUATIONS = 3
# Steps whose time is remembered.
_TIMED = 32


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


class Live(Watch):
    """The guard around an unmodified script.

    Attributes:
        patches: What makes torch tell us things.
        writer: Writes incidents.
        starts: What its steps began with.
        held: The buffers as they were before the step.
        together: What the ranks know of each other.
    """

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options
        self._settings = Settings(
            on_bad=options.on_bad,  # type: ignore[arg-type]
            max_bad=options.max_bad,
            spikes=options.spikes,  # type: ignore[arg-type]
        )
        self._policy = Policy(self._settings)
        # What is usual for the steps of each optimizer.
        self._judges: weakref.WeakKeyDictionary[Any, Judge] = weakref.WeakKeyDictionary()
        self._late = Late(self)
        self._last_good = LastGood(self, wanted=options.on_bad == "rollback")
        self.together = Together()
        self._bad: list[int] = []
        self._pid = os.getpid()
        self._aside = False
        self._pulse: Pulse | None = None
        self._tracked: Tracked | None = None
        self._left = _LeftByScript()
        # Which backward pass the last bad step belongs to.
        self._met_in = -1
        self._evaluations = 0
        # An incident whose step was good when it was replayed.
        self._doubt: Path | None = None
        self._step_times: deque[float] = deque(maxlen=_TIMED)
        self._began_step = time.perf_counter()
        self.writer = IncidentWriter(options)
        self.held: Held | None = None
        self.patches = Patches(self)
        self.starts = Starts(on_left=self._script_left)
        if self.writer.quarantine is not None:
            self.left_out = self.writer.quarantine.without_bad

    def open(self) -> None:
        """Begins."""
        self.writer.attached()
        if self._options.recover:
            self._pulse = Pulse(Path(self._options.control))
            self._pulse.listen()
        if self.writer.rank == 0:
            self._tracked = Tracked(self)
        self.starts.begin()
        self._listen()
        atexit.register(self.close)

    def _listen(self) -> None:
        """Hears of the exception that ends the script, if one does."""
        before = sys.excepthook

        def hook(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            before(kind, error, trace)
            if issubclass(kind, Exception) and os.getpid() == self._pid:
                self._own(lambda: self._ended_by(trace))

        sys.excepthook = hook
        sys.exit = self._heard(sys.exit)
        for name in ("exit", "quit"):
            if name in vars(builtins):
                setattr(builtins, name, self._heard(vars(builtins)[name]))

    def _heard(self, leave: Callable[..., Any]) -> Any:
        """Returns what ends the script, after it was looked whether its numbers are bad."""

        @functools.wraps(leave)
        def exit_(*args: Any) -> Any:
            if os.getpid() == self._pid:
                self._own(lambda: self._left_in(sys._getframe(3)))
            return leave(*args)

        return exit_

    def stand_aside(self) -> None:
        """Leaves the run to a guard of its own."""
        if not self._aside:
            self._aside = True
            self.starts.close()
            self.writer.say("the script has a Guard of its own, which decides about its steps")

    # The script must run, whatever is wrong with us.

    def made(self, optimizer: Optimizer) -> None:
        """Marks the buffers of what the new optimizer trains, as its first step may be bad."""
        super().made(optimizer)
        self._own(self._mark_all)

    def step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Lets an optimizer step if all is well."""
        return self._guarded(call, lambda made: super(Live, self).step(optimizer, made, closure))

    def scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Lets a GradScaler step."""
        return self._guarded(
            call, lambda made: super(Live, self).scaler_step(scaler, optimizer, made)
        )

    def _guarded(self, call: Callable[..., Any], step: Callable[[Callable[..., Any]], Any]) -> Any:
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
            return step(made)
        except Exception as error:  # whatever it is, it is ours: the script's own is raised again
            if error is own or self.patches.watcher is not self:
                raise
            self._give_up(error)
            return result if begun else call()
        finally:
            own = None  # it holds this frame, and with it whatever the step held

    def _own(self, look: Callable[[], None]) -> None:
        """Does something of our own; gives up guarding if it fails."""
        try:
            look()
        except Exception as error:  # whatever it is, the script must not end with it
            if self.patches.watcher is not self:
                raise
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if not self._aside:
            self._aside = True
            self.starts.close()
            self.writer.say(f"this process is not guarded any more: {error!r}")

    # The step.

    def next_batch(self, own: Any, draw: Callable[[], Any]) -> Any:
        """Hands on a batch."""
        batch = draw()
        if not self._aside:
            self.starts.drew(own, batch, self.indices_of(own))
        return batch

    def before_backward(self, losses: list[Tensor]) -> None:
        """Looks at the loss while its terms can still be named."""
        if self._aside:
            return
        if self.backwards == 0:
            self.writer.stepped()
        self._own(lambda: self.starts.before_backward(losses))
        if not losses or losses[0].device.type != "cpu":
            return
        if all(map(is_good, losses)):
            return
        if self.starts.current is not None:
            self.starts.current.bad = True
        # Terms are a nicety: what cannot be read as a number is left out.
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            self.terms = terms_of(losses[0], sys._getframe(2))

    def after_backward(self) -> None:
        """Counts a step where there is no optimizer that would."""
        if self._aside:
            return
        self.starts.after_backward()
        # The graph of this step is gone by now, so that nobody minds a replay.
        self._own(self._meet_left)
        if not self.made_by:
            self._own(self._step_by_hand)

    def _step_by_hand(self) -> None:
        if self.ordinal == 0:
            self.writer.say(
                "no torch optimizer was made: the update is the script's own, so the gradients of "
                "a bad step are set to 0 instead of holding it back"
            )
        symptom = self.bad_loss() or self.bad_manual_gradient()
        if symptom is not None:
            # There is no optimizer to hold back, but a gradient of 0 moves nothing.
            for leaf in leaves_of(self.roots):
                if leaf.grad is not None:
                    leaf.grad.detach().zero_()
            self.meet(symptom, None)
        elif self._tracked is not None:
            self._tracked.good(None)
        self.end_manual_step()

    def judged_step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Makes a step only if loss and gradients are finite."""
        if "nanguard.guard.guard" in sys.modules and _called_by_a_guard():
            self.stand_aside()
        if self._aside:
            return call()
        if self.ordinal == 0:
            self.writer.stepped()
        self.starts.step_begins()
        self._left.unstepped = None
        if closure is None and self._scaler is None and self._late.can_take(optimizer):
            return self._late.step(optimizer, call)
        self._late.look()
        if closure is not None:
            return step_with_closure(self, optimizer, call, closure)
        loss, gradient = self.verdict(optimizer)
        symptom = self.together.agree(loss, gradient, self.ordinal) or self._spike(optimizer)
        if symptom is None:
            self._note_discarded()
            self._own(self._settle_doubt)
        else:
            symptom.scaled_by_hand = self._scaler is not None
            self.meet(symptom, optimizer, starts=self.starts.ended or self._by_hand(optimizer))
            return None
        with self.cut_rate(optimizer):
            result = call()
        if loss is None:
            self.look_after(optimizer)
        else:
            reason = "the gradients of all ranks together are finite, so the step was made"
            decision = Decision(Action.NOTED, reason)
            self._own(lambda: self._report_on_rank(loss, optimizer, decision))
        return result

    def _by_hand(self, optimizer: Optimizer) -> list[Start]:
        """Returns a start of the code around a step, in a script that never calls backward.

        Its gradients take the place of losses: a replay has to come to the same ones.
        """
        if self.backwards or not self.starts.is_on:
            return []
        start = self.starts.after_the_fact(users_frame(sys._getframe(1)))
        if start is None:
            return []
        start.losses = gradients_of(optimizer)
        return [start]

    def judged_scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Lets the scaler do its work; a bad loss is none of it."""
        if self._aside:
            return call()
        self.starts.step_begins()
        self._left.unstepped = None
        self._late.look()
        here = self.bad_loss()
        symptom = self.together.agree_on_loss(here)
        if symptom is not None:
            pass_over(scaler, optimizer)
            symptom.scale = scaler.get_scale()
            self.meet(symptom, optimizer)
            return None
        with self.cut_rate(optimizer):
            result = call()
        if here is None:
            self.look_after(optimizer)
        else:
            reason = "the gradients of all ranks are bad, and their scalers leave the step out"
            decision = Decision(Action.SKIP, reason)
            self._own(lambda: self._report_on_rank(here, optimizer, decision))
        return result

    def _report_on_rank(self, symptom: Symptom, optimizer: Any, decision: Decision) -> None:
        """Reports a bad loss of one rank, while all ranks together decide about its step."""
        bad = BadStep(symptom, self.number_of(optimizer), self.ordinal, decision, tuple(self._bad))
        self._bad.append(self.ordinal)
        if self.writer.report(bad) and not self.together.in_lockstep:
            self._explain(bad, self.starts.ended)

    @property
    def lr_factor(self) -> float:
        """What the ladder multiplies the learning rate with."""
        return self._policy.lr_factor

    def cut_rate(self, optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which the learning rate is what the ladder has made of it."""
        factor = self._policy.lr_factor
        return _AS_IT_IS if factor == 1.0 else scaled_lr([optimizer], factor)

    def _mark_all(self) -> None:
        self.held = Held(BufferPlaces(self.models()))
        self.held.mark()

    def boundary(self) -> None:
        """Marks what the next step may change."""
        if self._pulse is not None:
            self._pulse.beat(self._tried)
            if self.ordinal == 1:
                self._pulse.rate(learning_rate(self.optimizers()))
        if not self._aside:
            self._own(self._begin_step)

    @property
    def _tried(self) -> int:
        """How many steps are over: those of the optimizer that has made most of them."""
        return max(self.counts.values(), default=self.ordinal)

    def heard_of_bad(self) -> None:
        """Notes a bad step that the script's own guard has met."""
        if self._pulse is not None:
            self._pulse.bad(self._tried)

    def heard_of_held_back(self, optimizers: Sequence[Optimizer]) -> None:
        """Counts a step that the script's own guard has held back: no optimizer tells of it."""
        self.ordinal += 1
        for optimizer in optimizers:
            self.add_step(optimizer)
        if self._pulse is not None:
            self._pulse.beat(self._tried)

    def _begin_step(self) -> None:
        now = time.perf_counter()
        self._step_times.append(now - self._began_step)
        self._began_step = now
        if self.held is None:
            self.held = Held(BufferPlaces(self.models()))
        self.held.mark()
        self.starts.step_ended()

    def good(self, optimizer: Any, step: int | None = None, **numbers: float) -> None:
        """Counts a good step.

        Args:
            optimizer: Whose step it is.
            step: Its number; None for the step that is being made.
            numbers: Its loss and gradient norm, if the device has told them late.
        """
        if self._tracked is not None:
            self._tracked.good(optimizer, step, numbers)
        loss = numbers.get("loss") if numbers else self._loss_at_hand()
        if loss is not None:
            self.recent_losses.append(loss)
            norm = numbers.get("grad_norm", self.grad_norm)
            self._accept(optimizer, self.number_of(optimizer) if step is None else step, loss, norm)
        self._policy.good()
        self._last_good.after_good_step()

    def look_after(self, optimizer: Optimizer) -> None:
        """Looks at what a step has made of the run, now and then; counts it."""
        due = self.ordinal < _CAREFUL or self.ordinal % _SCAN == 0
        symptom = (self.bad_state(optimizer) if due else None) or self.bad_buffers()
        if symptom is not None:
            self.meet(symptom, optimizer)
        else:
            self.good(optimizer)

    def judge_of(self, optimizer: Any) -> Judge:
        """Returns what knows the usual numbers of an optimizer's steps."""
        judge = self._judges.get(optimizer)
        if judge is None:
            lag = self._late.lag_of(optimizer)
            judge = Judge(self._settings, lag, adversarial=len(self.optimizers()) > 1)
            self._judges[optimizer] = judge
        return judge

    def _accept(self, optimizer: Any, step: int, loss: float, norm: float | None) -> None:
        """Takes in the numbers of a good step, and says what is unusual about them."""
        if optimizer is None or not math.isfinite(loss):
            return
        judge = self.judge_of(optimizer)
        scale = None if self._scaler is None else float(self._scaler.get_scale())
        # Gradients that are scaled are left to the scaler, whether they overflow or not.
        reading = Reading(
            closed=False, loss=loss, grad_norm=norm or 0.0, terms={}, scale=scale,
            overflow=norm is None or scale is not None,
        )  # fmt: skip
        for finding in judge.accept(reading, judge.limits(self._late.ahead), step):
            self.writer.say(f"step {step}: {finding.message} ({finding.name})")

    def _spike(self, optimizer: Optimizer) -> Symptom | None:
        """Returns what is unusual about a step, if that is enough not to make it."""
        if self._options.spikes != "act" or self.together.active or self.grad_norm is None:
            return None
        judge, loss = self.judge_of(optimizer), self._loss_at_hand()
        loss_limit, norm_limit = judge.acts_on(judge.limits(self._late.ahead))
        if loss is not None and not loss <= loss_limit:
            return Symptom("loss", "spike", loss, self.grad_norm)
        if not self.grad_norm <= norm_limit:
            return Symptom("gradient", "spike", loss, self.grad_norm)
        return None

    def _loss_at_hand(self) -> float | None:
        """Returns the loss of this step where reading it does not wait for a device."""
        if not self.losses or self.losses[0].device.type != "cpu":
            return None
        return self.loss_value()

    def meet(
        self,
        symptom: Symptom | None,
        optimizer: Any,
        *,
        step: int | None = None,
        ordinal: int | None = None,
        starts: list[Start] | None = None,
    ) -> None:
        """Deals with a bad step.

        Args:
            symptom: What is wrong with it; None for nothing.
            optimizer: Whose step it is; None in a script that has none.
            step: Its number; None for the step that is being made.
            ordinal: The same, as all optimizers together count.
            starts: What it began with; None for the step that is being made.
        """
        if symptom is None:
            return
        if step is None:
            step = self.ordinal if optimizer is None else self.number_of(optimizer)
        ordinal = self.ordinal if ordinal is None else ordinal
        starts = list(self.starts.ended if starts is None else starts)
        running: Any = torch._C._current_autograd_node()
        if running is not None and self._met_in == self.backwards:
            # Another optimizer of a step that is known to be bad: some step in backward hooks.
            self._clear_gradients(optimizer)
            return
        self._met_in = self.backwards
        self._note_bad(step, optimizer)
        if self.held is not None:
            self.held.restore(self.held.shape)
        drawn = items_drawn(self.starts)
        poisoned, decision = self._decide(step, drawn)
        bad = BadStep(symptom, step, ordinal, decision, tuple(self._bad))
        bad.drawn = drawn
        bad.seconds = statistics.median(self._step_times) if self._step_times else None
        bad.why = _why_not(symptom, poisoned=poisoned)
        starts = starts if bad.why is None else []
        self._clear_gradients(optimizer)
        if self.together.mine:
            written = self.writer.report(bad)
            self._explain(bad, starts if written else [])
        elif self.together.in_lockstep and self._options.trace:
            self.together.follow(self._replayer(bad, starts), ordinal)
        if self._tracked is not None:
            self._tracked.bad(optimizer, step, symptom, decision)
        for start in starts:
            start.reported = True
        self._bad.append(ordinal)
        self._left.known_at = self.ordinal + 1
        self._act(decision)

    def _note_bad(self, step: int, optimizer: Any) -> None:
        if self._pulse is not None:
            leads = optimizer is None or self.number_of(optimizer) == self._tried
            # The last step of the one that leads belongs to the same round.
            self._pulse.bad(step if leads else self._tried - 1)

    def _decide(self, step: int, drawn: Drawn) -> tuple[bool, Decision]:
        """Returns whether the run itself is bad by now, and what to do about a bad step."""
        trained = [p for p in self.named_parameters().values() if p.requires_grad]
        poisoned = not all_finite(trained) or self.bad_buffers() is not None
        # A copy that nobody has asked for is there for what cannot be helped otherwise.
        wanted = poisoned or self._options.on_bad == "rollback"
        can_roll_back = wanted and self._last_good.is_there
        trouble = Trouble(step, poisoned=poisoned, can_roll_back=can_roll_back)
        if not self.together.active:  # ranks know of their own samples only, and decide alike
            trouble = self.writer.with_known(trouble, drawn)
        return poisoned, self._policy.bad(trouble)

    @staticmethod
    def _clear_gradients(optimizer: Any) -> None:
        """Frees the gradients of a bad step, whose memory its replays may need."""
        if optimizer is not None:
            with contextlib.suppress(AttributeError):
                optimizer.zero_grad(set_to_none=True)

    def _act(self, decision: Decision) -> None:
        if decision.action is Action.ROLLBACK:
            self._last_good.restore()
        if decision.action is Action.STOP:
            self.writer.stopped(decision.reason)
            raise SystemExit(STOPPED)

    def _explain(
        self,
        bad: BadStep,
        starts: Sequence[Start],
        *,
        unfinished: bool = False,
        reads: bool = False,
    ) -> None:
        """Replays a step, if that is wanted and can be done."""
        replayer = self._replayer(bad, starts, unfinished=unfinished, reads=reads)
        with contextlib.ExitStack() as stack:
            if self.together.in_lockstep and self._options.trace:
                stack.enter_context(self.together.lead(replayer, bad.ordinal))
            if not self.writer.may_explain or not starts:
                return
            self.writer.explain(replayer)
        if replayer.differs and not (unfinished or reads):
            self._doubt = self.writer.folder

    def _replayer(
        self,
        bad: BadStep,
        starts: Sequence[Start],
        *,
        unfinished: bool = False,
        reads: bool = False,
    ) -> InPlace:
        likely = list(starts)
        together = self.together.in_lockstep
        if not reads and not together:
            # A bad loss shows which pass it was; a bad gradient may be any one's.
            likely.sort(key=lambda start: all_finite(start.losses))
        return InPlace(
            self,
            self.patches,
            self.starts,
            likely,
            step=bad.step,
            ordinal=bad.ordinal,
            together=together,
            unfinished=unfinished,
            reads=reads,
            longest=max(_SHORTEST_LIMIT, _MOST_STEPS * (bad.seconds or 0.0)) * load_now(),
        )

    def _settle_doubt(self) -> None:
        """Says that a bad step did not come again, if a good one does, bit for bit.

        Only then is it known that what is replayed is what ran.
        """
        folder, self._doubt = self._doubt, None
        if folder is None or not self.starts.ended:
            return
        replayer = InPlace(
            self,
            self.patches,
            self.starts,
            list(self.starts.ended),
            step=self.ordinal,
            ordinal=self.ordinal,
        )
        if replayer.is_exact():
            self.writer.did_not_come_again(folder)

    # What a script deals with by itself.

    def clipped(self, parameters: list[Tensor], norm: Any) -> None:
        """Notes the norm of gradients; a script that sees it may leave out the step."""
        super().clipped(parameters, norm)
        if isinstance(norm, torch.Tensor) and not self._aside:
            self._left.unstepped = (list(self.starts.ended), norm)

    def grad(self, call: Callable[[], Any], outputs: Any) -> Any:
        """Follows gradients that the script applies by itself."""
        loss = single_number(outputs)
        if self._aside or loss is None:
            return call()
        self._own(lambda: self.starts.before_backward([loss]))
        self.losses.append(loss)
        found = call()
        self.starts.after_backward()
        if not self.made_by:
            self._own(lambda: self._grad_by_hand(found))
        return found

    def _grad_by_hand(self, found: Any) -> None:
        self.writer.stepped()
        given = [gradient for gradient in found if gradient is not None]
        symptom = self.bad_loss()
        if symptom is None and not all_finite(given):
            symptom = Symptom("gradient", "nan", self.loss_value())
        if symptom is not None:
            # There is no optimizer to hold back, but a gradient of 0 moves nothing.
            for gradient in given:
                gradient.zero_()
            self.meet(symptom, None)
        self.end_manual_step()

    def read(self, tensor: Tensor, value: float) -> None:
        """Hears of a bad number that the script has read; in an evaluation that is news."""
        self._left.read = self._left.read or tensor.requires_grad
        training = tensor.requires_grad or self._depth or self._is_in_step()
        if self._aside or training or not self.starts.is_on or self._left.is_known(self.ordinal):
            return
        self._own(lambda: self._evaluated(tensor, value, sys._getframe(3)))

    def _is_in_step(self) -> bool:
        """Returns whether a graph may be alive that a replay would harm."""
        start = self.starts.current
        begun = start is not None and start.site is None and start.ambient.grad
        return begun or bool(self.starts.ended)

    def _evaluated(self, tensor: Tensor, value: float, frame: FrameType | None) -> None:
        """Reports a bad number of an evaluation."""
        starts: list[Start] = []
        while frame is not None and len(starts) < 2 * _OUTWARDS:
            if is_users(frame.f_code.co_filename) and not is_installed(frame.f_code.co_filename):
                for statement in (True, False):
                    start = self.starts.after_the_fact(frame, statement=statement)
                    if start is not None:
                        start.losses, start.whole = [tensor.detach().clone()], None
                        starts.append(start)
            frame = frame.f_back
        symptom = Symptom("loss", "nan" if math.isnan(value) else "inf", value, evaluated=True)
        reason = "the script read it in an evaluation; no step was touched"
        self._left.known_at = self.ordinal
        bad = BadStep(symptom, self.ordinal, self.ordinal, Decision(Action.NOTED, reason), ())
        # A metric may well be undefined; what a model has put out may not.
        self._evaluations += 1
        if self._evaluations > _EVALUATIONS or not self.writer.may_explain:
            return
        if self._replayer(bad, starts, reads=True).comes_from_a_model() and self.writer.report(bad):
            self._explain(bad, starts, reads=True)

    def _script_left(self, start: Start, names: Any) -> None:
        """Undoes what a step has done to the buffers that the script has left as it was bad."""
        if self._left.note(start, names) and self.held is not None:
            self.held.restore(self.held.shape)

    def _note_discarded(self) -> None:
        """Notes a pass whose loss was bad, and whose gradients the script has thrown away."""
        for start in self.starts.ended if len(self.losses) > 1 else []:
            bad = next((x for x in start.losses if not is_good(x)), None)
            if bad is not None and not start.reported:
                self._left.add(start, float(bad))

    def _left_in(self, frame: FrameType | None) -> None:
        """Notes the step that the script is about to leave, if its numbers are bad."""
        self._left.ends = True
        frames: list[FrameType] = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        start = self.starts.current
        if start is None or start.site is None:
            self._note_left(frames)

    def _note_left(self, frames: list[FrameType]) -> None:
        """Notes the step that some frames, the innermost first, have left, if a number is bad."""
        start = self.starts.current
        given = None
        for frame in frames:
            if start is None:
                handed = _bad_number_given(frame)
                given = given if handed is None else handed
                begun = self._begun_in(frame) if handed is None else None
            else:
                begun = start if frame.f_code is start.region.code else None
            if begun is not None and self._left.note(begun, frame.f_locals, given):
                break

    def _begun_in(self, frame: FrameType) -> Start | None:
        """Returns a start of the code around a frame, where steps are not seen to begin.

        Either none has come to its end so far, or no model is called in them.
        """
        name = frame.f_code.co_filename
        seen = self.backwards and self.starts.sees_models
        if seen or not is_users(name) or is_installed(name):
            return None
        start = self.starts.after_the_fact(frame)
        if start is not None:
            start.before = {}
        return start

    def _meet_left(self) -> None:
        """Reports a step that the script has left before its backward pass, as it was bad."""
        found = self._left.take()
        if found is not None:
            how = (
                "the script ended itself" if self._left.ends else "the script skipped it by itself"
            )
            self._report_left(*found, how)
        unstepped = self._left.take_unstepped()
        if unstepped is not None:
            self._report_unstepped(*unstepped)

    def _ended_by(self, trace: TracebackType | None) -> None:
        """Reports the step that the script has ended at, if its numbers were bad."""
        frames: list[FrameType] = []
        while trace is not None:
            frames.insert(0, trace.tb_frame)
            trace = trace.tb_next
        self._note_left(frames)
        found = self._left.take()
        if found is not None:
            self._report_left(*found, "the script ended itself")

    def _report_unstepped(self, starts: list[Start], norm: float) -> None:
        """Reports a step whose gradient the script has seen to be bad, and not applied."""
        kind = "nan" if math.isnan(norm) else "inf"
        loss = next((float(x) for start in starts for x in start.losses), None)
        symptom = Symptom("gradient", kind, loss, norm)
        self._report_by_script(symptom, starts, "the script did not make the step")

    def _meet_unused_gradient(self) -> None:
        """Reports gradients that were bad when the script ended, with which no step was made."""
        optimizer = next(iter(self.optimizers()), None)
        starts = [start for start in self.starts.ended if not start.reported]
        if self._aside or optimizer is None or not starts:
            return
        loss, gradient = self.verdict(optimizer)
        symptom = loss or gradient
        if symptom is not None:
            self._report_by_script(symptom, starts, "the script ended itself")

    def _report_left(self, start: Start, value: float, how: str) -> None:
        symptom = Symptom("loss", "nan" if math.isnan(value) else "inf", value)
        self._report_by_script(symptom, [start], how, unfinished=True)

    def _report_by_script(
        self, symptom: Symptom, starts: list[Start], how: str, *, unfinished: bool = False
    ) -> None:
        optimizer = next(iter(self.optimizers()), None)
        step = self.ordinal if optimizer is None else self.number_of(optimizer)
        self._left.count += 1
        tried = self._left.count + self.ordinal
        reason = f"{how}; {self._left.count} of {tried} steps so far"
        bad = BadStep(symptom, step, self.ordinal, Decision(Action.SKIP, reason), tuple(self._bad))
        bad.known, bad.drawn = {"by_script": True}, items_drawn(self.starts)
        for start in starts:
            start.reported = True
        if self.writer.report(bad):
            self._explain(bad, starts, unfinished=unfinished)

    def look(self) -> None:
        """Looks at the steps that the device has not told about yet."""
        self._late.close()

    def close(self) -> None:
        """Ends the guard, and says what it met."""
        if os.getpid() != self._pid:
            return
        self._late.close()
        self._own(self._meet_left)
        self._own(self._meet_unused_gradient)
        if self._bad or self._left.count:
            self.writer.summary(self.ordinal, len(self._bad) + self._left.count)
        if self._pulse is not None:
            self._pulse.end(finite=self._is_finite())
        if self._tracked is not None:
            self._tracked.close()
        self.starts.close()
        self.patches.take_off()

    def _is_finite(self) -> bool:
        """Returns whether what was trained is finite; yes where that cannot be told any more."""
        try:
            return all_finite([p for p in self.named_parameters().values() if p.requires_grad])
        except RuntimeError:  # of a device that has failed
            return True


def _bad_number_given(frame: FrameType) -> Any:
    """Returns the bad number that a function was given; None if there is none.

    Such a function only looks at the number: whoever called it has made it.
    """
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    for name in code.co_varnames[:count]:
        value: Any = frame.f_locals.get(name)
        several = list(value.values()) if isinstance(value, dict) else value
        for each in several if isinstance(several, (list, tuple)) else [several]:
            single = isinstance(each, torch.Tensor) and each.numel() == 1
            if single and not is_good(each.detach()):
                return each
            if isinstance(each, float) and not math.isfinite(each):
                return each
    return None


def _why_not(symptom: Symptom, *, poisoned: bool) -> str | None:
    """Returns why a bad step cannot be replayed; None if it can."""
    if symptom.kind == "spike":
        return "a spike is a finite number: there is no bad value to look for"
    if poisoned or symptom.where not in ("loss", "gradient"):
        return "the run itself is bad by now: the state before the step is gone"
    return None


class _LeftByScript:
    """A step that the script has left before its backward pass.

    Attributes:
        count: How many there were that were bad.
        unstepped: Gradients whose norm was computed, and no step made with them so far.
        known_at: The step after which a bad number was last reported.
        ends: Whether the script is about to end itself.
        read: Whether the script has read a bad number from a graph lately.
    """

    def __init__(self) -> None:
        self.count = 0
        self.unstepped: tuple[list[Start], Tensor] | None = None
        self.known_at = -1
        self.ends = False
        self.read = False
        self._found: tuple[Start, float] | None = None

    def note(self, start: Start | None, names: Any, given: Any = None) -> bool:
        """Notes a step that was left, if a number that it has made is bad; returns whether it is.

        Args:
            start: What it began with; None if nobody knows.
            names: The names of its code, as they were when it was left.
            given: A bad number that the code has handed to a function; None if there is none.
        """
        if start is None:
            return False
        made = {n: names[n] for n in start.piece.stores if n in names}
        # A number that was there before tells nothing about this step.
        made = {n: value for n, value in made.items() if start.before.get(n) != id(value)}
        for value in (*made.values(), given):
            graph = isinstance(value, torch.Tensor) and value.requires_grad and value.numel() == 1
            if graph and not is_good(value.detach()):
                self.add(start, float(value.detach()))
                return True
            if self.read and isinstance(value, float) and not math.isfinite(value):
                self.add(start, value)
                return True
        self.read = False
        return False

    def add(self, start: Start, value: float) -> None:
        """Notes a step that was left because of a bad number."""
        self._found = (start, value)

    def is_known(self, ordinal: int) -> bool:
        """Returns whether a bad number that is read now has been reported."""
        return self.known_at >= ordinal

    def take_unstepped(self) -> tuple[list[Start], float] | None:
        """Returns a step that was not made because of its gradient, once."""
        unstepped, self.unstepped = self.unstepped, None
        if unstepped is None:
            return None
        # The script has waited for the norm by itself.
        norm = float(whole(unstepped[1]).detach())
        return None if math.isfinite(norm) else (unstepped[0], norm)

    def take(self) -> tuple[Start, float] | None:
        """Returns the last such step, once."""
        found, self._found = self._found, None
        return found


def _called_by_a_guard() -> bool:
    """Returns whether a step is made by a Guard that the script has made itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "nanguard.guard.guard":
            return True
        frame = frame.f_back
    return False
