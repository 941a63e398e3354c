"""Data that came in bad: the samples of a batch made once more, to see what made them so.

The main process knows the indices of every batch, so a bad sample can be made again here. What
torch computes for it is traced. What numpy computes is no operation of torch's, so the lines of the
script's functions are followed, too.
"""

from __future__ import annotations

import ast
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data.dataloader import _DatasetKind

from nanguard.guard.rng import RandomStreams
from nanguard.numerics import all_finite, is_float
from nanguard.replay import changes
from nanguard.replay.live_names import own_nodes
from nanguard.replay.made_before import same_values
from nanguard.replay.python_state import Reachable
from nanguard.replay.region import NoRegionError, owner_of, source_of
from nanguard.replay.sandbox import Outside
from nanguard.replay.start import generators_in
from nanguard.replay.tracer.modules import tensors_in
from nanguard.replay.tracer.origin import origin_of, producers
from nanguard.replay.tracer.sites import Site, is_installed, is_users, place_of, users_frame
from nanguard.replay.tracer.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import FrameType

    from torch import Tensor

    from nanguard.replay.task import ReplayOutcome
    from nanguard.replay.tracer.origin import Origin
    from nanguard.replay.tracer.sites import Place

    Drawn = tuple[Any, Any, list[int]]

# Lines of a data set's functions that are followed for one batch, and elements of an array that are
# looked at after each of them.
_MOST_LINES, _LARGEST_ARRAY = 1 << 14, 1 << 22
# Data sets that take their samples from one another.
_NESTED = 6


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
        if own._dataset_kind == _DatasetKind.Iterable:
            outcome.origin.site = _yielded_at(own._dataset) or outcome.origin.site
            return None
        if not indices:
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
            return next(
                (new.to(value.device) for old, new in pairs if _has_values_of(old, value)), value
            )
        if type(value) in (list, tuple):
            return type(value)(map(replaced, value))
        if type(value) is dict:
            return {key: replaced(inner) for key, inner in value.items()}
        return value

    names.update({name: replaced(value) for name, value in names.items()})
    again[:] = [fresh if given is batch else given for given in again]


def _has_values_of(tensor: Any, other: Any) -> bool:
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
            with FirstBadLine() as first:
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
        by_numpy = first.place is not None and made[0].op in _TAKEN_IN
        if by_numpy:
            made[0].place = first.place
        origin = origin_of(made[0], trace, sink="loss")
        origin.phase, origin.module, origin.by_numpy = "data", "input", by_numpy
        return origin


# How torch takes in what was made without it.
_TAKEN_IN = ("input", "aten.lift_fresh", "aten.lift", "aten._to_copy", "aten.copy_")


class FirstBadLine:
    """Follows the script's functions to the first line that computes a bad number without torch.

    Attributes:
        place: The line; None if there is none, or if what it reads was bad already.
    """

    def __init__(self) -> None:
        self.place: Place | None = None
        self._left = _MOST_LINES

    def __enter__(self) -> FirstBadLine:
        self._is_on = sys.gettrace() is None and "numpy" in sys.modules  # a debugger has its own
        if self._is_on:
            sys.settrace(self._called)
        return self

    def __exit__(self, *_error: object) -> None:
        if self._is_on:
            sys.settrace(None)

    def _called(self, frame: FrameType, _event: str, _given: Any) -> Any:
        path = frame.f_code.co_filename
        if self._left <= 0 or not is_users(path) or is_installed(path):
            return None
        before, line, at = dict(frame.f_locals), 0, 0
        if any(map(_is_bad_number, before.values())):
            self._left = 0

        def follow(frame: FrameType, event: str, given: Any) -> Any:
            nonlocal before, line, at
            if self._left <= 0 or event == "exception":
                return None
            self._left -= 1
            names = dict(frame.f_locals)
            if line and any(map(_is_bad_number, (*names.values(), given))):
                self._left = 0
                statement = _simple_statement(frame, line)
                if statement is not None and _computes(statement, before, frame.f_globals):
                    self.place = frame.f_code, at, line
                return None
            before, line, at = names, frame.f_lineno or 0, frame.f_lasti
            return follow

        return follow


def _is_bad_number(value: Any) -> bool:
    """Returns whether an array, or a number of numpy's, is not finite; of Python's, whether NaN."""
    if type(value) is float:
        return value != value
    numpy = sys.modules["numpy"]
    if not isinstance(value, (numpy.ndarray, numpy.floating)):
        return False
    return (
        value.dtype.kind in "fc"
        and value.size <= _LARGEST_ARRAY
        and not numpy.isfinite(value).all()
    )


def _simple_statement(frame: FrameType, line: int) -> ast.stmt | None:
    try:
        body = owner_of(source_of(frame.f_code, frame.f_globals).tree, frame.f_code).body
    except NoRegionError:
        return None
    kinds = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
    among = (node for node in own_nodes(body) if isinstance(node, kinds))
    return next((n for n in among if n.lineno <= line <= (n.end_lineno or line)), None)


