"""Values that were made before the step and kept since: made once more, to see what made them bad.

A table of weights, a noise schedule, statistics of the data: computed once, bad from then on, and
used hours later; or what a rollout has collected since the last step. The operations are over, but
the code that made the value is there: the constructor of the object that holds it, or the
assignment to the name that stands for it. What is made again has to be what is there, bit for bit.
"""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nanguard.numerics import all_finite, is_float
from nanguard.replay import changes
from nanguard.replay.live_names import own_nodes
from nanguard.replay.region import NoRegionError, source_of
from nanguard.replay.start import is_plain_object, script_values
from nanguard.replay.tracer.modules import all_modules
from nanguard.replay.tracer.origin import origin_of, producers
from nanguard.replay.tracer.sites import (
    Site,
    is_installed,
    is_part_of_script,
    is_users,
)
from nanguard.replay.tracer.trace import Trace

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from torch import Tensor

    from nanguard.guard.rng import RandomStreams
    from nanguard.replay.tracer.op_records import Record
    from nanguard.replay.tracer.origin import Origin

    Maker = Callable[[Mapping[str, str]], Tensor | None]


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
    if fresh is None or fresh is tensor or not same_values(fresh, tensor):
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


def same_values(fresh: Tensor, tensor: Tensor) -> bool:
    """Returns whether two values are equal, bit for bit, wherever they are."""
    one, other = fresh.detach().cpu(), tensor.detach().cpu()
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(torch.isfinite(one), torch.isfinite(other)) and torch.equal(
        torch.nan_to_num(one), torch.nan_to_num(other)
    )
