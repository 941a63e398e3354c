"""Values that were made before the step and kept since: made once more, to see what made them bad.

A table of weights, a noise schedule, statistics of the data: computed once, bad from then on, and
used hours later; or what a rollout has collected since the last step. The operations are over, but
the code that made the value is there: the constructor of the object that holds it, or the
assignment to the name that stands for it. What is made again has to be what is there, bit for bit.
The items of a batch that came in bad are made once more in the same way.
"""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data.dataloader import _DatasetKind

from nanguard.guard.rng import RandomStreams
from nanguard.numerics import all_finite, is_float
from nanguard.replay import changes
from nanguard.replay.live_names import own_nodes
from nanguard.replay.python_state import Reachable
from nanguard.replay.region import NoRegionError, owner_of, source_of
from nanguard.replay.sandbox import Outside
from nanguard.replay.start import generators_in, is_plain_object, script_values
from nanguard.replay.tracer.modules import all_modules, tensors_in
from nanguard.replay.tracer.origin import origin_of, producers
from nanguard.replay.tracer.sites import (
    Site,
    is_installed,
    is_part_of_script,
    is_users,
    place_of,
    users_frame,
)
from nanguard.replay.tracer.trace import Trace

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import FrameType

    from torch import Tensor

    from nanguard.replay.task import ReplayOutcome
    from nanguard.replay.tracer.op_records import Record
    from nanguard.replay.tracer.origin import Origin
    from nanguard.replay.tracer.sites import Place

    Maker = Callable[[Mapping[str, str]], Tensor | None]

    Drawn = tuple[Any, Any, list[int]]

# How many assignments a value is followed back through.
_DEPTH = 6
# Parameters of an object that is made once more, in elements: making it takes its time and memory.
_LARGEST = 1 << 23


@dataclass
class Table:
    """A value that was made before the step, and how it is made.

    Attributes:
        tensor: The value.
        name: What the script calls it.
        make: Makes it again.
        origin: What made it bad.
    """

    tensor: Tensor
    name: str
    make: Maker
    origin: Origin

    def put_changed(self, texts: Mapping[str, str], stack: contextlib.ExitStack) -> None:
        """Puts what changed code makes in the place of the value, until a stack is left."""
        fresh = self.make(texts)
        if fresh is None or fresh.shape != self.tensor.shape:
            return
        before, version = self.tensor.detach().clone(), self.tensor._version

        def put_back() -> None:
            self.tensor.data.copy_(before)
            changes.set_version(self.tensor, version)

        stack.callback(put_back)
        self.tensor.data.copy_(fresh.detach())


def find_table(
    origin: Origin,
    trace: Trace,
    streams: RandomStreams,
    moments: Sequence[dict[str, Any]],
    known: Table | None,
) -> Table | None:
    """Returns the table that a bad value came from, if it can be made again as it is.

    Args:
        origin: Where the bad value was first seen in the step, which was given it; or where an
            infinity came in that may have been meant, and made the loss infinite.
        trace: The trace of the step.
        streams: Puts back the random streams.
        moments: The random streams that it may have been made with.
        known: The table that was found last: several steps may be made with it.
    """
    given = _given(origin, trace)
    for name, tensor, make in _holders(given, trace):
        if known is not None and known.tensor is tensor:
            return known
        for moment in moments:
            make_then = _made_at(make, streams, moment)
            found = _traced(tensor, make_then, origin.step)
            if found is not None and not found.intended:  # a mask is meant to be infinite
                found.table = name
                return Table(tensor, name, make_then, found)
    return None


def _made_at(make: Maker, streams: RandomStreams, moment: dict[str, Any]) -> Maker:
    """Returns what makes a value with the random streams of some moment."""

    def make_then(texts: Mapping[str, str]) -> Tensor | None:
        now = streams.capture()
        streams.restore(moment)
        try:
            return make(texts)
        finally:
            streams.restore(now)

    return make_then


def entered_at(origin: Origin, trace: Trace) -> Site | None:
    """Returns where the script's loop takes in a bad value, which a function elsewhere first uses.

    That says more than the place where a model first computes with it. None if no assignment takes
    it in, or if what first uses the value is called by that assignment, and so is part of it.
    """
    if origin.site is None:
        return None
    used = (origin.site.file, origin.site.function)
    is_meant = _is_what_came_in({origin.index}, trace)
    within = {(caller.file, caller.function, caller.line) for caller in origin.callers}
    for frame in _users_frames():
        for name, value in list(frame.f_locals.items()):
            site = _Assigned(name, frame).site() if is_meant(value) else None
            if site is not None:
                here = (site.file, site.function)
                return None if here == used or (*here, site.line) in within else site
    return None


def _given(origin: Origin, trace: Trace) -> set[int]:
    """Returns which operations took in the bad values that a step was given."""
    if not origin.intended:
        return {origin.index}
    todo = [record for record in trace.bad if record.index == origin.index]
    seen: set[int] = set()
    given: set[int] = set()
    while todo:
        record = todo.pop()
        if id(record) not in seen:
            seen.add(id(record))
            todo += record.bad_writers
            if record.is_source:
                given.add(record.index)
    return given


def _is_what_came_in(given: set[int], trace: Trace) -> Callable[[object], bool]:
    def is_meant(value: object) -> bool:
        if not isinstance(value, torch.Tensor) or not is_float(value) or value.is_meta:
            return False
        writer = trace.writer(value)
        return writer is not None and writer.index in given and not all_finite([value])

    return is_meant


def _users_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename) and not is_installed(frame.f_code.co_filename):
            yield frame
        frame = frame.f_back


