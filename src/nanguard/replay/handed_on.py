"""A step whose loss was made elsewhere, or in parts: by a generator, or over turns of its loop.

A generator is stopped at its ``yield`` while the loop that trains works with what it has handed on,
so no frame holds both passes. The region is that of the generator, and what the loop does with the
value is called where the generator would have stopped.

Where each turn of a loop adds to a loss, and one calls backward, what the last turn was given comes
from those before it. So what each of them began with is kept until the backward pass, with the
numbers that it has made. If the number that the last turn was given is bad already, it is the turn
that made it which is replayed, from its own start to its end.
"""

from __future__ import annotations

import ast
import inspect
from collections import deque
from typing import TYPE_CHECKING, Any

from nanguard.numerics import is_in_graph
from nanguard.replay.frames import let_go
from nanguard.replay.live_names import names_in, own_nodes
from nanguard.replay.region import NoRegionError, Region, line_range, owner_of, source_of
from nanguard.replay.start import Reader, bytes_of, kind_of, tensors_right_in
from nanguard.replay.tracer.sites import is_users

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from types import CodeType, FrameType

    from torch import Tensor

    from nanguard.replay.frames import Stack
    from nanguard.replay.region import Piece
    from nanguard.replay.start import Start, Taken
# Turns that are kept, and the bytes of what they were given.
_TURNS, _BYTES = 64, 256 << 20


def generator_below(frames: Stack, owner: FrameType) -> tuple[FrameType, int] | None:
    """Returns the innermost generator between a model's call and a frame, and its line.

    Args:
        frames: The stack of the model's call, innermost first.
        owner: The frame that the generator hands its values on to.
    """
    for frame, line in frames:
        if frame is owner:
            return None
        code = frame.f_code
        if code.co_flags & inspect.CO_GENERATOR and is_users(code.co_filename):
            return None if code.co_name == "<genexpr>" else (frame, line)
    return None


