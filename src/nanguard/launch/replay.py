"""Runs the script again from a moment of the past, up to the step in question."""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from nanguard.guard.optimizers import learning_rate, scaled_lr
from nanguard.launch import changes
from nanguard.launch.task import Facts, Growth, Outcome
from nanguard.launch.watch import Watch
from nanguard.tracer.modules import tensors_in
from nanguard.tracer.origin import bad_rows, origin_of, producers, suspects
from nanguard.tracer.sites import here, users_frame
from nanguard.tracer.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.launch.task import Task
    from nanguard.launch.watch import Symptom
    from nanguard.tracer.origin import Origin
    from nanguard.tracer.records import Record

_save = torch.save
# Larger batches are not saved.
_LIMIT = 256 << 20


class Replay(Watch):
    """Follows a script as the live run did, up to the step in question, and answers."""

    def __init__(self, task: Task, before: Watch) -> None:
        super().__init__()
        self.__dict__.update(before.replayable())
        self._task = task
        self._trace = Trace(heal=task.heal) if task.trace or task.heal else None
        self._facts = Facts()
        self._norms: list[float] = []
        self._answered = False
        self._given = list(task.batches)
        self.indices: list[int] = []

    def begin(self) -> None:
        """Changes what is to be changed, and goes on."""
        atexit.register(self._ended)
        sys.excepthook = self._failed
        changes.run_eagerly()
        if self._task.precision is not None:
            changes.raise_precision(getattr(torch, self._task.precision), self)
        if self._trace is not None:
            self._trace.step = self.ordinal
            self._trace.start()
        if self._task.source:
            changes.run_main(self._task.source)
            self._ended()
        self._at_boundary()

    def batches(self, loader: Any, batches: Iterator[Any]) -> Iterator[Any]:
        """Hands on the batches of a loader, and knows when it is at work."""
        return _Batches(self, batches)

    def before_backward(self, losses: list[Tensor]) -> None:
        """Notes where the script is, and clears old gradients if that is the task."""
        with _disable_current_modes():
            parameters = self.named_parameters().values()
            if self.backwards and not self.in_step():
                stale = [p for p in parameters if p.grad is not None and bool(p.grad.any())]
                self._facts.stale_grads = bool(stale)
                if self._task.fresh_grads:
                    for p in stale:
                        p.grad = None
            self._facts.backward_site = here()
            self._look_around()
            if not self.made_by:
                symptom = self.bad_loss()
                if symptom is not None:
                    self._answer_bad(symptom, None)

    def after_backward(self) -> None:
        """Notes the end of a backward."""
        if self._trace is not None:
            self._trace.end_backward()
        if self._task.clip is not None:
            with _disable_current_modes():
                grads = [p for p in self.named_parameters().values() if p.grad is not None]
                nn.utils.clip_grad_norm_(grads, self._task.clip)
        if not self.made_by:
            with _disable_current_modes():
                symptom = self.bad_manual_gradient()
                if symptom is not None:
                    self._answer_bad(symptom, None)
            self.end_manual_step()

    def judged_step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Judges a step, makes it, and judges what it made."""
        with _disable_current_modes():
            self._facts.step_site = here()
            symptom = None
            if closure is None:
                symptom = self.bad_loss() or self.bad_gradient(optimizer)
            if symptom is not None:
                symptom.scaled_by_hand = self._scaler is not None
                symptom.scale = _scale_of(self._scaler)
                self._answer_bad(symptom, optimizer)
        with scaled_lr([optimizer], self._task.lr_factor), self._in_optimizer():
            result = call()
        with _disable_current_modes():
            symptom = self.bad_state(optimizer) or self.bad_buffers()
            if symptom is not None:
                symptom.scaled_by_hand = self._scaler is not None
                self._answer_bad(symptom, optimizer)
            self._measure(optimizer)
            if self.ordinal >= self._task.target:
                self._answer_good(optimizer)
        return result

    def judged_scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Judges the loss; the gradients are the scaler's own business."""
        with _disable_current_modes():
            self._facts.step_site = here()
            symptom = self.bad_loss()
            if symptom is not None:
                symptom.in_scaler = True
                symptom.scale = _scale_of(scaler)
                self._answer_bad(symptom, optimizer)
        with scaled_lr([optimizer], self._task.lr_factor), self._in_optimizer():
            result = call()
        with _disable_current_modes():
            symptom = self.bad_state(optimizer) or self.bad_buffers()
            if symptom is not None:
                symptom.in_scaler = True
                self._answer_bad(symptom, optimizer)
            self._measure(optimizer)
            if self.ordinal >= self._task.target:
                self._answer_good(optimizer)
        return result

    def boundary(self) -> None:
        """Begins a new step."""
        if self.ordinal > self._task.target:
            with _disable_current_modes():
                self._answer_good(None)
        self._at_boundary()

    def _at_boundary(self) -> None:
        if self._trace is not None:
            self._trace.begin_step(self.ordinal)
        if self.ordinal == self._task.target and self._task.without:
            changes.replace_samples(self._task.without, targets_only=self._task.targets_only)

    @contextlib.contextmanager
    def _in_optimizer(self) -> Iterator[None]:
        if self._trace is not None:
            self._trace.in_optimizer = True
        yield
        if self._trace is not None:
            self._trace.in_optimizer = False

    def _measure(self, optimizer: Any) -> None:
        loss = self.loss_value()
        if loss is not None:
            self._facts.losses = [*self._facts.losses[-63:], loss]
        squares = [float(p.detach().float().square().sum()) for p in self.named_parameters().values()]
        self._norms.append(math.sqrt(sum(squares)))

    def _look_around(self) -> None:
        frame = users_frame(sys._getframe(1))
        facts = self._facts
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

    def _answer_good(self, optimizer: Any) -> None:
        self._send(self._outcome(optimizer))

    def _answer_bad(self, symptom: Symptom, optimizer: Any) -> None:
        outcome = self._outcome(optimizer)
        outcome.symptom = symptom
        if self._trace is not None:
            try:
                self._explain(outcome, symptom, optimizer)
            except Exception as error:  # noqa: BLE001 - an answer without an origin is an answer
                outcome.facts.notes.append(f"the trace could not be read: {error!r}")
        self._send(outcome)

    def _outcome(self, optimizer: Any) -> Outcome:
        step = self.ordinal if optimizer is None else self.number_of(optimizer)
        outcome = Outcome(self.ordinal, step, loss=self.loss_value(), facts=self._facts)
        facts = self._facts
        if optimizer is not None:
            facts.optimizer = type(optimizer).__name__
            facts.lr = learning_rate([optimizer])
            eps = optimizer.param_groups[0].get("eps")
            facts.eps = float(eps) if isinstance(eps, (int, float)) else None
            facts.made = next(
                (m.site for m in self.made_by if m.optimizer() is optimizer), None
            )
        if self._norms:
            first, last = self._norms[0], self._norms[-1]
            before = self._norms[-2] if len(self._norms) > 1 else first
            facts.growth = Growth(first, last, abs(last - before))
        facts.half_parameters = any(
            p.dtype in (torch.float16, torch.bfloat16) for p in self.named_parameters().values()
        )
        return outcome

    def _explain(self, outcome: Outcome, symptom: Symptom, optimizer: Any) -> None:
        trace = self._trace
        assert trace is not None  # noqa: S101 - the caller has looked
        trace.know_parameters(self.named_parameters())
        facts = outcome.facts
        facts.batch_size = trace.batch_size
        facts.autocast = trace.autocast
        made = producers(self._sinks(symptom))
        if self._task.table:
            facts.table = trace.table()
        if not made:
            return
        sink = {"loss": "loss", "gradient": "gradient"}.get(symptom.where, "parameter")
        first = next((r for r in trace.bad if r.index == self._task.look_at), made[0])
        outcome.origin = origin_of(first, trace, sink=sink)
        facts.suspects = [(record.index, record.op) for record in suspects(trace, first)][:4]
        facts.samples = self._samples(outcome.origin)
        facts.indices = [self.indices[row] for row in facts.samples if row < len(self.indices)]
        if self._task.folder is not None:
            self._save_batch(Path(self._task.folder))

    def _sinks(self, symptom: Symptom) -> list[Record]:
        trace = self._trace
        assert trace is not None  # noqa: S101
        named = self.named_parameters()
        tensors: list[Any] = list(self.losses)
        if symptom.where == "gradient":
            tensors = [named[name].grad for name in symptom.names]
        elif symptom.where == "parameter":
            tensors = [named[name] for name in symptom.names]
        elif symptom.where == "buffer":
            buffers = self.buffers()
            tensors = [buffers[name] for name in symptom.names]
        elif symptom.where == "optimizer state":
            tensors = [
                t for o in self.optimizers() for s in o.state.values() for t in tensors_in(s)
            ]
        writers = [trace.writer(tensor) for tensor in tensors if tensor is not None]
        return [writer for writer in writers if writer is not None and writer.is_known_bad]

    def _samples(self, origin: Origin) -> list[int]:
        trace = self._trace
        assert trace is not None  # noqa: S101
        if trace.batch_size is None:
            return []
        if origin.phase == "data":
            rows: set[int] = set()
            for tensor in tensors_in(trace.batch):
                if tensor.dim() and tensor.is_floating_point() and tensor.shape[0] == trace.batch_size:
                    bad = ~torch.isfinite(tensor).flatten(1).all(1) if tensor.dim() > 1 else ~torch.isfinite(tensor)
                    rows.update(bad.nonzero().flatten().tolist())
            if rows and len(rows) < trace.batch_size:
                return sorted(rows)
        return bad_rows(origin.detail, trace.batch_size)

    def _save_batch(self, folder: Path) -> None:
        trace = self._trace
        assert trace is not None  # noqa: S101
        tensors = [t.detach() for t in tensors_in(trace.batch)]
        size = sum(t.numel() * t.element_size() for t in tensors)
        if not tensors:
            return
        if size > _LIMIT:
            self._facts.notes.append(f"the batch of {size >> 20} MiB was too large to be saved")
            return
        _save({"batch": tensors}, folder / "batch.pt")

    def _ended(self) -> None:
        self._send(Outcome(error=f"the script ended before step {self._task.target}"))

    def _failed(self, kind: type[BaseException], error: BaseException, where: Any) -> None:
        last = traceback.format_exception_only(kind, error)[-1].strip()
        self._send(Outcome(error=last[:500]))

    def _send(self, outcome: Outcome) -> None:
        if not self._answered and self._task.answer is not None:
            self._answered = True
            with contextlib.suppress(OSError):
                self._task.answer.send(outcome)
                self._task.answer.close()
        os._exit(0)