def _computes(statement: ast.stmt, names: Mapping[str, Any], module: Mapping[str, Any]) -> bool:
    """Returns whether a statement does arithmetic, and what it does that with is finite."""
    arithmetic = isinstance(statement, ast.AugAssign)
    for node in ast.walk(statement):
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            if _is_bad_number(_kept_in(node, names, module)):
                return False
        elif isinstance(node, ast.Call):
            parts = [
                *node.args,
                *([node.func.value] if isinstance(node.func, ast.Attribute) else ()),
            ]
            values = [_kept_in(part, names, module) for part in parts]
            arithmetic = arithmetic or any(type(v).__module__ == "numpy" for v in values)
        arithmetic = arithmetic or isinstance(node, ast.BinOp)
    return arithmetic


def _kept_in(node: ast.AST, names: Mapping[str, Any], module: Mapping[str, Any]) -> Any:
    """Returns what a chain of names, attributes and indices stands for; None if code would run."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id, module.get(node.id))
    if isinstance(node, ast.Attribute):
        owner = _kept_in(node.value, names, module)
        return getattr(owner, "__dict__", {}).get(node.attr)
    if isinstance(node, ast.Subscript):
        kept, index = (_kept_in(part, names, module) for part in (node.value, node.slice))
        if type(kept) in (list, tuple, dict, sys.modules["numpy"].ndarray):
            try:
                return kept[index]
            except (LookupError, TypeError, ValueError):
                return None
    return None


def _handed_out_at(data: Any) -> Place | None:
    """Returns where a data set hands out its samples; None if that is not the user's code."""
    code = getattr(type(data).__getitem__, "__code__", None)
    if code is None or not is_users(code.co_filename):
        return None
    lines = [line for _, _, line in code.co_lines() if line]
    return code, len(code.co_code) - 2, max(lines)


def _yielded_at(data: Any) -> Site | None:
    """Returns where a stream hands out its samples; None if that is not one line of the user's.

    The sample cannot be had again, but it was made there, and not where a model takes it in.
    """
    walk = type(data).__iter__
    code = getattr(walk, "__code__", None)
    if code is None or not is_users(code.co_filename) or is_installed(code.co_filename):
        return None
    try:
        body = owner_of(source_of(code, walk.__globals__).tree, code).body
    except NoRegionError:
        return None
    lines = {
        node.lineno for node in own_nodes(body) if isinstance(node, (ast.Yield, ast.YieldFrom))
    }
    return Site(code.co_filename, lines.pop(), code.co_name) if len(lines) == 1 else None


def same_again(drawn: Iterable[Drawn], places: set[int], streams: RandomStreams) -> set[int]:
    """Returns which samples are the same whenever they are read.

    Those that a random augmentation makes anew each time are not: what was wrong with one of them
    may never come again. Neither is one that cannot be read a second time.

    Args:
        drawn: The last batches of the loaders.
        places: The samples, by their places in the data sets of these loaders.
        streams: Puts the random streams back afterwards.
    """
    found: set[int] = set()
    for own, batch, indices in drawn:
        rows = [row for row, index in enumerate(indices) if index in places]
        if not rows or own._dataset_kind == _DatasetKind.Iterable:
            continue
        one, *others = [list(tensors_in(each)) for each in _read_twice(own, indices, streams)]
        given = list(tensors_in(batch))
        if not any(tensor.is_inference() or tensor._version for tensor in given):
            others.append(given)  # the script has not changed it in place
        for row in rows if one else ():
            if all(_has_same_row(one, other, row, len(indices)) for other in others):
                found.add(indices[row])
    return found


def _read_twice(own: Any, indices: list[int], streams: RandomStreams) -> list[Any]:
    """Returns a batch as it is read now, and once more; an empty one if that is not possible."""
    reachable = Reachable(map(vars, _nested(own._dataset)), [])
    own_streams = RandomStreams(
        streams.devices, [*streams.generators, *generators_in(_nested(own._dataset))]
    )
    now = own_streams.capture()
    try:
        with Outside(), changes.quiet():
            return [_fetched(own, indices), _fetched(own, indices)]
    except Exception:  # noqa: BLE001 - the script's own code, run in another place than usual
        return [()]
    finally:
        reachable.put_back()
        own_streams.restore(now)


def _nested(data: Any) -> list[Any]:
    """Returns a data set and those that it takes its samples from, one in the other."""
    found: list[Any] = []
    while hasattr(data, "__dict__") and len(found) < _NESTED:
        found.append(data)
        data = getattr(data, "dataset", None)
    return found


def _has_same_row(one: list[Tensor], other: list[Tensor], row: int, size: int) -> bool:
    """Returns whether a sample is the same in two batches; what is not by sample counts whole."""
    if len(one) != len(other):
        return False
    pairs = [
        (a[row], b[row]) if a.dim() and b.dim() and len(a) == len(b) == size else (a, b)
        for a, b in zip(one, other, strict=True)
    ]
    return all(same_values(a, b) for a, b in pairs)


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
