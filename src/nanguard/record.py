"""The run record: what happened at every step, written beside the training, not in its way.

``metrics.jsonl`` has one line per step, ``events.jsonl`` one per finding, and
``training_history.csv`` one per epoch. A non-finite number is written as its name in a string,
so that every line is valid JSON and nothing is hidden.

A snapshot counts only when the lines up to its step are on the disk (``flush``), and a run that
goes on from one puts aside what was written after it (``go_back``): whatever was killed when, no
step is missing and none is there twice.
"""

from __future__ import annotations

import contextlib
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
from nanguard.masking import hidden_tree
from nanguard.run_folder import BEAT, FolderLock, open_private

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    # Lines and their file; and a wish that what came before it is on the disk.
    _Lines = tuple[str, list[dict[str, Any]]]
    _Flush = threading.Event

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
HISTORY = "training_history.csv"
# The folder in which trackers keep the same numbers in their own forms.
TRACKERS = "trackers"
# What was written after the snapshot that the run went on from. Hidden: it is no record of a run.
SUPERSEDED = ".superseded.jsonl"
# The event that says so stays, however often a run goes on from the same snapshot.
_KEPT_EVENT = "resumed"
# Lines that wait to be written.
_MOST_QUEUED = 100_000
# Bytes that are read at once from the end of a file.
_BLOCK_BYTES = 1 << 16
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
        self._lock = _own(folder)
        for name in (METRICS, EVENTS):
            _cut_torn_line(folder / name)
        self._on_failure = on_failure
        self._failed = False
        self._torn: set[str] = set()
        self._lines: queue.Queue[_Lines | _Flush | None] = queue.Queue(_MOST_QUEUED)
        # Set if somebody waits for what is written.
        self._hurry = threading.Event()
        self._thread = threading.Thread(target=self._work, name="nanguard-record", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(
            self, _end, self._lines, self._hurry, self._thread, self._lock
        )

    def metric(self, line: dict[str, Any]) -> None:
        """Adds a line to ``metrics.jsonl``; never waits."""
        self._put(METRICS, [line])

    def metrics(self, lines: list[dict[str, Any]]) -> None:
        """Adds lines to ``metrics.jsonl``; never waits."""
        self._put(METRICS, lines)

    def event(self, line: dict[str, Any]) -> None:
        """Adds a line to ``events.jsonl``; never waits."""
        self._put(EVENTS, [{"time": round(time.time(), 3), **hidden_tree(line)}])

    def epoch(self, row: Mapping[str, Any]) -> None:
        """Adds a row to ``training_history.csv``, with a new column where a name is new."""
        try:
            rows = _read_rows(self.folder / HISTORY)
            rows.append({key: str(_plain(_value(value))) for key, value in row.items()})
            self._write_rows(rows)
        except (OSError, ValueError, TypeError, csv.Error) as error:
            self._fail(error)

    def flush(self) -> None:
        """Returns when everything that was added so far is on the disk, or could not be written."""
        if self._finalizer.alive:
            flushed: _Flush = threading.Event()
            self._lines.put(flushed)
            self._hurry.set()
            while not flushed.wait(1.0) and self._thread.is_alive():
                pass

    def go_back(self, step: int, epoch: int) -> int:
        """Puts aside what was written about a step and later ones; returns how many steps.

        Args:
            step: The step that comes next.
            epoch: How many epochs were over before it.
        """
        self.flush()
        try:
            cut = _put_aside(self.folder, METRICS, lambda line: _is_before(line, step))
            _put_aside(
                self.folder,
                EVENTS,
                lambda line: line.get("name") == _KEPT_EVENT or _is_before(line, step),
            )
            rows = _read_rows(self.folder / HISTORY)
            kept = [row for row in rows if _is_row_up_to(row, epoch)]
            if len(kept) < len(rows):
                self._write_rows(kept)
        except (OSError, ValueError, TypeError, csv.Error) as error:
            self._fail(error)
            return 0
        return cut

    def close(self) -> None:
        """Writes what is still queued, ends the thread and gives the folder back."""
        self._finalizer()

    def _put(self, file: str, lines: list[dict[str, Any]]) -> None:
        try:
            self._lines.put_nowait((file, lines))
        except queue.Full:
            self._hurry.set()
            self.lost += len(lines)

    def _write_rows(self, rows: list[dict[str, str]]) -> None:
        path = self.folder / HISTORY
        temporary = path.with_suffix(".csv.tmp")
        columns = list(dict.fromkeys(key for row in rows for key in row))
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def _work(self) -> None:
        ended = False
        while not ended:
            try:
                batch = [self._lines.get(timeout=BEAT)]
            except queue.Empty:
                self._lock.beat()
                continue
            self._lock.beat()
            if isinstance(batch[0], tuple):
                # One look at many lines: to wake up for each of them would hold up the training.
                self._hurry.wait(_FLUSH_SECONDS)
                self._hurry.clear()
            with contextlib.suppress(queue.Empty):
                while isinstance(batch[-1], tuple):
                    batch.append(self._lines.get_nowait())
            ended, flushed = batch[-1] is None, batch[-1]
            whole = isinstance(flushed, threading.Event)
            self._write([lines for lines in batch if isinstance(lines, tuple)], to_disk=whole)
            if isinstance(flushed, threading.Event):
                flushed.set()

    def _write(self, batch: list[_Lines], *, to_disk: bool) -> None:
        for file in dict.fromkeys(file for file, _ in batch):
            lines = [_encode(line) for name, some in batch if name == file for line in some]
            try:
                with open_private(self.folder / file, append=True) as out:
                    # A write that failed may have left half a line behind.
                    text = ("\n" if file in self._torn else "") + "".join(lines)
                    out.write(text.encode())
                self._torn.discard(file)
            except OSError as error:
                self._torn.add(file)
                self.lost += len(lines)
                self._fail(error)
        if to_disk:
            self._sync()

    def _sync(self) -> None:
        """Waits until the disk has what was written, also earlier."""
        for name in (METRICS, EVENTS):
            try:
                handle = os.open(self.folder / name, os.O_RDONLY)
            except OSError:
                continue
            try:
                os.fsync(handle)
            except OSError as error:
                self._fail(error)
            finally:
                os.close(handle)

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            why = getattr(error, "strerror", None) or error
            self._on_failure(f"the run record in {self.folder} ({why})")


def _end(
    lines: queue.Queue[Any], hurry: threading.Event, thread: threading.Thread, lock: FolderLock
) -> None:
    lines.put(None)
    hurry.set()
    thread.join()
    lock.release()


def _own(folder: Path) -> FolderLock:
    """Takes the run folder for this process."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return FolderLock(folder)
    except RecordError:
        raise
    except OSError as error:
        raise RecordError(
            f"the run folder cannot be written to ({error.strerror or error}).",
            where=str(folder),
            do="Give a run_dir that exists or can be made and that this user may write to, "
            "or leave run_dir out to keep no record.",
        ) from error


def _cut_torn_line(path: Path) -> None:
    """Takes away half a line, which a process leaves behind that is killed while it writes."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        at = end
        while at > 0:
            begin = max(0, at - _BLOCK_BYTES)
            file.seek(begin)
            found = file.read(at - begin).rfind(b"\n")
            if found >= 0:
                at = begin + found + 1
                break
            at = begin
        if at < end:
            file.truncate(at)


def _put_aside(folder: Path, name: str, keeps: Callable[[dict[str, Any]], bool]) -> int:
    """Takes lines out of a file and keeps them in another; returns how many."""
    path = folder / name
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return 0
    kept: list[bytes] = []
    others: list[bytes] = []
    for line in content.splitlines(keepends=True):
        (kept if keeps(_decoded(line)) else others).append(line)
    if others:
        with (folder / SUPERSEDED).open("ab") as aside:
            aside.writelines(others)
        draft = path.with_name(f".{name}.tmp")
        with draft.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    return len(others)


def _decoded(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_before(line: dict[str, Any], step: int) -> bool:
    """Returns whether a line is about an earlier step, or about none."""
    at = line.get("step")
    return not isinstance(at, int) or at < step


def _is_row_up_to(row: dict[str, str], epoch: int) -> bool:
    text = row.get("epoch") or ""
    return not text.isdecimal() or int(text) <= epoch


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