class HandedTo:
    """The code that a generator hands its values on to, from where it has got one.

    Attributes:
        code: Its code.
        piece: What follows on it.
    """

    def __init__(self, code: CodeType, target: ast.expr, piece: Piece) -> None:
        """Keeps the code.

        Args:
            code: The code that the piece is a part of.
            target: What it puts a value of the generator into.
            piece: What follows on that.
        """
        self.code, self._target, self.piece = code, target, piece
        self._reader = Reader([*piece.live, *names_in(target)], None)

    def take(self, frame: FrameType | None) -> Taking | None:
        """Returns what the code knows at its backward pass.

        Args:
            frame: The frame that calls backward.
        """
        frame = self._own(frame)
        if frame is None:
            return None
        local = frame.f_locals
        taken, cls = self._reader.take(local, frame.f_globals), local.get("__class__")
        let_go(frame, local)
        return Taking(self, taken, frame.f_globals, cls)

    def given_in(self, frame: FrameType | None) -> list[Any]:
        """Returns what it was given last.

        Args:
            frame: The frame of the generator, which it waits for.
        """
        frame = self._own(frame)
        if frame is None:
            return []
        local = frame.f_locals
        given = [local[name] for name in names_in(self._target) if name in local]
        let_go(frame, local)
        return given

    def _own(self, frame: FrameType | None) -> FrameType | None:
        while frame is not None and frame.f_code is not self.code:
            frame = frame.f_back
        return frame

    def bound(self, value: Any, names: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the names that a value is given, each with its part of it.

        Args:
            value: What the generator has handed on.
            names: What the names stood for in the run; they also say what does not come from the
                generator, as the numbers of ``enumerate`` do.

        Raises:
            NoRegionError: The value is not of the kind it was.
        """
        found = _fitted(self._target, value, names)
        if found is None:
            raise NoRegionError("the generator hands on something else than it did")
        return found


class Taking:
    """What the receiving code knew at one backward pass."""

    __slots__ = ("_cls", "_module", "_taken", "receiver")

    def __init__(self, receiver: HandedTo, taken: Taken, module: dict[str, Any], cls: Any) -> None:
        self.receiver = receiver
        self._taken, self._module, self._cls = taken, module, cls

    @property
    def names(self) -> dict[str, Any]:
        """The values of the names."""
        return self._taken.every()

    def resumed(
        self, spare: Callable[[Any], Any], seen: Callable[[dict[str, Any]], None]
    ) -> Callable[[Any], None]:
        """Returns what a replayed generator calls in the place of a ``yield``.

        Args:
            spare: Returns what is used in the place of what a replay must not use up.
            seen: Called with all names of the code when it ends.
        """
        names = {name: spare(value) for name, value in self.names.items()}

        def resume(value: Any) -> None:
            given = {**names, **self.receiver.bound(value, names)}
            self.receiver.piece.call(self._module, given, self._cls, seen)

        return resume


def handed_to(frame: FrameType, call: int, backward: int) -> HandedTo | None:
    """Returns the code that takes a value from a generator; None where it does more than that.

    Args:
        frame: Its frame.
        call: The line that takes the value: the head of a loop, or a line with ``next``.
        backward: The line of the backward pass.
    """
    code, module = frame.f_code, frame.f_globals
    owner = owner_of(source_of(code, module).tree, code)
    for node in own_nodes(owner.body):
        if isinstance(node, ast.For) and _is_header(node, call, backward):
            piece = Region(code, module, (node.body[0].lineno, backward)).whole()
            return HandedTo(code, node.target, piece)
        taken = _taken_by_next(node, call)
        rest = None if taken is None else Region(code, module, (call, backward)).after(call)
        if taken is not None and rest is not None:
            return HandedTo(code, taken, rest)
    return None


def noted(seen: dict[str, Any], value: Any) -> None:
    """Keeps what a generator hands on, where nobody knows what becomes of it."""
    parts = value if isinstance(value, (tuple, list)) else [value]
    seen.update({f"value {place} handed on": part for place, part in enumerate(parts)})


def _is_header(loop: ast.For, call: int, backward: int) -> bool:
    first, last = line_range(loop.body)
    return loop.lineno <= call < first <= backward <= last


def _taken_by_next(node: ast.AST, line: int) -> ast.expr | None:
    """Returns what ``next`` of something is assigned to on a line."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
        return None
    called = node.value.func
    name = getattr(called, "id", None) or getattr(called, "attr", None)
    here = node.lineno <= line <= (node.end_lineno or node.lineno)
    if here and name in ("next", "__next__", "send") and len(node.targets) == 1:
        return node.targets[0]
    return None


def _fitted(target: ast.expr, value: Any, names: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns how a target takes a value apart; None if the value is not of the kind it was."""
    if isinstance(target, ast.Name):
        same = type(names.get(target.id)) is type(value)
        return {target.id: value} if same else None
    if not isinstance(target, (ast.Tuple, ast.List)):
        return None
    if isinstance(value, (tuple, list)) and len(value) == len(target.elts):
        parts = [_fitted(t, v, names) for t, v in zip(target.elts, value, strict=True)]
        if None not in parts:
            return {name: v for part in parts if part for name, v in part.items()}
    # What a wrapper adds, such as ``enumerate``, is what it was.
    fits = (_fitted(part, value, names) for part in reversed(target.elts))
    return next((found for found in fits if found is not None), None)


class CarriedTurns:
    """The turns since the last backward pass whose graph goes on in the turn after them."""

    def __init__(self) -> None:
        self._kept: deque[Start] = deque(maxlen=_TURNS)

    def left(self, turn: Start, names: Mapping[str, Any], after: Start) -> bool:
        """Keeps a turn that was left before a backward pass, if what it has made is carried on.

        Args:
            turn: What it began with.
            names: The names of its code, as they were when it was left.
            after: What the next turn begins with.

        Returns:
            Whether it is carried on.
        """
        if not _holds_graphs(after):
            self._kept.clear()
            return False
        found = numbers_in(names, after.objects)
        turn.made = {place: number.detach().clone() for place, number in found.items()}
        turn.losses = list(turn.made.values())
        if turn.later is not None:
            turn.later.made, turn.later.losses = turn.made, turn.losses
        turn.let_go_of_graphs()
        size = bytes_of(list(turn.names.values()))
        while self._kept and size * (len(self._kept) + 1) > _BYTES:
            self._kept.popleft()
        if turn.made and size <= _BYTES:
            self._kept.append(turn)
        return True

    def end(self, start: Start) -> None:
        """Hands them over to the turn that calls backward, and begins anew."""
        if self._kept:
            start.turns = tuple(self._kept)
            self._kept.clear()


def likely_turns(starts: list[Start]) -> list[Start]:
    """Returns the turns that may have made what is bad: those with a bad number, or else all.

    Args:
        starts: What the passes of the bad step began with.
    """
    turns = list(dict.fromkeys(turn for start in starts for turn in start.turns))
    return [turn for turn in turns if _is_bad(turn)] or turns


def was_bad_before(start: Start) -> bool:
    """Returns whether a turn before the last one has made a number that is bad."""
    return any(map(_is_bad, start.turns))


def _is_bad(turn: Start) -> bool:
    return any(not number.isfinite() for number in turn.losses)


def numbers_in(
    names: Mapping[str, Any], objects: Sequence[tuple[Any, Mapping[str, Any]]]
) -> dict[str, Tensor]:
    """Returns the single numbers that a graph leads to, by where they are.

    That is among some names, among the attributes of objects, and at the end of a list there.

    Args:
        names: The names.
        objects: The objects, each with what its attributes were at some time.
    """
    places = dict(names)
    for number, (owner, _) in enumerate(objects):
        places.update({f"{number}.{name}": value for name, value in vars(owner).items()})
    found = {}
    for place, value in places.items():
        last = value[-1] if type(value) is list and value else value
        if is_in_graph(last) and last.numel() == 1 and last.is_floating_point():
            found[place] = last
    return found


def _holds_graphs(start: Start) -> bool:
    """Returns whether a turn is given something that a graph leads to."""
    given = [start.names, *(attributes for _, attributes in start.objects)]
    for value in (value for names in given for value in names.values()):
        several = tensors_right_in(value) if kind_of(value) in ("mapping", "sequence") else [value]
        if any(map(is_in_graph, several)):
            return True
    return False
