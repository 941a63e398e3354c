"""Follows runs that are still being written: only what was appended is read."""

from __future__ import annotations

import codecs
import os
import time
from enum import Enum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.log.log_reader import LOG_HEAD_BYTES, Form, form_of, open_sources
from nanguard.check.log.series import Gathering, Log
from nanguard.check.log.text_log import Cutter, TextReader, decoder_of
from nanguard.record import METRICS
from nanguard.view.runs.run_reader import Terms, curves_of, first_clock, open_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import BinaryIO

    from nanguard.check.log.text_log import Stretch
    from nanguard.check.scan import Scan
    from nanguard.view.runs.run_finder import FoundRun
    from nanguard.view.runs.run_model import Run

_READ_BYTES = 2 << 20
# How much of a log is read before the clock is looked at, and for how long in all: somebody waits
# for the page. What is left is read when it is asked for again.
_PIECE_BYTES, _PAGE_SECONDS = 4 << 20, 10.0
# From here on the engine for large files pays, where it is installed.
_BULK = 4 << 20
# The last bytes that were read: if they are others, the file was written anew.
_MARK = 64
# Seconds after which a last line without an end is taken for whole. A script whose output is
# buffered writes half a line at the end of every block, and goes on with it much sooner.
_SETTLED_SECONDS = 30.0


class RunChange(str, Enum):
    """What has become of a file since the last look."""

    SAME = "same"
    GREW = "grew"
    ANEW = "anew"
    GONE = "gone"


class Follower:
    """Reads a text log, and later only what was appended to it.

    A file that became shorter, was replaced, or whose last bytes changed is read from its
    beginning. A last line without an end is waited for, and taken as it is when nothing follows.

    Attributes:
        path: The file.
        behind: Whether there is more to read at once.
    """

    def __init__(self, path: Path, *, terms: bool = False) -> None:
        self.path = path
        self.behind = False
        self._wants_terms = terms
        self._begin(0)

    @property
    def log(self) -> Log:
        """What the file says, as far as it was read; grows with it."""
        held = self._gathering.log
        terms = [] if self._terms is None else self._terms.series.values()
        return Log(held.path, [*held.series, *terms], list(held.notes), held.problem)

    @property
    def waiting(self) -> bool:
        """Whether there is a last line whose end is waited for."""
        return self._cutter.waiting

    @property
    def offset(self) -> int:
        """How many bytes were read."""
        return self._offset

    def read(self, limit: int = 1 << 40) -> RunChange:
        """Reads what was appended, up to about as many bytes as the limit.

        Raises:
            OSError: The file is there and cannot be read.
        """
        self.behind = False
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return RunChange.GONE
        with file:
            now = os.fstat(file.fileno())
            anew = self._was_replaced(file, now)
            if anew:
                self._begin(now.st_ino)
            self._inode = now.st_ino
            size = now.st_size - self._offset
            if size <= 0:
                return RunChange.ANEW if anew else self._wait(now.st_mtime)
            file.seek(self._offset)
            self._take(self._blocks(file.read, min(size, limit)), min(size, limit))
            self.behind = size > limit
        self._grown = time.monotonic()
        return RunChange.ANEW if anew else RunChange.GREW

    def drain(self) -> Log:
        """Returns what was gathered since the last time, and lets go of it."""
        return self._gathering.take()

    def _begin(self, inode: int) -> None:
        self._inode, self._offset = inode, 0
        self._mark = b""
        self._cutter = Cutter(eager=True)
        self._settled = False
        self._grown = time.monotonic()
        self._decoder: codecs.IncrementalDecoder | None = None
        self._gathering = Gathering(str(self.path))
        self._reader = TextReader(self._gathering)
        self._terms = Terms() if self._wants_terms else None

    def _was_replaced(self, file: BinaryIO, now: os.stat_result) -> bool:
        if not self._offset:
            return False
        if now.st_ino != self._inode or now.st_size < self._offset:
            return True
        if self._settled and now.st_size > self._offset:
            return True
        file.seek(self._offset - len(self._mark))
        return file.read(len(self._mark)) != self._mark

    def _wait(self, changed: float) -> RunChange:
        """Takes the last line for whole once nothing has followed for a while."""
        # By both clocks: that of the file may be another machine's.
        waited = max(time.monotonic() - self._grown, time.time() - changed)
        if not self.waiting or waited < _SETTLED_SECONDS:
            return RunChange.SAME
        self._settled = True
        self._take(iter((b"\n",)), 1)
        return RunChange.GREW

    def _blocks(self, read: Callable[[int], bytes], size: int) -> Iterator[bytes]:
        while size > 0 and (block := read(min(_READ_BYTES, size))):
            size -= len(block)
            self._offset += len(block)
            self._mark = (self._mark + block[-_MARK:])[-_MARK:]
            yield block

    def _take(self, blocks: Iterator[bytes], size: int) -> None:
        stretches = self._stretches(blocks)
        if size >= _BULK:
            from nanguard.check.log.text_log import bulk_reader

            bulk = bulk_reader(self._reader)
            if bulk is not None:
                bulk.read_all(stretches, 1)
                return
        for stretch in stretches:
            self._reader.read(stretch)

    def _stretches(self, blocks: Iterator[bytes]) -> Iterator[Stretch]:
        """Yields the whole lines there are now."""
        for block in blocks:
            self._decoder = self._decoder or decoder_of(block)
            for stretch in self._cutter.cut(self._decoder.decode(block)):
                if self._terms is not None:
                    self._terms.feed(stretch.text.encode())
                yield stretch


