"""Makes sense of a traced step: where it began, which samples, and what to keep of it."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanguard.replay.tracer.modules import tensors_in
from nanguard.replay.tracer.origin import bad_rows, origin_of, producers, suspects
from nanguard.replay.tracer.path import path_of
from nanguard.replay.tracer.values import memory_of

if TYPE_CHECKING:
    from nanguard.guard.symptom import Symptom
    from nanguard.replay.replay import Replay
    from nanguard.replay.task import Outcome
    from nanguard.replay.tracer.origin import Origin
    from nanguard.replay.tracer.records import Record
    from nanguard.replay.tracer.trace import Trace

# Nobody else's: in a replay, torch.save writes somewhere else.
_save = torch.save
# Larger batches are not saved.
_LIMIT = 256 << 20
_SUSPECTS = 4


def read_trace(replay: Replay, outcome: Outcome) -> None:
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
    outcome.origin = origin_of(first, trace, sink=sink)
    facts.path = path_of(first, sinks, trace)
    facts.suspects = [(record.index, record.op) for record in suspects(trace, first)][:_SUSPECTS]
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
    try:
        # Nobody else's to read, from its first byte on.
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
        _save(saved, path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            path.unlink()
        return f"the batch could not be saved: {_why(error, folder)}"
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
