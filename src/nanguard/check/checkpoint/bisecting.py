"""Runs with hundreds of checkpoints: the first bad one is searched, not read up to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nanguard.check.checkpoint.checkpoint import Checkpoint
    from nanguard.check.checkpoint.units import Unit

    Read = Callable[[Sequence[Unit], bool], list[Checkpoint]]

# How many checkpoints are read only to see whether bad ones really come after good ones.
WITNESSES = 6


def read_run_in_part(units: Sequence[Unit], read: Read) -> list[Checkpoint]:
    """Reads the checkpoints that tell from which one on a run is bad.

    Numbers that are not finite stay: once a checkpoint has them, every later one does. So the
    first bad one is found by halving. That the run is of this kind is not taken for granted: some
    more checkpoints are read, and all of them if one of those does not fit. What files say about
    themselves is read of every checkpoint.

    Args:
        units: The checkpoints, oldest first.
        read: Reads some of them, with or without their numbers.
    """
    found = read(units, False)  # noqa: FBT003
    whole = [index for index, one in enumerate(found) if not one.damaged]
    bad: dict[int, bool] = {}

    def is_bad(at: int) -> bool:
        if at not in bad:
            (found[whole[at]],) = read([units[whole[at]]], True)  # noqa: FBT003
            bad[at] = not found[whole[at]].good
        return bad[at]

    low, high = 0, len(whole)  # below low all are good; from high on all are bad
    if whole and not is_bad(len(whole) - 1):
        low = high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(middle) else (middle + 1, high)
    witnesses = {len(whole) * n // WITNESSES for n in range(WITNESSES)} if whole else set()
    if any(is_bad(at) != (at >= low) for at in sorted(witnesses)):
        for at in range(len(whole)):
            is_bad(at)
    return found