class LiveRun:
    """A run that is read once, and again where its files have changed.

    Attributes:
        found: Its files; may be replaced when there are others.
    """

    def __init__(self, found: FoundRun) -> None:
        self.found = found
        self._followers: dict[Path, Follower] = {}

    @property
    def read_so_far(self) -> int | None:
        """How many bytes were read of logs of which there is more; None if there is no more."""
        if not any(follower.behind for follower in self._followers.values()):
            return None
        return sum(follower.offset for follower in self._followers.values())

    def read(self, scan: Scan | None = None) -> Run:
        """Returns the run as it is now; what is not there any more is listed as a problem."""
        return open_run(self.found, scan, partial(self._read))

    def _read(self, run: Run, found: FoundRun, scan: Scan) -> None:
        others = [path for path in found.logs if not self._follows(path)]
        followed = [path for path in found.logs if path not in others]
        self._followers = {path: self._followers[path] for path in followed}
        late = time.monotonic() + _PAGE_SECONDS
        for path, follower in self._followers.items():
            change = follower.read(_PIECE_BYTES)
            while follower.behind and time.monotonic() < late:
                follower.read(_PIECE_BYTES)
            if follower.waiting:
                follower.read(_PIECE_BYTES)
            if change is RunChange.GONE:
                run.problems.append(f"{path.name}: the file is gone; what was read before is shown")
            if follower.behind:
                run.problems.append(f"{path.name}: the first {follower.offset >> 20} MiB are shown")
            run.logs.append(follower.log)
        if found.events and found.logs:
            others.append(found.events)
        for log in open_sources(others, scan):
            # What the guard noted belongs to its metrics: rules look at both together.
            if log.path == str(found.events) and run.logs and not log.series:
                run.logs[0].notes += log.notes
                run.logs[0].problem = run.logs[0].problem or log.problem
            else:
                run.logs.append(log)
        run.problems += [
            f"{Path(log.path).name}: {log.problem.what}" for log in run.logs if log.problem
        ]
        history = list(open_sources([found.history], scan)) if found.history else []
        run.curves, run.axis = curves_of([*run.logs, *history])
        run.clock = first_clock(found.logs)

    def _follows(self, path: Path) -> bool:
        if path not in self._followers and is_followed(path):
            self._followers[path] = Follower(path, terms=path.name == METRICS)
        return path in self._followers


def is_followed(path: Path) -> bool:
    """Returns whether a log is text, of which only what was appended has to be read."""
    try:
        with path.open("rb") as file:
            head = file.read(LOG_HEAD_BYTES)
    except OSError:
        return False
    # In UTF-16 a line cannot be told from the bytes of its end.
    wide = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    return not wide and (form_of(path, head) or Form.TEXT) is Form.TEXT