def _holders(given: set[int], trace: Trace) -> Iterator[tuple[str, Tensor, Maker]]:
    """Yields what a value is called, the value, and what makes it again."""
    is_meant = _is_what_came_in(given, trace)
    objects: dict[int, Any] = {id(m): m for m in all_modules() if is_part_of_script(_home(m))}
    for frame in _users_frames():
        named = {n: v for n, v in list(frame.f_locals.items()) if is_meant(v)}
        for word, tensor in named.items():
            yield word, tensor, _Assigned(word, frame)
        objects |= {id(o): o for o in script_values(frame) if is_plain_object(o)}
    for owner in objects.values():
        kept = dict(vars(owner))
        if isinstance(owner, nn.Module):
            kept.update(owner._buffers)
        for word, value in kept.items():
            if is_meant(value):
                yield f"{type(owner).__name__}.{word}", value, _Constructed(owner, word)


def _home(model: nn.Module) -> Any:
    return sys.modules.get(type(model).__module__)


class _Constructed:
    """An attribute that the constructor of its object makes."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def __call__(self, _texts: Mapping[str, str]) -> Tensor | None:
        """Returns the attribute of an object that is made once more; None if it cannot be."""
        owner = self._owner
        if isinstance(owner, nn.Module):
            size = sum(parameter.numel() for parameter in owner.parameters())
            if size > _LARGEST:
                return None
        given: dict[str, Any] = {}
        for name, parameter in list(inspect.signature(type(owner).__init__).parameters.items())[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            known = vars(owner).get(name, vars(owner).get(f"_{name}", parameter.default))
            if known is inspect.Parameter.empty:
                return None
            given[name] = known
        fresh = getattr(type(owner)(**given), self._name, None)
        return fresh if isinstance(fresh, torch.Tensor) else None


class _Assigned:
    """A variable, and the assignment that it has its value from."""

    def __init__(self, name: str, frame: FrameType) -> None:
        self._name = name
        self._code, self._line = frame.f_code, frame.f_lineno or 0
        self._globals = frame.f_globals
        self._names = dict(frame.f_locals)

    def __call__(self, texts: Mapping[str, str]) -> Tensor | None:
        """Returns what the assignment makes now; None if there is none."""
        fresh = self._made(self._name, texts, _DEPTH)
        return fresh if isinstance(fresh, torch.Tensor) else None

    def site(self) -> Site | None:
        """Returns where the assignment is; None if there is none."""
        statement = self._statement(self._name, {})
        if statement is None:
            return None
        return Site(self._code.co_filename, statement.lineno, self._code.co_name)

    def _made(self, name: str, texts: Mapping[str, str], depth: int) -> Any:
        """Makes a variable again, with those that it is made of and that are bad, too."""
        statement = self._statement(name, texts)
        if statement is None or depth == 0:
            return self._names.get(name)
        names = {**self._globals, **self._names}
        for node in ast.walk(statement):
            if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
                continue
            value = self._names.get(node.id)
            bad = isinstance(value, torch.Tensor) and is_float(value) and not all_finite([value])
            if bad and node.id != name:
                names[node.id] = self._made(node.id, texts, depth - 1)
        path = self._code.co_filename
        exec(compile(ast.Module([statement], []), path, "exec"), names)  # noqa: S102 - the user's own
        return names.get(name)

    def _statement(self, name: str, texts: Mapping[str, str]) -> ast.stmt | None:
        """Returns the last assignment to a variable before the line that its frame is on."""
        try:
            source = source_of(self._code, self._globals)
        except NoRegionError:
            return None
        path = self._code.co_filename
        text = texts.get(path)
        tree = source.tree if text is None else ast.parse(text)
        first = self._code.co_firstlineno
        scope: list[ast.stmt] = tree.body
        if self._code.co_name != "<module>":
            found = [
                node
                for node in ast.walk(tree)
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                and node.name == self._code.co_name
                and min([node.lineno, *(d.lineno for d in node.decorator_list)]) == first
            ]
            if not found:
                return None
            scope = found[0].body
        made = [
            node
            for node in own_nodes(scope)
            if isinstance(node, (ast.Assign, ast.AnnAssign))
            and node.lineno < self._line
            and name in _targets(node)
        ]
        return max(made, key=lambda node: node.lineno, default=None)


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    every = [inner for target in targets for inner in ast.walk(target)]
    return {n.id for n in every if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _traced(tensor: Tensor, make: Maker, step: int, look_at: int | None = None) -> Origin | None:
    """Returns what makes a value bad when it is made again; None if another one comes out."""
    trace = Trace(look_at=look_at)
    trace.step = step
    trace.start()
    try:
        fresh = make({})
    except Exception:  # noqa: BLE001 - the script's own code, run in another place than usual
        return None
    finally:
        trace.stop()
    trace.resolve()
    if fresh is None or fresh is tensor or not _is_same(fresh, tensor):
        return None
    writer = trace.writer(fresh)
    made: list[Record] = producers([writer]) if writer is not None and writer.bad else []
    if not made or made[0].place is None or made[0].is_source:
        return None
    found = origin_of(made[0], trace, sink="loss")
    if found.detail is None and look_at is None:
        # A device says more about an operation once it is known which one.
        return _traced(tensor, make, step, found.index) or found
    return found


def _is_same(fresh: Tensor, tensor: Tensor) -> bool:
    """Returns whether two values are equal, bit for bit, wherever they are."""
    one, other = fresh.detach().cpu(), tensor.detach().cpu()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(torch.isfinite(one), torch.isfinite(other)) and torch.equal(
        torch.nan_to_num(one), torch.nan_to_num(other)
    )


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
    while hasattr(data, "__dict__") and len(found) < _DEPTH:
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
    return all(_is_same(a, b) for a, b in pairs)


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
