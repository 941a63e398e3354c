"""Replays the update of a step: what an optimizer makes of gradients that are good.

Forward and backward have nothing to do with it, so no region is needed: the gradients are there,
and the optimizer is asked once more. What it writes is taken back. Where its step has been made
already, parameters and optimizer state are those of the last copy there is: they are a few steps
old, and so the parameters that turn bad have to be the ones that did.
"""

from __future__ import annotations

import ast
import inspect
import linecache
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from nanguard.guard.optimizers import (
    hyperparameters,
    parameters_of,
    schedulers_of,
    set_hyperparameters,
)
from nanguard.numerics import all_finite
from nanguard.replay import changes
from nanguard.replay.copies import StateCopy
from nanguard.replay.inplace import TOO_LONG, InPlace, Variant, in_words
from nanguard.replay.replayed_step import Reached
from nanguard.replay.sandbox import TimeLimit, TooLong
from nanguard.replay.task import ReplayOutcome
from nanguard.replay.tracer.sites import is_installed, is_users

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.replay.copies import LastGood
    from nanguard.replay.patches import Patches
    from nanguard.replay.replayed_step import ReplayedStep
    from nanguard.replay.start import Start
    from nanguard.replay.starts import Starts
    from nanguard.replay.task import Task
    from nanguard.replay.watch import Watch


class UpdateInPlace(InPlace):
    """Replays the update of one step, as often as there is something to try."""

    def __init__(
        self,
        run: Watch,
        patches: Patches,
        starts: Starts,
        start: Start,
        *,
        optimizer: Optimizer,
        call: Callable[[], Any],
        before: LastGood | None,
        step: int,
        ordinal: int,
        longest: float,
    ) -> None:
        """Prepares for replays.

        Args:
            run: Knows the models and optimizers.
            patches: What makes torch tell a watcher what happens.
            starts: What remembers starts.
            start: The code that calls the optimizer, as it is now.
            optimizer: Whose update it is.
            call: Makes the update.
            before: The last good state, if the update was made already; None if it was not.
            step: The number of the step as its optimizer counts.
            ordinal: The same, as all optimizers together count.
            longest: How many seconds one replay may take.
        """
        super().__init__(run, patches, starts, [start], step=step, ordinal=ordinal, longest=longest)
        self._optimizer, self._make, self._before = optimizer, call, before
        self._bad = [] if before is None else _bad_ones(optimizer)

    def run(self, task: Task, seconds: float) -> ReplayOutcome | None:
        """Makes the update again with the changes of a task."""
        if task.on_good or task.further:
            return ReplayOutcome(error="an update alone says nothing about the steps after it")
        if task.without or task.precision is not None:
            return ReplayOutcome(error="only the update is replayed")
        return super().run(task, seconds)

    def _settle(self, task: Task, seconds: float) -> ReplayOutcome:
        variant = next(self._variants())
        outcome, _ = self._replay(replace(task, trace=True), variant, seconds)
        if outcome.error is not None:
            return outcome
        if outcome.symptom is None:
            return ReplayOutcome(error="the update is a good one when it is made again")
        self._chosen = variant
        return outcome

    def _replay_here(
        self, task: Task, variant: Variant, seconds: float
    ) -> tuple[ReplayOutcome, list[Tensor]]:
        run = self._run
        tensors = [*run.named_parameters().values(), *run.buffers().values()]
        now = StateCopy(tensors, run.optimizers())
        try:
            if self._before is not None:
                self._before.restore()
                if _bad_ones(self._optimizer):
                    return ReplayOutcome(error="nobody has a copy of the state before the step"), []
            return super()._replay_here(task, variant, seconds)
        finally:
            now.put_back(unnoticed=True)

    def _set_aside_gradients(self) -> list[tuple[Tensor, Tensor | None]]:
        found = [(p, p.grad) for p in self._run.named_parameters().values()]
        for parameter, gradient in found:
            # Some optimizers write to them: weight decay, clipping.
            parameter.grad = None if gradient is None else gradient.detach().clone()
        return found

    def _call(
        self,
        replay: ReplayedStep,
        task: Task,
        variant: Variant,
        stack: contextlib.ExitStack,
        seconds: float,
    ) -> str | None:
        stack.enter_context(self._patches.followed_by(replay))
        try:
            stack.enter_context(TimeLimit(seconds))
            if task.source:
                before = hyperparameters([self._optimizer])
                stack.callback(set_hyperparameters, [self._optimizer], before)
                if not self._set_settings(task.source):
                    stack.enter_context(changes.swapped_code(task.source))
                    _ask_schedules(self._optimizer)
            stack.enter_context(replay.watching())
            with replay.in_optimizer():
                self._make()
            replay.judge_update(self._optimizer, must_be=self._bad)
        except Reached:
            return None
        except TooLong:
            return TOO_LONG
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever the optimizer raises
            return in_words(error)
        return None

    def _set_settings(self, source: Mapping[str, str]) -> bool:
        """Gives the optimizer the settings that changed code would have made it with, if any."""
        site = next((m.site for m in self._run.made_by if m.optimizer() is self._optimizer), None)
        if site is None or site.file not in source:
            return False
        before = _settings_on("".join(linecache.getlines(site.file)), site.line)
        takes = inspect.signature(type(self._optimizer).__init__).parameters
        takes_any = any(one.kind is one.VAR_KEYWORD for one in takes.values())
        changed = False
        for place, value in _settings_on(source[site.file], site.line).items():
            name = place[1]
            if before.get(place) == value or name not in self._optimizer.defaults:
                continue
            if name not in takes and not takes_any:
                continue
            try:
                setting = ast.literal_eval(value)
            except ValueError:  # more than a number: it would have to be computed
                continue
            changed = True
            for group in self._optimizer.param_groups:
                group[name] = setting
        return changed


