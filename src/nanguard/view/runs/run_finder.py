"""Finds runs: which files below a folder make one, without reading more than their beginnings."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard import incident as incidents
from nanguard.check.log.log_reader import LOG_HEAD_BYTES, Form, form_of
from nanguard.errors import SourceError
from nanguard.record import EVENTS, HISTORY, METRICS, TRACKERS
from nanguard.run_folder import HOME

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

LINEAGE = "lineage.jsonl"
REPORT_SCHEMA = b'"nanguard.report/'
# Runs and files that a search takes in, folders it goes down, incidents it keeps of a run.
MOST_RUNS = 2000
DEEPEST = 6
MOST_FILES = 5000
_MOST_INCIDENTS = 200
_CONFIGS = (".yaml", ".yml", ".json", ".toml")
# Where nanguard keeps runs in a project, and older ones their incidents.
_IN_HOME = ("runs", "incidents", "demo")
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,12})")
_TRAINER_STATE = "trainer_state.json"
PASSED = frozenset((".git", ".venv", "venv", "node_modules", "__pycache__", "site-packages"))
# Where one run is written down in several forms, the first of these tells most.
_BEST = (Form.EVENTS, Form.WANDB)


@dataclass(slots=True)
class FoundRun:
    """The files of one run.

    Attributes:
        path: The folder, or the one file it was read from.
        name: How the run is called.
        logs: What holds its numbers.
        events: The guard's events, if there are any.
        history: The guard's history of epochs, if there is one.
        lineage: The list of restarts, if there is one.
        incidents: The folders of its incidents.
        reports: Reports of ``nanguard check``.
        configs: Configurations that lie beside it.
        left_out: Other logs that lie beside it.
    """

    path: Path
    name: str
    logs: list[Path] = field(default_factory=list)
    events: Path | None = None
    history: Path | None = None
    lineage: Path | None = None
    incidents: list[Path] = field(default_factory=list)
    reports: list[Path] = field(default_factory=list)
    configs: list[Path] = field(default_factory=list)
    left_out: list[Path] = field(default_factory=list)

    @property
    def is_record(self) -> bool:
        """Whether the guard wrote it."""
        return any(log.name == METRICS for log in self.logs) or self.events is not None

    @property
    def has_numbers(self) -> bool:
        """Whether there is a log; a report or an incident alone is no run."""
        return bool(self.logs) or self.is_record or self.history is not None

    def files(self) -> list[Path]:
        """Returns every file that tells something about the run."""
        single = [self.events, self.history, self.lineage]
        own = [folder / incidents.NAME for folder in self.incidents]
        return [*self.logs, *(path for path in single if path), *own, *self.reports]


def find_runs(paths: Sequence[str | Path]) -> list[FoundRun]:
    """Returns the runs that are meant by files and folders.

    Incidents and reports that are named beside a single run belong to it.

    Raises:
        SourceError: A path does not exist, or holds nothing that can be shown.
    """
    runs: list[FoundRun] = []
    for path in dict.fromkeys(Path(path) for path in paths):
        here = list(_found(path))
        if not here:
            raise SourceError(
                "there is no run here: no log, no incident and no report.",
                where=str(path),
                do="Give a run folder, a log, an incident's folder, or the JSON of nanguard check.",
            )
        runs += here
    numbers = [run for run in runs if run.has_numbers]
    if len(numbers) == 1 and len(paths) > 1:
        for other in runs:
            if other is not numbers[0]:
                numbers[0].incidents += other.incidents
                numbers[0].reports += other.reports
        runs = numbers
    return runs[:MOST_RUNS]


def find_below(folder: Path) -> Iterator[FoundRun]:
    """Yields every run below a folder; links to other folders are not followed."""
    for place, folders, files in os.walk(folder, topdown=True):
        here = Path(place)
        deep = len(here.relative_to(folder).parts)
        folders[:] = sorted(name for name in folders if name not in PASSED and deep < DEEPEST)
        yield from runs_in(here, sorted(files)[:MOST_FILES], folders)


def _found(path: Path) -> Iterator[FoundRun]:
    try:
        if path.is_dir():
            next(path.iterdir(), None)
            yield from find_below(path)
        elif path.is_file():
            with path.open("rb"):
                yield _of_file(path)
        else:
            raise _missing(path, "there is no such file or folder.")
    except OSError as error:
        raise _missing(path, f"it cannot be read ({error.strerror or error}).") from error


def _missing(path: Path, what: str) -> SourceError:
    return SourceError(
        what, where=str(path), do="Check the path, and that this user may read what is there."
    )


def _of_file(path: Path) -> FoundRun:
    if path.name == incidents.NAME:
        return FoundRun(path.parent, path.parent.name, incidents=[path.parent])
    head = _head(path)
    if path.suffix == ".json" and REPORT_SCHEMA in head[:4096]:
        return FoundRun(path, path.name, reports=[path])
    if path.name in (METRICS, EVENTS) and _is_record(path, head):
        return next(runs_in(path.parent, _names(path.parent), []))
    if form_of(path, head) is None and not _may_be_empty_log(path, head):
        raise SourceError(
            "this is not a log, an incident or a report.",
            where=str(path),
            do="Give a run folder, or a file that nanguard check reads as a log.",
        )
    return FoundRun(
        path, path.name, logs=[path], configs=_configs(path.parent, _names(path.parent))
    )


def _is_record(path: Path, head: bytes) -> bool:
    return (path.parent / EVENTS).exists() or b'"update":' in head or path.name == EVENTS


def _may_be_empty_log(path: Path, head: bytes) -> bool:
    """Returns whether a file that holds no losses may still be meant as a log."""
    endings = (".log", ".txt", ".jsonl", ".csv", ".out", ".err", ".ndjson", "")
    return path.suffix.lower() in endings and b"\0" not in head[:1024]


def runs_in(folder: Path, files: list[str], folders: list[str]) -> Iterator[FoundRun]:
    """Yields the runs of one folder; takes from ``folders`` what belongs to them.

    Args:
        folder: The folder.
        files: The names of its files, in order.
        folders: The names of its folders.
    """
    if folder.name == HOME:
        # What nanguard keeps for a project; each folder of a run is a run of its own.
        folders[:] = [name for name in folders if name in _IN_HOME]
        return
    run = FoundRun(folder, folder.name or str(folder))
    states = _take_checkpoints(folder, folders)
    run.incidents = _take_incidents(folder, files, folders)
    logs: dict[Path, Form] = {}
    # Beside the guard's own record, the history has the same numbers once more.
    recorded = METRICS in files or EVENTS in files
    for name in files:
        path = folder / name
        if name in (METRICS, EVENTS, LINEAGE, incidents.NAME) or (name == HISTORY and recorded):
            continue
        head = _head(path)
        if name.endswith(".json") and REPORT_SCHEMA in head[:4096]:
            run.reports.append(path)
        elif (form := form_of(path, head)) is not None:
            logs[path] = form
    if not logs and METRICS not in files and states:
        # The last checkpoint knows the numbers of all the others.
        logs[states[-1]] = form_of(states[-1], _head(states[-1])) or Form.TEXT
    run.events = folder / EVENTS if EVENTS in files else None
    run.history = folder / HISTORY if HISTORY in files and recorded else None
    run.lineage = folder / LINEAGE if LINEAGE in files else None
    if METRICS in files:
        run.logs, run.left_out = [folder / METRICS], list(logs)
        if TRACKERS in folders:
            # The same numbers once more.
            folders.remove(TRACKERS)
        yield _described(run, files)
        return
    yield from _of_logs(run, logs, files)


def _of_logs(run: FoundRun, logs: dict[Path, Form], files: list[str]) -> Iterator[FoundRun]:
    """Yields the runs of a folder in which the guard wrote no metrics."""
    best = next((form for form in _BEST if form in logs.values()), None)
    if best is not None:
        run.logs = [path for path, form in logs.items() if form is best]
        run.left_out = [path for path, form in logs.items() if form is not best]
    elif len(logs) == 1:
        run.logs = list(logs)
    elif logs:
        yield from (
            _described(FoundRun(path, f"{run.name}/{path.name}", logs=[path]), files)
            for path in logs
        )
    if run.logs or run.events or run.history or run.lineage or run.incidents or run.reports:
        yield _described(run, files)


def _described(run: FoundRun, files: list[str]) -> FoundRun:
    folder = run.path if run.path.is_dir() else run.path.parent
    taken = {path.name for path in (*run.logs, *run.reports, *run.left_out)}
    run.configs = _configs(folder, [name for name in files if name not in taken])
    return run


def _configs(folder: Path, files: list[str]) -> list[Path]:
    names = [n for n in files if n.endswith(_CONFIGS) and n != incidents.NAME]
    words = ("config", "hparams", "args", "train", "settings", "params")
    return [folder / n for n in sorted(names) if any(word in n.lower() for word in words)][:6]


def _take_incidents(folder: Path, files: list[str], folders: list[str]) -> list[Path]:
    """Returns the folders of incidents below a folder, and takes them out of the search."""
    if incidents.NAME in files:
        return [folder]
    found: list[Path] = []
    for name in list(folders):
        below = folder / name
        # Says no, and raises nothing, where this user may not look.
        if os.path.isfile(below / incidents.NAME):  # noqa: PTH113
            found.append(below)
            folders.remove(name)
        elif name == "incidents":
            inside = os.walk(below)
            found += sorted(Path(place) for place, _, names in inside if incidents.NAME in names)
            folders.remove(name)
    return found[:_MOST_INCIDENTS]


def _take_checkpoints(folder: Path, folders: list[str]) -> list[Path]:
    """Takes folders of checkpoints out of the search; returns the logs in them, in order.

    A trainer writes its whole log into each of them, which makes none of them a run.
    """
    found: list[tuple[int, Path]] = []
    for name in list(folders):
        number = _CHECKPOINT.fullmatch(name)
        state = folder / name / _TRAINER_STATE
        # Says no, and raises nothing, where this user may not look.
        if number is not None and os.path.isfile(state):  # noqa: PTH113
            found.append((int(number[1]), state))
            folders.remove(name)
    return [state for _, state in sorted(found)]


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _head(path: Path) -> bytes:
    try:
        # A pipe without a writer would hold the program up for good.
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(LOG_HEAD_BYTES)
    except OSError:
        return b""
