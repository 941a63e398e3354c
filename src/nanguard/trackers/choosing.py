"""Which trackers a run writes to: what was asked for, and whether it is installed."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.errors import MissingDependencyError, UsageError
from nanguard.trackers.tracker import TrackedPlace
from nanguard.trackers.writing import Trackers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nanguard.trackers.tracker import Tracker

# Names of trackers with commas between them, and their folder: for the processes below
# `nanguard run`, and for whoever cannot change the code.
TRACK = "NANGUARD_TRACK"
TRACK_DIR = "NANGUARD_TRACK_DIR"
# The module and the class of each tracker, and the package it cannot do without.
_KNOWN = {
    "tensorboard": ("TensorBoard", "tensorboard"),
    "wandb": ("WandB", "wandb"),
    "trackio": ("Trackio", "trackio"),
    "mlflow": ("MLflow", "mlflow"),
}

# Whether this process only replays what another one has done.
_replays = False


def be_silent() -> None:
    """Lets nothing in this process track anything, as it replays what was tracked already."""
    global _replays
    _replays = True


def check_names(names: Sequence[str], where: str) -> tuple[str, ...]:
    """Returns the names of trackers, each of which is known and installed.

    Args:
        names: What was asked for.
        where: Who asked.

    Raises:
        UsageError: A name is unknown.
        MissingDependencyError: A package is not installed.
    """
    given = (names,) if isinstance(names, str) else names
    for name in given:
        if name not in _KNOWN:
            raise UsageError(
                f"there is no tracker called {name!r}.",
                where=where,
                do=f"Give one of {', '.join(_KNOWN)}.",
            )
        package = _KNOWN[name][1]
        # A package that is imported already need not be looked for.
        if sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
            missing = ModuleNotFoundError(name=package)
            raise MissingDependencyError.of(f"the tracker {name}", missing, extra="trackers")
    return tuple(dict.fromkeys(given))


def trackers_for(
    names: Sequence[str] | None,
    folder: Path | None,
    *,
    where: str,
    on_failure: Callable[[str], None],
    at_exit: Callable[[], None] | None = None,
) -> Trackers | None:
    """Returns the trackers of a run; None if it has none.

    The libraries are imported here: an import in a thread of its own could be cut in two by a
    copy of the process that is made meanwhile.

    Args:
        names: What was asked for; None for what the environment asks for.
        folder: Where files go if nothing else is said.
        where: Who asked.
        on_failure: Told once for each tracker that fails.
        at_exit: Called when the interpreter ends.

    Raises:
        UsageError: A name is unknown.
        MissingDependencyError: A package is not installed, or cannot be imported.
    """
    if _replays:
        return None
    if names is None:
        names = [name for name in os.environ.get(TRACK, "").split(",") if name]
        where = TRACK if names else where
    chosen = check_names(names, where)
    if not chosen:
        return None
    stamp = time.strftime("%Y%m%d-%H%M%S")
    given = os.environ.get(TRACK_DIR)
    if given:
        folder = Path(given)
    elif folder is None:
        folder = Path(".nanguard/trackers") / stamp
    place = TrackedPlace(
        folder.absolute(), f"{folder.absolute().parent.name}-{stamp}-{os.getpid()}"
    )
    made = [_made(name, place) for name in chosen]
    return Trackers(made, on_failure=on_failure, at_exit=at_exit)


def _made(name: str, place: TrackedPlace) -> Tracker:
    with _same_random_numbers():
        try:
            module = importlib.import_module(f"nanguard.trackers.to_{name}")
            kind: type[Tracker] = getattr(module, _KNOWN[name][0])
            for needed in kind.modules:
                importlib.import_module(needed)
        except ModuleNotFoundError as error:
            raise MissingDependencyError.of(
                f"the tracker {name}", error, extra="trackers"
            ) from error
        except Exception as error:  # what is installed and broken may raise anything; it is told
            raise MissingDependencyError(
                f"the tracker {name} is installed, but cannot be imported: "
                f"{type(error).__name__}: {error}",
                where=f"the tracker {name}",
                do=f"See whether it works by itself: python -c 'import {_KNOWN[name][1]}'",
            ) from error
    return kind(TrackedPlace(place.folder / name, place.name))


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Puts back the stream that some libraries draw from when they are imported."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)
