"""The data that configurations point to: each file once, with what all of them expect of it."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.data.pointing import from_config

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nanguard.check.config.run import RunConfig
    from nanguard.check.data.dataset import Request
    from nanguard.check.scanning import Expected


def requests_of(runs: Iterable[RunConfig], found: Sequence[str]) -> list[Request]:
    """Returns the data that runs point to.

    Args:
        runs: The runs.
        found: The data files that were found anyhow; they keep the names they have there.
    """
    names = {os.path.realpath(path): Path(path) for path in found}
    merged: dict[frozenset[Path], Request] = {}
    taken: set[Path] = set()
    for run in runs:
        for request in from_config(run):
            paths = tuple(dict.fromkeys(_named(path, names) for path in request.paths))
            key = frozenset(paths)
            if key in merged:
                merged[key] = _merged(merged[key], request)
                continue
            left = tuple(path for path in paths if path not in taken)
            taken.update(left)
            if left or request.missing:
                merged[key] = replace(request, paths=left)
    return list(merged.values())


def _named(path: Path, names: dict[str, Path]) -> Path:
    known = names.get(os.path.realpath(path))
    return known if known is not None else Path(os.path.normpath(path))


def _merged(one: Request, other: Request) -> Request:
    """Returns what two runs expect of the same data: of two limits, the wider one."""
    return replace(
        one,
        expected=_wider(one.expected, other.expected),
        measured=one.measured or other.measured,
        missing=tuple(dict.fromkeys((*one.missing, *other.missing))),
    )


def _wider(one: Expected, other: Expected) -> Expected:
    groups = {name: max(one.groups.get(name, 0), n) for name, n in other.groups.items()}
    return replace(
        one,
        label_key=one.label_key or other.label_key,
        classes=max(filter(None, (one.classes, other.classes)), default=None),
        groups={**one.groups, **groups},
        group_key=one.group_key or other.group_key,
        vocabulary=max(filter(None, (one.vocabulary, other.vocabulary)), default=None),
        ignored=tuple(dict.fromkeys((*one.ignored, *other.ignored))),
    )
