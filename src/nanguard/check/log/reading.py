"""Opens logs: which files are logs, which belong together, and what they say."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from nanguard.check.log.csv_log import read_csv
from nanguard.check.log.events import read_events
from nanguard.check.log.history import read_history
from nanguard.check.log.names import Role
from nanguard.check.log.recognition import Form, form_of
from nanguard.check.log.records import loads
from nanguard.check.log.series import MOST_NOTES, Log, Note
from nanguard.check.log.text import read_text
from nanguard.check.log.wandb import read_wandb
from nanguard.errors import SourceError
from nanguard.record import METRICS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from nanguard.check.scanning import Scan

HEAD = 1 << 16
_ROLES = {
    "non-finite-loss": Role.LOSS,
    "non-finite-gradient": Role.GRAD_NORM,
    "falling-loss-scale": Role.SCALE,
}
_READERS = {
    Form.TEXT: read_text,
    Form.CSV: read_csv,
    Form.HISTORY: read_history,
    Form.WANDB: read_wandb,
}


def recognises(path: Path, head: bytes) -> bool:
    """Returns whether a file is a log.

    Args:
        path: The file; its ending is a hint.
        head: Its first 64 KiB.
    """
    return form_of(path, head) is not None


def recognises_folder(path: Path) -> bool:
    """Returns whether a folder is one log: event files of TensorBoard and nothing else."""
    try:
        inside = [file for file in path.iterdir() if not file.name.startswith(".")]
        return bool(inside) and all(
            file.is_file() and form_of(file, _head(file)) is Form.EVENTS for file in inside
        )
    except OSError:
        return False


def open_sources(paths: Sequence[Path], scan: Scan) -> Iterator[Log]:
    """Yields a log for each run among files and folders of logs.

    Event files in one folder are one log, and so are the metrics and events of a guarded run. A
    log that cannot be read has a ``problem``, and holds what could be read before it.
    """
    runs: dict[Path, list[Path]] = {}
    records: dict[Path, Path] = {}
    single: list[tuple[Path, Form]] = []
    for path in dict.fromkeys(paths):
        if path.is_dir():
            runs.setdefault(path, []).extend(file for file in path.iterdir() if file.is_file())
            continue
        form = form_of(path, _head(path))
        if form is Form.EVENTS:
            runs.setdefault(path.parent, []).append(path)
        elif form is Form.RECORD:
            records[path.parent] = path
        else:
            single.append((path, form or Form.TEXT))
    jobs = []
    for path, form in single:
        event_file = records.pop(path.parent, None) if path.name == METRICS else None
        jobs.append((path, form, event_file))
    yield from scan.each(_read, jobs, files=lambda job: [job[0]], lost=_lost)
    for path in records.values():
        yield _with_events(Log(str(path)), path)
    events = [(folder, tuple(sorted(set(files)))) for folder, files in runs.items()]
    yield from scan.each(_read_run, events, files=lambda run: run[1], lost=_lost_run)


def _read(job: tuple[Path, Form, Path | None], scan: Scan) -> Log:
    path, form, event_file = job
    try:
        with scan.at_hand(path) as here:
            log = _READERS[form](here, scan)
        log.path = str(path)
    except (OSError, SourceError) as error:
        return Log(str(path), problem=_problem(path, error))
    return log if event_file is None else _with_events(log, event_file)


def _lost(job: tuple[Path, Form, Path | None], error: SourceError) -> Log:
    return Log(str(job[0]), problem=error)


def _lost_run(run: tuple[Path, tuple[Path, ...]], error: SourceError) -> Log:
    return Log(_name_of(*run), problem=error)


def _name_of(folder: Path, files: tuple[Path, ...]) -> str:
    return str(files[0]) if len(files) == 1 else str(folder)


def _read_run(run: tuple[Path, tuple[Path, ...]], scan: Scan) -> Log:
    folder, files = run
    name = _name_of(folder, files)
    try:
        with ExitStack() as stack:
            here = [stack.enter_context(scan.at_hand(file)) for file in files]
            return read_events(here, name, scan)
    except (OSError, SourceError) as error:
        return Log(name, problem=_problem(folder, error))


def _with_events(log: Log, path: Path) -> Log:
    """Adds what the guard wrote down as bad to a log."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(iter(lambda: file.readline(HEAD), ""), 1):
                record = loads(text)
                role = _ROLES.get(str(record.get("name"))) if isinstance(record, dict) else None
                if role is None or len(log.notes) >= MOST_NOTES:
                    continue
                step = record.get("step")
                said = str(record.get("message", ""))[:160]
                log.notes.append(Note(role, said, step if isinstance(step, int) else None, number))
    except OSError as error:
        log.problem = _problem(path, error)
    return log


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD)
    except OSError:
        return b""


def _problem(path: Path, error: OSError | SourceError) -> SourceError:
    if isinstance(error, SourceError):
        return error
    return SourceError(
        f"the log cannot be read ({error.strerror or error}).",
        where=str(path),
        do="Check that the file still exists and that this user may read it.",
    )
