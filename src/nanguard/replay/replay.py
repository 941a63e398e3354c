"""Follows the script once more, up to the step in question, and answers what became of it."""

from __future__ import annotations

import atexit
import contextlib
import errno
import linecache
import math
import os
import re
import sys
import traceback
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from nanguard.guard.held import BufferPlaces, Held
from nanguard.guard.optimizers import (
    bad_schedule_state,
    learning_rate,
    pass_over,
    scaled_lr,
    schedulers_of,
)
from nanguard.guard.rng import RandomStreams
from nanguard.incident import NO_BATCH
from nanguard.replay import changes
from nanguard.replay.made_before import entered_at
from nanguard.replay.task import Facts, Growth, ReplayOutcome
from nanguard.replay.tracer.modules import tensors_in
from nanguard.replay.tracer.origin import bad_rows, origin_of, path_of, producers, suspects
from nanguard.replay.tracer.sites import (
    file_of,
    here,
    is_part_of_script,
    site_of_function,
    users_frame,
)
from nanguard.replay.tracer.tensor_values import memory_of
from nanguard.replay.tracer.trace import Trace
from nanguard.replay.watch import Watch
from nanguard.trackers import be_silent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.guard.verdicts import Symptom
    from nanguard.replay.task import Task
    from nanguard.replay.tracer.op_records import Record
    from nanguard.replay.tracer.origin import Origin
    from nanguard.replay.tracer.sites import Site


def schedule_of(optimizer: Optimizer) -> Site | None:
    """Returns where the function begins that a scheduler asks for the rate of an optimizer."""
    for scheduler in schedulers_of(optimizer):
        for function in (*getattr(scheduler, "lr_lambdas", ()), type(scheduler).get_lr):
            site = site_of_function(function)
            if site is not None:
                return site
    return None


def rates_set_in() -> list[str]:
    """Returns the script's files that set a learning rate by themselves."""
    files = {str(file_of(m)) for m in list(sys.modules.values()) if is_part_of_script(m)}
    return sorted(f for f in files if _SETS_RATE.search("".join(linecache.getlines(f))))


_SETS_RATE = re.compile(r"\[\s*['\"]lr['\"]\s*\]\s*[*/+-]?=(?!=)")
# Nobody else's: in a replay, torch.save writes somewhere else.
_save = torch.save
# Larger batches are not saved.
_LIMIT = 256 << 20
_SUSPECTS = 4
# Batches that a loader may be ahead of the loop, and those that one step may add up.
_AHEAD, _MOST_DRAWN = 2, 63


def read_trace(replay: Replay, outcome: ReplayOutcome) -> None:
    """Completes the outcome of a bad step with what its trace shows."""
    trace, symptom = replay.trace, outcome.symptom
    assert trace is not None  # noqa: S101 - the caller has looked
    assert symptom is not None  # noqa: S101
    trace.know_parameters(replay.named_parameters())
    trace.resolve()
    _find_batch(replay, trace)
    facts = outcome.facts
    facts.batch_size = trace.batch_size
    facts.autocast = trace.autocast
    if replay.task.table:
        facts.table = trace.table()
    if trace.unmeasured:
        facts.notes.append(
            f"{trace.unmeasured} results of operations are of kinds that cannot be looked at"
        )
    sinks = _sinks(replay, trace, symptom)
    made = producers(sinks)
    if not made:
        return
    sink = {"loss": "loss", "gradient": "gradient"}.get(symptom.where, "parameter")
    first = next((r for r in trace.bad if r.index == replay.task.look_at), made[0])
    outcome.origin = origin = origin_of(first, trace, sink=sink)
    if origin.op == "input":
        origin.site = entered_at(origin, trace) or origin.site
    facts.path = path_of(first, sinks, trace)
    facts.suspects = [(record.index, record.op) for record in suspects(trace, first)][:_SUSPECTS]
    _choose_batch(replay, trace, first)
    facts.batch_indices = list(replay.indices)
    facts.blame(_samples(outcome.origin, trace))
    if replay.task.folder is not None:
        note = _save_batch(replay, trace, Path(replay.task.folder))
        if note is not None:
            facts.notes.append(note)


