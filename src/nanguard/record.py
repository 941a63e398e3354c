"""The run record: what happened at every step, written beside the training, not in its way.

``metrics.jsonl`` has one line per step, ``events.jsonl`` one per finding, and
``training_history.csv`` one per epoch. A non-finite number is written as its name in a string,
so that every line is valid JSON and nothing is hidden.
"""

from __future__ import annotations

import csv
import json
import os
import queue
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from nanguard.errors import RecordError
from nanguard.findings import number

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
HISTORY = "training_history.csv"
# The folder in which trackers keep the same numbers in their own forms.
TRACKERS = "trackers"
_QUEUE = 100_000
_FLUSH_SECONDS = 0.25


class RunRecord:
    """Writes a run folder from a thread of its own.

    A disk that is full or gone never stops the training: the failure is reported once, the
    lines it cost are counted, and writing is tried again with the next ones.

    Attributes:
        folder: The run folder.
        lost: How many lines could not be written.
    """

    def __init__(self, folder: Path, *, on_failure: Callable[[str], None]) -> None:
        self.folder = folder
        self.lost = 0
        _check_writable(folder)
        self._on_failure = on_failure
        self._failed = False
        self._torn: set[str] = set()
        self._lines: queue.Queue[tuple[str, dict[str, Any]] | None] = queue.Queue(_QUEUE)
        self._thread = threading.Thread(target=self._work, name="nanguard-record", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _end, self._lines, self._thread)

    def metric(self, line: dict[str, Any]) -> None:
        """Adds a line to ``metrics.jsonl``; never waits."""
        self._put(METRICS, line)

    def event(self, line: dict[str, Any]) -> None:
        """Adds a line to ``events.jsonl``; never waits."""
        self._put(EVENTS, {"time": round(time.time(), 3), **line})

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Adds a row to ``training_history.csv``, with a new column where a name is new."""
        path = self.folder / HISTORY
        temporary = path.with_suffix(".csv.tmp")
        try:
            rows = _read_rows(path)
            rows.append({key: str(_plain(_value(value))) for key, value in row.items()})
            columns = list(dict.fromkeys(key for row in rows for key in row))
            with temporary.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, columns, restval="")
                writer.writeheader()
                writer.writerows(rows)
            temporary.replace(path)
        except (OSError, ValueError, TypeError, csv.Error) as error:
            self._fail(error)

    def close(self) -> None:
        """Writes what is left and ends the thread."""
        self._finalizer()

    def _put(self, file: str, line: dict[str, Any]) -> None:
        try:
            self._lines.put_nowait((file, line))
        except queue.Full:
            self.lost += 1

    def _work(self) -> None:
        ended = False
        while not ended:
            batch = [self._lines.get()]
            deadline = time.monotonic() + _FLUSH_SECONDS
            while batch[-1] is not None and (wait := deadline - time.monotonic()) > 0:
                try:
                    batch.append(self._lines.get(timeout=wait))
                except queue.Empty:
                    break
            ended = batch[-1] is None
            self._write([line for line in batch if line is not None])

    def _write(self, batch: list[tuple[str, dict[str, Any]]]) -> None:
        for file in dict.fromkeys(file for file, _ in batch):
            lines = [_encode(line) for name, line in batch if name == file]
            try:
                with (self.folder / file).open("a", encoding="utf-8") as out:
                    # A write that failed may have left half a line behind.
                    out.write(("\n" if file in self._torn else "") + "".join(lines))
                self._torn.discard(file)
            except OSError as error:
                self._torn.add(file)
                self.lost += len(lines)
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            why = getattr(error, "strerror", None) or error
            self._on_failure(f"the run record in {self.folder} ({why})")


def _end(lines: queue.Queue[Any], thread: threading.Thread) -> None:
    lines.put(None)
    thread.join()


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise RecordError(
            f"the run folder cannot be written to ({error.strerror or error}).",
            where=str(folder),
            do="Give a run_dir that exists or can be made and that this user may write to, "
            "or leave run_dir out to keep no record.",
        ) from error


def _read_rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [dict(row) for row in csv.DictReader(file)]
    except FileNotFoundError:
        return []


def _value(value: Any) -> Any:
    """Returns the number in a tensor or array of one."""
    return value.item() if hasattr(value, "item") else value


def _encode(line: dict[str, Any]) -> str:
    return json.dumps(_plain(line), separators=(",", ":"), allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
