"""Data that came in bad: made once more, so that the line is found that made it so."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from nanguard.numerics import all_finite, is_float
from nanguard.replay import changes
from nanguard.replay.sandbox import Outside
from nanguard.replay.tracer.modules import tensors_in
from nanguard.replay.tracer.origin import origin_of, producers
from nanguard.replay.tracer.sites import is_users, place_of, users_frame
from nanguard.replay.tracer.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nanguard.guard.rng import RandomStreams
    from nanguard.replay.task import ReplayOutcome
    from nanguard.replay.tracer.origin import Origin
    from nanguard.replay.tracer.sites import Place

    # The iterator of a loader, a batch of it, and which samples of the data set are in the batch.
    Drawn = tuple[Any, Any, list[int]]


def data_origin(
    outcome: ReplayOutcome, drawn: Iterable[Drawn], streams: RandomStreams
) -> Drawn | None:
    """Looks for the line that made a batch bad, if that is where the bad value came from.

    The main process draws the indices of every batch, also for the workers of a loader, so a bad
    sample can be made again here. What a stream has given, or a worker's own random numbers have
    made, cannot.

    Args:
        outcome: What the replay of the step showed. Its origin is replaced if a better one is
            found.
        drawn: The last batches of the loaders.
        streams: Puts the random streams back afterwards.

    Returns:
        The batch, if it can be made again; None otherwise.
    """
    if outcome.origin is None or outcome.origin.op != "input":
        return None
    for own, batch, indices in reversed(list(drawn)):
        if not _is_bad(batch):
            continue
        outcome.facts.came_in = True
        if not indices or own._dataset_kind != _DatasetKind.Map:
            return None
        now = streams.capture()
        try:
            found = _made_again(own, indices, outcome.origin.step)
            if found is not None and found.detail is None:
                # A device says more about an operation once it is known which one.
                streams.restore(now)
                found = _made_again(own, indices, outcome.origin.step, found.index) or found
        finally:
            streams.restore(now)
        if found is not None:
            outcome.origin = found
        outcome.facts.indices = outcome.facts.indices or _bad_indices(batch, indices)
        return (own, batch, indices) if found is not None else None
    return None


def made_anew(drawn: Drawn, names: dict[str, Any], again: list[Any]) -> None:
    """Puts a batch that is made again in the place of the old one, among names and batches.

    Args:
        drawn: The batch, as it was handed out.
        names: What a replay begins with.
        again: The batches that loaders hand out once more.
    """
    own, batch, indices = drawn
    fresh = _fetched(own, indices)
    pairs = list(zip(tensors_in(batch), tensors_in(fresh), strict=False))

    def replaced(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next((new.to(value.device) for old, new in pairs if _is_same(old, value)), value)
        if type(value) in (list, tuple):
            return type(value)(map(replaced, value))
        if type(value) is dict:
            return {key: replaced(inner) for key, inner in value.items()}
        return value

    names.update({name: replaced(value) for name, value in names.items()})
    again[:] = [fresh if given is batch else given for given in again]


def _is_same(tensor: Any, other: Any) -> bool:
    if tensor is other:
        return True
    same = tensor.shape == other.shape and tensor.dtype == other.dtype and tensor.dim() > 0
    return same and torch.equal(tensor.nan_to_num(), other.to(tensor.device).nan_to_num())


def _made_again(
    own: Any, indices: list[int], step: int, look_at: int | None = None
) -> Origin | None:
    trace = Trace(look_at=look_at)
    trace.step = step
    trace.in_data = 1
    with Outside(), changes.quiet():
        trace.start()
        try:
            batch = _fetched(own, indices)
        except Exception:  # noqa: BLE001 - the script's own code, run in another place than usual
            return None
        finally:
            trace.stop()
        trace.resolve()
        tensors = [t for t in tensors_in(batch) if is_float(t) and not all_finite([t])]
        writers = [writer for t in tensors if (writer := trace.writer(t)) is not None]
        made = producers([writer for writer in writers if writer.bad])
        if not made or made[0].place is None:
            return None
        here = users_frame(sys._getframe(1))
        if here is not None and made[0].place == place_of(here):
            # Torch saw it first when it put the batch together; it was bad when it was handed out.
            made[0].place = _handed_out_at(own._dataset)
            if made[0].place is None:
                return None
        origin = origin_of(made[0], trace, sink="loss")
        origin.phase, origin.module = "data", "input"
        return origin


def _handed_out_at(data: Any) -> Place | None:
    """Returns where a data set hands out its samples; None if that is not the user's code."""
    code = getattr(type(data).__getitem__, "__code__", None)
    if code is None or not is_users(code.co_filename):
        return None
    lines = [line for _, _, line in code.co_lines() if line]
    return code, len(code.co_code) - 2, max(lines)


def _fetched(own: Any, indices: list[int]) -> Any:
    """Returns a batch as a loader makes it."""
    data = own._dataset
    if not own._auto_collation:
        return own._collate_fn(data[indices])
    several = getattr(data, "__getitems__", None)
    items = several(indices) if callable(several) else [data[index] for index in indices]
    return own._collate_fn(items)


def _is_bad(batch: Any) -> bool:
    return not all_finite(t for t in tensors_in(batch) if is_float(t))


def _bad_indices(batch: Any, indices: list[int]) -> list[int]:
    """Returns which samples of the data set are bad, if not all of a batch are."""
    rows: set[int] = set()
    for tensor in tensors_in(batch):
        if tensor.dim() and is_float(tensor) and tensor.shape[0] == len(indices):
            bad = ~torch.isfinite(tensor).reshape(len(indices), -1).all(1)
            rows.update(bad.nonzero().flatten().tolist())
    return [indices[row] for row in sorted(rows)] if len(rows) < len(indices) else []