class _Batches:
    """The batches of a loader, in a replay."""

    def __init__(self, replay: Replay, batches: Iterator[Any]) -> None:
        self._replay = replay
        self._batches = batches
        choose: Any = getattr(batches, "_next_index", None)
        if choose is not None:
            batches._next_index = self._choosing(choose)  # type: ignore[attr-defined]

    def _choosing(self, choose: Callable[[], Any]) -> Callable[[], Any]:
        """Returns what chooses the samples of the next batch, and remembers which they are."""

        def chosen() -> Any:
            indices = choose()
            if isinstance(indices, list) and all(isinstance(index, int) for index in indices):
                self._replay.indices = indices
            return indices

        return chosen

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)  # type: ignore[arg-type]

    def __next__(self) -> Any:
        trace = self._replay._trace
        if trace is None:
            return next(self._batches)
        trace.in_data += 1
        try:
            batch = next(self._batches)
        finally:
            trace.in_data -= 1
        trace.batch = batch
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _scale_of(scaler: Any) -> float | None:
    if scaler is None:
        return None
    with contextlib.suppress(AttributeError, RuntimeError):
        return float(scaler.get_scale())
    return None


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields the frames of the user's code, the nearest first."""
    frame = users_frame(frame)
    while frame is not None:
        yield frame
        frame = users_frame(frame.f_back)