def _find_batch(replay: Replay, trace: Trace) -> None:
    """Finds the batch of the step: loaders that look ahead have drawn the next one already."""
    for batch, indices in reversed(replay.drawn):
        if any(memory_of(tensor) in trace.given for tensor in tensors_in(batch)):
            trace.batch, replay.indices = batch, indices
            return
    for batch, indices in reversed(replay.drawn):
        # Some frameworks copy what they hand on.
        if _has_same_values(batch, trace.arguments):
            trace.batch, replay.indices = batch, indices
            return
    # The model may be given what the script has made of the batch, and there may be no model.
    read = {id(writer) for record in trace.records for writer in record.writers}
    held = {memory_of(tensor) for tensor in tensors_in(replay.began_with)}
    for batch, indices in reversed(replay.drawn):
        tensors = list(tensors_in(batch))
        if any(id(trace.writer(t)) in read or memory_of(t) in held for t in tensors):
            trace.batch, replay.indices = batch, indices
            if trace.batch_size is None:
                sizes = {tensor.shape[0] for tensor in tensors if tensor.dim()}
                trace.batch_size = sizes.pop() if len(sizes) == 1 else None
            return


def _choose_batch(replay: Replay, trace: Trace, first: Record) -> None:
    """Finds the batch that a bad value was made of, where the step has taken several."""
    todo, seen = [first], {id(first)}
    while todo:
        for writer in todo.pop().writers:
            if id(writer) not in seen:
                seen.add(id(writer))
                todo.append(writer)
    for batch, indices in reversed(replay.drawn):
        if any(id(trace.writer(tensor)) in seen for tensor in tensors_in(batch)):
            trace.batch, replay.indices = batch, indices
            return


def _has_same_values(batch: Any, arguments: Any) -> bool:
    """Returns whether a tensor of a batch, and not one of constants, is among some arguments."""
    given = [tensor for tensor in tensors_in(arguments) if tensor.dim()]
    return any(
        tensor.shape == other.shape
        and tensor.dtype == other.dtype
        # A batch mostly comes from the host, and the model is given it on a device.
        and torch.equal(tensor.nan_to_num(), other.to(tensor.device).nan_to_num())
        and not torch.equal(tensor, tensor.reshape(-1)[:1].expand_as(tensor))
        for tensor in tensors_in(batch)
        for other in given
        if tensor.dim()
    )


def _sinks(replay: Replay, trace: Trace, symptom: Symptom) -> list[Record]:
    """Returns who wrote the bad values that were noticed."""
    tensors: list[Any] = list(replay.losses)
    handed = getattr(replay, "handed", [])
    if handed:
        tensors = handed
    elif symptom.where in ("gradient", "parameter"):
        named = replay.named_parameters()
        tensors = [named[name] for name in symptom.names]
        if symptom.where == "gradient":
            tensors = [tensor.grad for tensor in tensors]
    elif symptom.where == "buffer":
        buffers = replay.buffers()
        tensors = [buffers[name] for name in symptom.names]
    elif symptom.where == "optimizer state":
        states = [state for o in replay.optimizers() for state in o.state.values()]
        tensors = list(tensors_in(states))
    writers = [trace.writer(tensor) for tensor in tensors if tensor is not None]
    return [writer for writer in writers if writer is not None and writer.bad]


def _samples(origin: Origin, trace: Trace) -> list[int]:
    """Returns which samples of the batch are at fault, if not all of them are."""
    size = trace.batch_size
    if size is None:
        return []
    if origin.phase == "data":
        rows: set[int] = set()
        for tensor in tensors_in(trace.batch):
            if tensor.dim() and tensor.is_floating_point() and tensor.shape[0] == size:
                bad = ~torch.isfinite(tensor).reshape(size, -1).all(1)
                rows.update(bad.nonzero().flatten().tolist())
        if 0 < len(rows) < size:
            return sorted(rows)
        if origin.detail is not None and origin.detail.output.shape[:1] != (size,):
            return []  # rows of the whole data set, and not of a batch
    return bad_rows(origin.detail, size)