def _settings_on(text: str, line: int) -> dict[tuple[int, str], str]:
    """Returns the texts of the keyword arguments of the calls on a line, by call and name."""
    calls = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    return {
        (index, keyword.arg): ast.unparse(keyword.value)
        for index, call in enumerate(calls)
        for keyword in call.keywords
        if keyword.arg is not None
    }


def _ask_schedules(optimizer: Optimizer) -> None:
    """Sets the learning rates that the schedules of an optimizer say, with the code they have now.

    Those that go from one rate to the next say the same as before.
    """
    for scheduler in schedulers_of(optimizer):
        asked = vars(scheduler).get("_get_lr_called_within_step", False)
        # Torch warns of schedules that are asked by others.
        vars(scheduler)["_get_lr_called_within_step"] = True
        try:
            rates = scheduler.get_lr()
        finally:
            vars(scheduler)["_get_lr_called_within_step"] = asked
        for group, rate in zip(optimizer.param_groups, rates, strict=False):
            group["lr"] = rate


def is_written_by_user(optimizer: Any) -> bool:
    """Returns whether the step of an optimizer is code of the user's, and not of a library."""
    code = getattr(inspect.unwrap(type(optimizer).step), "__code__", None)
    return code is not None and is_users(code.co_filename) and not is_installed(code.co_filename)


def may_go_wrong(optimizer: Optimizer) -> bool:
    """Returns whether good gradients may become a bad update, and looking at it is cheap.

    The optimizer is the user's own, or nothing keeps it from dividing by zero.
    """
    first = next((p for g in optimizer.param_groups for p in g["params"]), None)
    bare = any(group.get("eps") == 0 for group in optimizer.param_groups)
    return first is not None and first.is_cpu and (bare or is_written_by_user(optimizer))


def _bad_ones(optimizer: Optimizer) -> list[Tensor]:
    with _disable_current_modes(), torch.no_grad():
        return [p for p in parameters_of([optimizer]) if not all_finite([p])]
