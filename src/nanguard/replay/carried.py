"""A step that is made over several turns of its loop: each adds to a loss, and one calls backward.

What the last turn was given comes from the turns before it. So what each of them began with is kept
until the backward pass, with the numbers that it has made. If the number that the last turn was
given is bad already, it is the turn that made it which is replayed, from its own start to its end.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from nanguard.numerics import is_in_graph
from nanguard.replay.start import bytes_of, kind_of, tensors_right_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from nanguard.replay.start import Start

# Turns that are kept, and the bytes of what they were given.
_TURNS, _BYTES = 64, 256 << 20


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
