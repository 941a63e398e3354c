"""Guards the steps of a script that knows nothing of it, in the process that runs it."""

from __future__ import annotations

import ast
import atexit
import contextlib
import linecache
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanguard.guard.held import BufferPlaces, Held
from nanguard.guard.optimizers import scaled_lr
from nanguard.guard.policy import Action, Policy, Trouble
from nanguard.launch.handover import Handover
from nanguard.launch.patches import Patches
from nanguard.launch.replay import Replay, frames
from nanguard.launch.timeline import Timeline
from nanguard.launch.watch import Watch
from nanguard.numerics import all_finite
from nanguard.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.launch.options import Options
    from nanguard.launch.watch import Symptom

STOPPED = 3


def begin(options: Options) -> None:
    """Guards this process from now on."""
    live = Live(options)
    live.patches.put_on()
    live.open()


class Live(Watch):
    """The guard around an unmodified script."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self._options = options
        self._policy = Policy(Settings(on_bad=options.on_bad, max_bad=options.max_bad))  # type: ignore[arg-type]
        self._handover = Handover(options)
        self._timeline: Timeline | None = None
        self._held: Held | None = None
        self._bad = 0
        self._applied = 0
        self._told = False
        self._pid = os.getpid()
        self.patches = Patches(self)

    def open(self) -> None:
        """Takes the first moment, if this process can be forked."""
        if self._options.trace and self._handover.can_fork():
            self._timeline = Timeline(self._handover.serve)
            if self._handover.alone():
                self._go_on(self._timeline.take_first())
        atexit.register(self._close)

    # The step.

    def before_backward(self, losses: list[Tensor]) -> None:
        """Looks at the loss while its terms can still be named."""
        if losses[0].device.type == "cpu" and not all_finite(losses):
            self.terms = _terms(sys._getframe(2), losses)
            if not self.made_by:
                self._meet(self.bad_loss(), None)

    def after_backward(self) -> None:
        """Counts a step where there is no optimizer that would."""
        if not self.made_by:
            if self.ordinal == 0:
                self._handover.say(
                    "no torch optimizer was made: steps are watched, but the update is the "
                    "script's own and cannot be held back"
                )
            self.end_manual_step()

    def judged_step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Makes a step only if loss and gradients are finite."""
        symptom = None
        if closure is None:
            symptom = self.bad_loss() or self.bad_gradient(optimizer)
        if symptom is not None:
            symptom.scaled_by_hand = self._scaler is not None
            self._meet(symptom, optimizer)
            return None
        with scaled_lr([optimizer], self._policy.lr_factor):
            result = call()
        self._look_after(optimizer)
        return result

    def judged_scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Lets the scaler do its work; a bad loss is none of it."""
        symptom = self.bad_loss()
        with scaled_lr([optimizer], self._policy.lr_factor):
            result = call()
        if symptom is not None:
            symptom.in_scaler = True
            self._meet(symptom, optimizer)
        else:
            self._look_after(optimizer)
        return result

    def boundary(self) -> None:
        """Marks what the next step may change, and takes a moment now and then."""
        if self._held is None:
            self._held = Held(BufferPlaces(self.models()))
        self._held.mark()
        if self._timeline is not None and os.getpid() == self._pid:
            self._go_on(self._timeline.take_if_due(self.ordinal))

    def _look_after(self, optimizer: Optimizer) -> None:
        symptom = self.bad_state(optimizer) or self.bad_buffers()
        if symptom is not None:
            self._meet(symptom, optimizer)
            return
        self._applied += 1
        self._policy.good()

    def _meet(self, symptom: Symptom | None, optimizer: Any) -> None:
        """Deals with a bad step."""
        if symptom is None:
            return
        self._bad += 1
        step = self.ordinal if optimizer is None else self.number_of(optimizer)
        poisoned = symptom.where not in ("loss", "gradient") or not self._run_is_finite()
        if self._held is not None:
            self._held.restore(self._held.shape)
            poisoned = poisoned and not (symptom.where == "buffer" and self._run_is_finite())
        decision = self._policy.bad(Trouble(step, poisoned=poisoned))
        self._handover.report(
            symptom, step=step, ordinal=self.ordinal, decision=decision, timeline=self._timeline
        )
        if optimizer is not None:
            with contextlib.suppress(AttributeError):
                optimizer.zero_grad(set_to_none=True)
        if decision.action is Action.STOP:
            self._handover.stopped(decision.reason)
            raise SystemExit(STOPPED)

    def _run_is_finite(self) -> bool:
        return all_finite(self.named_parameters().values())

    def _go_on(self, task: Any) -> None:
        """In a process that replays: becomes the replay."""
        if task is None:
            return
        self._timeline = None
        atexit.unregister(self._close)
        replay = Replay(task, self)
        self.patches.watcher = replay
        replay.begin()

    def _close(self) -> None:
        if os.getpid() != self._pid:
            return
        if self._timeline is not None:
            self._timeline.close()
        if self._bad:
            self._handover.summary(self.ordinal, self._bad)
        self.patches.take_off()


def _terms(frame: FrameType, losses: list[Tensor]) -> dict[str, float]:
    """Returns the terms of a loss by the names the script has for them."""
    for users in frames(frame):
        names = [n for n, v in users.f_locals.items() if isinstance(v, torch.Tensor) and v.dim() == 0]
        root = next(
            (n for n in names if users.f_locals[n].data_ptr() == losses[0].data_ptr()), None
        )
        if root is None:
            continue
        parts = _parts_of(root, users)
        return {
            name: float(users.f_locals[name].detach()) for name in parts if name in names and name != root
        }
    return {}


def _parts_of(name: str, frame: FrameType) -> list[str]:
    """Returns the names in the last assignment to a variable before a line."""
    lines = linecache.getlines(frame.f_code.co_filename)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return []
    found: list[str] = []
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Assign, ast.AugAssign))
            and node.lineno <= (frame.f_lineno or 0)
            and any(isinstance(t, ast.Name) and t.id == name for t in _targets(node))
        ):
            found = [n.id for n in ast.walk(node.value) if isinstance(n, ast.Name)]
    return found


def _targets(node: ast.Assign | ast.AugAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]
