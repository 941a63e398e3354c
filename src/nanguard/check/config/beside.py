"""Which files belong to a run's file, by name or by where they lie."""

from __future__ import annotations

from pathlib import PurePath

_NEAR = 2


def referred(path: str, references: list[str], candidates: list[str]) -> str | None:
    """Returns the candidate that a run's file names; None if it names none of them.

    Args:
        path: The run's file.
        references: The names it gives.
        candidates: The files there are.
    """
    for reference in references:
        wanted = PurePath(reference.replace("\\", "/"))
        named = [c for c in candidates if PurePath(c).name == wanted.name]
        if named:
            return min(named, key=lambda candidate: _steps(path, candidate))
    return None


def beside(path: str, candidates: list[str], runs: list[str]) -> str | None:
    """Returns the one candidate that lies nearest to a run's file.

    Where several lie equally near nothing says which one is meant. The same holds where the
    candidate lies among many runs, as in a folder of examples.

    Args:
        path: The run's file.
        candidates: The files there are.
        runs: The files of all runs.
    """
    if not candidates:
        return None
    steps = {candidate: _steps(path, candidate) for candidate in candidates}
    nearest = min(steps.values())
    found = [candidate for candidate, count in steps.items() if count == nearest]
    if len(found) != 1 or nearest > _NEAR or len(candidates) > 2 or len(runs) > 4:
        return None
    return found[0]


def _steps(path: str, other: str) -> int:
    """Returns how many folders lie on the way from one file to another."""
    here, there = PurePath(path).parent.parts, PurePath(other).parent.parts
    common = 0
    while common < min(len(here), len(there)) and here[common] == there[common]:
        common += 1
    return len(here) + len(there) - 2 * common
