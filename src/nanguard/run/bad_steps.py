"""What is done about a bad step of a script: decided, undone, written down and explained."""

from __future__ import annotations

import contextlib
import statistics
import sys
from typing import TYPE_CHECKING, Any

import torch

from nanguard.diagnose.lab import load_now
from nanguard.guard.policy import Action, Trouble
from nanguard.guard.verdicts import Reading
from nanguard.numerics import all_finite
from nanguard.replay.inplace import InPlace
from nanguard.replay.tracer.sites import users_frame
from nanguard.replay.update import UpdateInPlace
from nanguard.run.incident_writer import BadStepFacts
from nanguard.run.known_faults import items_drawn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from nanguard.guard.policy import Decision
    from nanguard.guard.verdicts import Symptom
    from nanguard.replay.start import Start
    from nanguard.run.known_faults import DrawnItems
    from nanguard.run.live import Live

STOPPED = 3
# What one replay may take: the time of this many steps, and this many seconds at least.
_MOST_STEPS = 50
_SHORTEST_LIMIT = 10.0


class BadSteps:
    """The bad steps of a script.

    Attributes:
        ordinals: Which steps they were, as all optimizers together count.
        along: Those of other optimizers that were held back along with them.
        doubt: The incident of a step that was good when it was replayed, and nobody knows why yet;
            None if there is none.
    """

    def __init__(self, live: Live) -> None:
        self._live = live
        self.ordinals: list[int] = []
        self.along: list[int] = []
        # Which backward pass the last one belongs to.
        self._met_in = -1
        self.doubt: Path | None = None

    def all_held_back(self) -> tuple[int, ...]:
        """Returns every step that no optimizer has made, as all optimizers together count."""
        return tuple(sorted({*self.ordinals, *self.along}))

    def hold_along(self, optimizer: Any) -> None:
        """Holds back an optimizer whose step belongs to one that was held back already."""
        self.along.append(self._live.ordinal)
        self._clear_gradients(optimizer)

    def meet(
        self,
        symptom: Symptom | None,
        optimizer: Any,
        *,
        step: int | None = None,
        ordinal: int | None = None,
        starts: list[Start] | None = None,
        update: Callable[..., Any] | None = None,
    ) -> None:
        """Deals with a bad step.

        Args:
            symptom: What is wrong with it; None for nothing.
            optimizer: Whose step it is; None in a script that has none.
            step: Its number; None for the step that is being made.
            ordinal: The same, as all optimizers together count.
            starts: What it began with; None for the step that is being made.
            update: Makes the update, where the optimizer may be at fault; None if it is not.
        """
        live = self._live
        if symptom is None:
            return
        current = step is None
        if step is None:
            step = live.ordinal if optimizer is None else live.number_of(optimizer)
        ordinal = live.ordinal if ordinal is None else ordinal
        starts = list(live.starts.ended if starts is None else starts)
        running: Any = torch._C._current_autograd_node()
        if running is not None and self._met_in == live.backwards:
            # Another optimizer of a step that is known to be bad: some step in backward hooks.
            self._clear_gradients(optimizer)
            return
        self._met_in = live.backwards
        if current and symptom.where in ("loss", "gradient"):
            live.round.hold_back()
        live.good_steps.look()
        self._note_bad(step, optimizer)
        if live.held is not None:
            live.held.restore(live.held.shape)
        drawn = items_drawn(live.starts, starts)
        poisoned, decision = self._decide(optimizer, step, symptom, drawn)
        bad = BadStepFacts(symptom, step, ordinal, decision, self.all_held_back())
        bad.drawn = drawn
        bad.seconds = statistics.median(live.step_times) if live.step_times else None
        bad.why = _why_not(symptom, poisoned=poisoned)
        replayer = None
        if update is not None and bad.why is not None:
            made = poisoned or symptom.where != "learning rate"
            replayer = self._update_replayer(bad, optimizer, update, made=made)
            bad.why = bad.why if replayer is None else None
        if replayer is None:
            self._clear_gradients(optimizer)  # whose memory its replays may need
        starts = starts if bad.why is None else []
        self._report(bad, starts, replayer)
        self._clear_gradients(optimizer)
        if live.tracked is not None:
            live.tracked.bad(optimizer, step, symptom, decision)
        self._act(decision)

    def _update_replayer(
        self, bad: BadStepFacts, optimizer: Any, update: Callable[..., Any], *, made: bool
    ) -> InPlace | None:
        """Returns what replays the update of a step whose gradients are good; None if nothing can.

        Args:
            bad: The step.
            optimizer: Whose update it is.
            update: Makes it.
            made: Whether it was made, so that what was before it is gone.
        """
        live = self._live
        start = live.starts.after_the_fact(users_frame(sys._getframe(1)), statement=True)
        if start is None or live.together.active or (made and not live.last_good.is_there):
            return None
        return UpdateInPlace(
            live,
            live.patches,
            live.starts,
            start,
            optimizer=optimizer,
            call=update,
            before=live.last_good if made else None,
            step=bad.step,
            ordinal=bad.ordinal,
            longest=_longest(bad),
        )

    def _report(
        self, bad: BadStepFacts, starts: list[Start], replayer: InPlace | None = None
    ) -> None:
        """Writes and explains an incident; Ctrl-C ends the explanation, and the step stays bad."""
        live = self._live
        try:
            if live.together.mine:
                written = live.writer.report(bad)
                self.explain(bad, starts if written else [], replayer=replayer)
            elif live.together.in_lockstep and live.options.trace:
                live.together.follow(self.replayer(bad, starts), bad.ordinal)
        except KeyboardInterrupt:
            # The script may catch it and go on, with weights that must be good then.
            if bad.decision.action is Action.ROLLBACK:
                live.last_good.restore()
            raise
        finally:
            for start in starts:
                start.reported = True
            self.ordinals.append(bad.ordinal)
            live.by_script.known_at = live.ordinal + 1

    def _note_bad(self, step: int, optimizer: Any) -> None:
        live = self._live
        if live.heartbeat is not None:
            leads = optimizer is None or live.number_of(optimizer) == live.tried
            # The last step of the one that leads belongs to the same round.
            live.heartbeat.bad(step if leads else live.tried - 1)

    def _decide(
        self, optimizer: Any, step: int, symptom: Symptom, drawn: DrawnItems
    ) -> tuple[bool, Decision]:
        """Returns whether the run itself is bad by now, and what to do about a bad step."""
        live = self._live
        trained = [p for p in live.named_parameters().values() if p.requires_grad]
        poisoned = not all_finite(trained) or live.bad_buffers() is not None
        if symptom.where == "optimizer state" and live.options.on_bad != "stop":
            # An infinite moment keeps its weights from ever moving again: go back, as long as
            # that is possible. It is no reason to stop.
            poisoned = poisoned or (live.last_good.is_there and live.verdicts.policy.can_go_back)
        # A copy that the user did not ask for is there for what cannot be helped otherwise.
        wanted = poisoned or live.options.on_bad == "rollback"
        can_roll_back = wanted and live.last_good.is_there
        trouble = Trouble(step, poisoned=poisoned, can_roll_back=can_roll_back)
        if not live.together.active:  # ranks know of their own samples only, and decide alike
            trouble = live.writer.with_known(trouble, drawn)
        seen = (symptom.loss, symptom.grad_norm)
        reading = None
        if symptom.kind == "spike" and None not in seen:
            reading = Reading(closed=True, loss=seen[0], grad_norm=seen[1], terms={})  # type: ignore[arg-type]
        return poisoned, live.verdicts.failed(optimizer, reading, trouble)

    @staticmethod
    def _clear_gradients(optimizer: Any) -> None:
        """Frees the gradients of a bad step."""
        if optimizer is not None:
            with contextlib.suppress(AttributeError):
                optimizer.zero_grad(set_to_none=True)

    def _act(self, decision: Decision) -> None:
        live = self._live
        if decision.action is Action.ROLLBACK:
            live.last_good.restore()
        if decision.action is Action.STOP:
            live.writer.stopped(decision.reason)
            raise SystemExit(STOPPED)

    def explain(
        self,
        bad: BadStepFacts,
        starts: Sequence[Start],
        *,
        unfinished: bool = False,
        reads: bool = False,
        replayer: InPlace | None = None,
    ) -> None:
        """Replays a step, if that is wanted and can be done."""
        live, known = self._live, bool(starts) or replayer is not None
        if replayer is None:
            replayer = self.replayer(bad, starts, unfinished=unfinished, reads=reads)
        with contextlib.ExitStack() as stack:
            if live.together.in_lockstep and live.options.trace:
                stack.enter_context(live.together.lead(replayer, bad.ordinal))
            if not live.writer.may_explain or not known:
                return
            named = live.named_parameters()
            live.own(lambda: live.curves.look(live.ordinal, named, last=True))
            live.writer.explain(replayer)
        if replayer.differs and not (unfinished or reads):
            self.doubt = live.writer.folder

    def replayer(
        self,
        bad: BadStepFacts,
        starts: Sequence[Start],
        *,
        unfinished: bool = False,
        reads: bool = False,
    ) -> InPlace:
        """Returns what replays a bad step.

        Args:
            bad: The step.
            starts: What its passes began with.
            unfinished: Whether the script has left it before its backward pass.
            reads: Whether the bad number is one that the script has read.
        """
        live = self._live
        live.good_steps.look()
        likely = list(starts)
        together = live.together.in_lockstep
        if not reads and not together:
            # A bad loss shows which pass it was; a bad gradient may be any one's.
            likely.sort(key=lambda start: all_finite(start.losses))
        return InPlace(
            live,
            live.patches,
            live.starts,
            likely,
            step=bad.step,
            ordinal=bad.ordinal,
            together=together,
            unfinished=unfinished,
            reads=reads,
            longest=_longest(bad),
        )

    def settle_doubt(self) -> None:
        """Says that a bad step did not come again, if a good one does, bit for bit.

        Only then is it known that what is replayed is what ran.
        """
        live = self._live
        folder, self.doubt = self.doubt, None
        if folder is None or not live.starts.ended:
            return
        replayer = InPlace(
            live,
            live.patches,
            live.starts,
            list(live.starts.ended),
            step=live.ordinal,
            ordinal=live.ordinal,
        )
        if replayer.is_exact():
            live.writer.did_not_come_again(folder)

    def facts(self, symptom: Symptom, optimizer: Any, decision: Decision) -> BadStepFacts:
        """Returns what is known of the step that is being made.

        Args:
            symptom: What is wrong with it.
            optimizer: Whose step it is; None in a script that has none.
            decision: What becomes of it.
        """
        live = self._live
        step = live.ordinal if optimizer is None else live.number_of(optimizer)
        return BadStepFacts(symptom, step, live.ordinal, decision, self.all_held_back())

    def note(
        self,
        symptom: Symptom,
        optimizer: Any,
        decision: Decision,
        starts: Sequence[Start] | None = None,
    ) -> None:
        """Reports a bad step that is not decided about here: all ranks do, or the script itself.

        Args:
            symptom: What is wrong with it.
            optimizer: Whose step it is; None in a script that has none.
            decision: What becomes of it.
            starts: What it began with; None for the step that is being made.
        """
        live = self._live
        bad = self.facts(symptom, optimizer, decision)
        bad.why = _why_not(symptom, poisoned=False)
        self.ordinals.append(live.ordinal)
        if live.writer.report(bad) and not live.together.in_lockstep:
            self.explain(bad, live.starts.ended if starts is None else starts)


def _longest(bad: BadStepFacts) -> float:
    """Returns how many seconds one replay may take."""
    return max(_SHORTEST_LIMIT, _MOST_STEPS * (bad.seconds or 0.0)) * load_now()


def _why_not(symptom: Symptom, *, poisoned: bool) -> str | None:
    """Returns why a bad step cannot be replayed; None if it can."""
    if symptom.kind == "spike":
        return "a spike is a finite number: there is no bad value to look for"
    if symptom.where == "learning rate" and not poisoned:
        return "loss and gradients are good: there is no bad value to look for"
    if poisoned or symptom.where not in ("loss", "gradient"):
        return "the run itself is bad by now: the state before the step is gone"
    return None
