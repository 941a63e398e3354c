"""What users call an incident or a run: nothing at all, a step, a name, a folder."""

from __future__ import annotations

from pathlib import Path

from nanguard import incident as incidents
from nanguard.cli.command_line import did_you_mean
from nanguard.errors import UsageError
from nanguard.run_folder import HOME

# Where runs and their incidents are written, if nobody says otherwise.
_PLACES = ("runs", "incidents")


def home() -> Path | None:
    """Returns the nearest ``.nanguard`` of this folder or of one above it; None without any."""
    here = Path.cwd()
    return next((one / HOME for one in (here, *here.parents) if (one / HOME).is_dir()), None)


def newest_incidents(command: str) -> list[Path]:
    """Returns the folders of all incidents of this project, the newest first.

    Args:
        command: Who asks, for the error.

    Raises:
        UsageError: There is none.
    """
    place = home()
    found = [] if place is None else [path.parent for path in incidents.newest_first(place.parent)]
    if not found:
        raise UsageError(
            f"there is no incident below {HOME}.",
            where=str(Path.cwd()),
            do="A guarded run leaves its incidents there: nanguard run -- python train.py. Those "
            f"of a Guard or a callback lie in its run_dir, and are named by that: {command} DIR",
        )
    return found


def incident_before(run: Path) -> Path | None:
    """Returns the newest incident of earlier runs of this project; None if there is none.

    Args:
        run: The folder of a run, which a fix may have cured of what those before it met.
    """
    place = home()
    if place is None or run.absolute().parent not in {place / name for name in _PLACES}:
        return None
    own = run.absolute()
    others = (path.parent for path in incidents.newest_first(place.parent))
    before = (one for one in others if own not in one.parents and _written(one) < _written(own))
    return next(before, None)


def short(path: Path) -> Path:
    """Returns a path as seen from here, if it lies below."""
    full, here = path.absolute(), Path.cwd()
    return full.relative_to(here) if full.is_relative_to(here) else full


def incidents_in(folder: Path) -> list[Path]:
    """Returns the folders of all incidents in a folder or below it."""
    return sorted(path.parent for path in folder.glob(f"**/{incidents.NAME}") if path.is_file())


def is_known(name: str) -> bool:
    """Returns whether a run or an incident of this project is called so."""
    return _run_called(name) is not None or _incident_called(name) is not None


def names() -> list[str]:
    """Returns what the runs and incidents of this project are called."""
    place = home()
    if place is None:
        return []
    found = [path.parent.name for path in incidents.newest_first(place.parent)]
    return list(dict.fromkeys([*(run.name for run in _runs(place)), *found]))


def run_named(word: str) -> str:
    """Returns the folder of a run that is called so; the word itself for a path.

    Args:
        word: What somebody has typed.
    """
    run = None if Path(word).exists() else _run_called(word)
    return word if run is None else str(short(run))


def incidents_named(word: str | None, command: str) -> list[Path]:
    """Returns the incidents that a word stands for; several if it is a run.

    Args:
        word: A folder, an ``incident.json``, a step, or the name of a run; None for the newest.
        command: Who asks, for the error.

    Raises:
        UsageError: There is none.
    """
    if word is None:
        return newest_incidents(command)[:1]
    path = Path(word)
    if path.is_file():
        return [path]
    if not path.exists() and word.isdecimal() and not _is_day(word):
        return [_of_step(int(word), command)]
    folder = path if path.is_dir() else _incident_called(word) or _run_called(word, bad=True)
    if folder is None:
        otherwise = f"Give a folder or a step, or nothing for the newest: {command}"
        raise UsageError(
            f"there is no incident {word!r}: no folder, no run and no step is called so.",
            where=command,
            do=did_you_mean(word, names(), otherwise),
        )
    if (folder / incidents.NAME).is_file():
        return [folder]
    found = incidents_in(folder)
    if not found:
        raise UsageError(
            "there is no incident in this folder.",
            where=str(folder),
            do="Every step of the run was fine, or it was written elsewhere (--incidents DIR).",
        )
    return found


def incident_named(word: str | None, command: str) -> Path:
    """Returns the one incident that a word stands for; the newest of a run.

    Args:
        word: As in ``incidents_named``.
        command: Who asks, for the error.
    """
    found = incidents_named(word, command)
    return max(found, key=_written)


def newest_run() -> tuple[str, ...]:
    """Returns the newest run of this project; this folder if nanguard has written none."""
    place = home()
    if place is None:
        return (".",)
    runs = _runs(place)
    return (str(short(max(runs, key=_written))),) if runs else (".",)


def _is_day(word: str) -> bool:
    """Returns whether digits are the date that the name of a run begins with, and not a step."""
    return len(word) == len("20261115") and _run_called(word) is not None


def _of_step(step: int, command: str) -> Path:
    """Returns the newest incident of a step."""
    found = newest_incidents(command)
    wanted = [folder for folder in found if folder.name.startswith(f"step-{step:06d}-")]
    if not wanted:
        steps = sorted({int(part) for one in found if (part := one.name[5:11]).isdecimal()})
        listed = ", ".join(map(str, steps[:10])) + (", ..." if len(steps) > 10 else "")
        raise UsageError(
            f"there is no incident of step {step}.",
            where=command,
            do=f"There are incidents of these steps: {listed}.",
        )
    return wanted[0]


def _run_called(name: str, *, bad: bool = False) -> Path | None:
    """Returns the folder of a run by its name, or by the beginning or end of it.

    Args:
        name: The name.
        bad: Whether one with an incident comes before newer ones without.
    """
    place = home()
    if place is None or "/" in name or not name:
        return None
    runs = _runs(place)
    exact = [one for one in runs if one.name == name]
    near = [one for one in runs if one.name.startswith(name) or one.name.endswith(f"-{name}")]
    return max(
        exact or near,
        key=lambda one: (bad and bool(incidents_in(one)), _written(one)),
        default=None,
    )


def _incident_called(name: str) -> Path | None:
    """Returns the newest incident whose folder is called so."""
    place = home()
    if place is None or not name.startswith("step-"):
        return None
    found = (path.parent for path in incidents.newest_first(place.parent))
    return next((folder for folder in found if folder.name == name), None)


def _runs(place: Path) -> list[Path]:
    return [one for name in _PLACES for one in (place / name).glob("*") if one.is_dir()]


def _written(path: Path) -> float:
    """Returns when something was written last."""
    return path.stat().st_mtime