def _save_batch(replay: Replay, trace: Trace, folder: Path) -> str | None:
    """Saves batch, buffers and random streams beside the incident; returns why not, if so."""
    if os.environ.get(NO_BATCH):
        return "the batch was not kept (--no-batch)"
    tensors = [tensor.detach() for tensor in tensors_in(trace.batch)]
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    if not tensors:
        return "no tensors were found in the batch, so it was not saved"
    if size > _LIMIT:
        return f"the batch of {size >> 20} MiB was too large to be saved"
    buffers = {name: buffer.detach() for name, buffer in replay.buffers().items()}
    if sum(buffer.numel() * buffer.element_size() for buffer in buffers.values()) > _LIMIT:
        buffers = {}
    saved = {"batch": tensors, "buffers": buffers, "streams": _streams(replay.streams)}
    path = folder / "batch.pt"
    # Nobody else's to read, from its first byte on; what opens files here is held back.
    mask = os.umask(0o077)
    try:
        _save(saved, path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            path.unlink()
        return f"the batch could not be saved: {_why(error, folder)}"
    finally:
        os.umask(mask)
    return None


def _why(error: Exception, folder: Path) -> str:
    """Returns what the system says about a file that torch could not write."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    full = os.statvfs(folder).f_bavail == 0
    return os.strerror(errno.ENOSPC) if full else str(error).split("\n", 1)[0][:200]


def _streams(captured: dict[str, Any]) -> dict[str, Any]:
    """Returns random streams in a form that can be loaded without running anything."""
    numpy = (captured.get("numpy") or {}).get("state", {})
    return {
        "torch": captured.get("torch"),
        "python": list(captured["python"][1]) if "python" in captured else None,
        "numpy": torch.tensor([*numpy["key"].tolist(), numpy["pos"]]) if "key" in numpy else None,
    }


# The replay that this process has become; None in the run itself.
current: Replay | None = None


class Replay(Watch):
    """Goes on as the live run did, up to the step in question.

    Attributes:
        task: What is to be done.
        trace: The record of every operation, if that is part of the task.
        facts: What was found out so far.
        indices: Which samples of the data set are in the batch.
        drawn: The last batches that loaders have handed out, and their indices.
        began_with: What the names of the step's code held when it began, where that is known.
        answered: Whether the step in question is over.
    """

    def __init__(self, task: Task, before: Watch) -> None:
        super().__init__()
        self.__dict__.update(before.replayable())
        self.task = task
        self.trace = (
            Trace(heal=task.heal, look_at=task.look_at, exact=task.table)
            if task.trace or task.heal
            else None
        )
        self.facts = Facts()
        self.indices: list[int] = []
        self.drawn: list[tuple[Any, list[int]]] = []
        self.began_with: list[Any] = []
        self.answered = False
        self._norms: list[float] = []
        self._held: Held | None = None
        # The random streams as they were before the step in question.
        self.streams: dict[str, Any] = {}

    def begin(self) -> None:
        """Changes what is to be changed, and goes on."""
        if self.task.precision is not None:
            changes.for_good(changes.wider(getattr(torch, self.task.precision), self))
        if self.trace is not None:
            self.trace.step = self.ordinal
            self.trace.start()
        self.at_boundary()

    @abstractmethod
    def answer(self, outcome: ReplayOutcome) -> None:
        """Ends the replay."""

    # What the patches tell.

    def begin_pass(self, loader: Any) -> None:
        """Makes a loader read its data here, where it can be watched."""
        with contextlib.suppress(AttributeError, ValueError):
            loader.num_workers = 0

    def next_batch(self, own: Any, draw: Callable[[Any], Any]) -> Any:
        """Hands on a batch, and watches how it is made."""
        if own._num_workers:
            # They belong to the run, and so does what they make.
            self.answer(
                ReplayOutcome(error="batches of a loader's workers cannot be had a second time")
            )
        batch = self._watched(lambda: draw(own))
        self.indices = self.indices_of(own)
        if self.ordinal == self.task.target and self.task.without and not self.task.targets_only:
            batch = changes.without(batch, self.task.without)
        kept = _MOST_DRAWN if self.ordinal == self.task.target else _AHEAD
        self.drawn = [*self.drawn[-kept:], (batch, self.indices)]
        if self.trace is not None:
            self.trace.batch = batch
        return batch

    def before_backward(self, losses: list[Tensor]) -> None:
        """Notes where the script is, and clears old gradients if that is the task."""
        with _disable_current_modes():
            if self.backwards and len(self.losses) <= 1:  # the first backward of a step
                parameters = self.named_parameters().values()
                stale = [p for p in parameters if p.grad is not None and bool(p.grad.any())]
                self.facts.stale_grads = bool(stale)
                if self.task.fresh_grads:
                    for parameter in stale:
                        parameter.grad = None
            self.facts.backward_site = here()
            self._look_around()
            if not self.made_by and self.ordinal not in self.task.skipped:
                self._judge(self.bad_loss(), None)

    def after_backward(self) -> None:
        """Notes the end of a backward; without an optimizer it is the end of the step."""
        if self.trace is not None:
            self.trace.end_backward()
        with _disable_current_modes():
            if self.task.clip is not None:
                grads = [p for p in self.named_parameters().values() if p.grad is not None]
                nn.utils.clip_grad_norm_(grads, self.task.clip)
            skipped = self.ordinal in self.task.skipped
            if not self.made_by and not self.answered and not skipped:
                self._judge(self.bad_manual_gradient(), None)
        if not self.made_by:
            self.end_manual_step()

    def judged_step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Judges a step, makes it, and judges what it made."""
        if self.ordinal in self.task.skipped:
            self._skip(optimizer)
            return None
        by_hand = self._scaler is not None
        with _disable_current_modes():
            self.facts.step_site = here()
            if closure is None:
                loss, gradient = self.verdict(optimizer)
                self._judge(loss or gradient, optimizer, by_hand=by_hand)
        if self.answered:
            return None
        with scaled_lr([optimizer], self.task.lr_factor), self.in_optimizer():
            result = call() if closure is None else call(self._outside(closure, optimizer))
        if closure is not None and isinstance(optimizer, torch.optim.LBFGS):
            with _disable_current_modes():
                self._judge(self.bad_end_loss(), optimizer)
        if not self.answered:
            self._judge_result(optimizer, by_hand=by_hand)
        return result

    def judged_scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Judges the loss; the gradients are the scaler's own business."""
        skipped = self.ordinal in self.task.skipped
        with _disable_current_modes():
            self.facts.step_site = here()
            if skipped:
                pass_over(scaler, optimizer)
                self._skip(optimizer)
            else:
                self._judge(self.bad_loss(), optimizer)
        if skipped or self.answered:
            return None
        with scaled_lr([optimizer], self.task.lr_factor), self.in_optimizer():
            result = call()
        self._judge_result(optimizer)
        return result

    def boundary(self) -> None:
        """Begins a new step."""
        if self.ordinal > self.task.target and not self.answered:
            with _disable_current_modes():
                self.answer(self._outcome(None))
        self.at_boundary()

    def at_boundary(self) -> None:
        """Prepares for the step that begins."""
        if self.ordinal in self.task.skipped:
            with _disable_current_modes():
                self._held = Held(BufferPlaces(self.models()))
                self._held.mark()
        if self.trace is not None:
            self.trace.begin_step(self.ordinal)
        if self.ordinal == self.task.target and self.task.folder is not None:
            self.streams = RandomStreams([]).capture()
        if self.ordinal == self.task.target and self.task.without:
            only = self.task.targets_only
            changes.for_good(changes.replaced_samples(self.task.without, targets_only=only))

    # Verdicts.

    def _judge(self, symptom: Symptom | None, optimizer: Any, *, by_hand: bool = False) -> None:
        if symptom is None:
            return
        symptom.scaled_by_hand = by_hand
        outcome = self._outcome(optimizer)
        outcome.symptom = symptom
        if self.trace is not None:
            try:
                read_trace(self, outcome)
            except Exception as error:  # noqa: BLE001 - an answer without an origin is an answer
                where = traceback.extract_tb(error.__traceback__)[-1]
                note = f"the trace could not be read: {error!r} ({where.name}:{where.lineno})"
                outcome.facts.notes.append(note)
        self.answer(outcome)

    def _skip(self, optimizer: Any) -> None:
        """Does what the guard did about an earlier bad step."""
        with _disable_current_modes():
            if self._held is not None:
                self._held.restore(self._held.shape)
            optimizer.zero_grad(set_to_none=True)

    def _judge_result(self, optimizer: Any, *, by_hand: bool = False) -> None:
        with _disable_current_modes():
            self._judge(self.bad_state(optimizer) or self.bad_buffers(), optimizer, by_hand=by_hand)
            if self.answered:
                return
            loss = self.loss_value()
            if loss is not None:
                self.facts.losses = [*self.facts.losses[-63:], loss]
            tensors = [p.detach().float() for p in self.named_parameters().values()]
            self.curves.look(self.ordinal, self.named_parameters())
            self._norms.append(math.sqrt(sum(float(t.square().sum()) for t in tensors)))
            if self.ordinal >= self.task.target:
                self.answer(self._outcome(optimizer))

    def _outcome(self, optimizer: Any) -> ReplayOutcome:
        step = self.ordinal if optimizer is None else self.number_of(optimizer)
        facts = self.facts
        if optimizer is not None:
            facts.optimizer = type(optimizer).__name__
            facts.lr = learning_rate([optimizer])
            if facts.lr is not None and not math.isfinite(facts.lr):
                facts.schedule, facts.rate_set_in = schedule_of(optimizer), rates_set_in()
                facts.schedule_state = bad_schedule_state(optimizer)
            eps = optimizer.param_groups[0].get("eps")
            facts.eps = float(eps) if isinstance(eps, (int, float)) else None
            facts.made = next((m.site for m in self.made_by if m.optimizer() is optimizer), None)
        if self._norms:
            before = self._norms[-2] if len(self._norms) > 1 else self._norms[0]
            facts.growth = Growth(self._norms[0], self._norms[-1], abs(self._norms[-1] - before))
        facts.clip_limit = self.clip_limit
        facts.curves = facts.curves or self.curves.all()
        facts.half_parameters = any(
            p.dtype in (torch.float16, torch.bfloat16) for p in self.named_parameters().values()
        )
        return ReplayOutcome(self.ordinal, step, loss=self.loss_value(), facts=facts)

    # Looking around.

    @contextlib.contextmanager
    def in_optimizer(self) -> Iterator[None]:
        """Takes the operations inside for those of an optimizer."""
        if self.trace is not None:
            self.trace.in_optimizer = True
        yield
        if self.trace is not None:
            self.trace.in_optimizer = False

    def _outside(self, closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
        """Returns a closure whose operations are not taken for those of the optimizer."""

        def evaluate() -> Any:
            if self.trace is None:
                result = closure()
                self._judge_closure(optimizer)
                return result
            self.trace.in_optimizer = False
            try:
                result = closure()
                self._judge_closure(optimizer)
            finally:
                self.trace.in_optimizer = True
            return result

        return evaluate

    def _judge_closure(self, optimizer: Any) -> None:
        """Judges what a closure has come to, before the optimizer changes anything."""
        if not isinstance(optimizer, torch.optim.LBFGS):
            with _disable_current_modes():
                loss, gradient = self.verdict(optimizer)
                self._judge(loss or gradient, optimizer)

    def _watched(self, make: Callable[[], Any]) -> Any:
        if self.trace is None:
            return make()
        self.trace.in_data += 1
        try:
            return make()
        finally:
            self.trace.in_data -= 1

    def _look_around(self) -> None:
        """Learns what the script calls things, from the frames that call backward."""
        frame = users_frame(sys._getframe(1))
        facts = self.facts
        while frame is not None:
            for name, value in list(frame.f_locals.items()):
                kind = type(value)
                if issubclass(kind, nn.Module) and facts.model_name is None:
                    facts.model_name = name if any(m is value for m in self.models()) else None
                elif issubclass(kind, torch.amp.GradScaler):
                    facts.scaler_name = name
                elif issubclass(kind, torch.optim.Optimizer) and facts.optimizer_name is None:
                    facts.optimizer_name = name
            frame = users_frame(frame.f_back)


class ForkedReplay(Replay):
    """A replay in a process of its own, which ends with the answer."""

    def begin(self) -> None:
        """Goes on from the moment at which this process was forked."""
        global current  # a guard that the script makes from now on has to know
        current = self
        be_silent()
        atexit.register(self._ended)
        sys.excepthook = self._failed
        changes.never_compile()
        changes.for_good(changes.alone())
        changes.leave_workers()
        super().begin()
        if self.task.source and self.ordinal == 0 and not self.made_by:
            try:
                changes.run_main(self.task.source)
            except Exception as error:  # noqa: BLE001 - whatever the program raises ends it
                self._failed(type(error), error, None)
            self._ended()
        elif self.task.source:
            try:
                changes.for_good(changes.swapped_code(self.task.source))
            except RuntimeError as error:
                self.answer(ReplayOutcome(error=str(error)))

    def at_boundary(self) -> None:
        """Notes how far the replay is."""
        if self.task.progress is not None:
            self.task.progress.at_step(self.ordinal)
        super().at_boundary()

    def answer(self, outcome: ReplayOutcome) -> None:
        """Sends the answer, and ends the process."""
        if not self.answered and self.task.answer is not None:
            self.answered = True
            with contextlib.suppress(OSError):
                self.task.answer.send(outcome)
                self.task.answer.close()
        os._exit(0)

    def _ended(self) -> None:
        self.answer(ReplayOutcome(error=f"the script ended before step {self.task.target}"))

    def _failed(self, kind: type[BaseException], error: BaseException, _where: Any) -> None:
        last = traceback.format_exception_only(kind, error)[-1].strip()
        self.answer(ReplayOutcome(error=last[:500]))
