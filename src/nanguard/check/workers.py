"""Processes that read files of strangers, and may die of them: the check goes on.

A library that reads a damaged file may abort the process, or take all memory and time there is. So
every file is read in a process of its own or after others in the same one, with a limit on memory
and on processor time that grows with its size. What the process was reading when it ended is told
as not checked; the next file gets a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import struct
import sys
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nanguard.check.outcome import failure
from nanguard.check.scan import in_threads
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from nanguard.check.scan import Scan

Item = TypeVar("Item")
Result = TypeVar("Result")

# What any file may cost; then what it may cost for each of its bytes.
SECONDS, SECONDS_PER_BYTE = 15.0, 1e-5
MEMORY, MEMORY_PER_BYTE = 768 << 20, 24
_MUCH = 512 << 20  # a process that still holds so much more than at its start is not used again
_TELL = 1 << 20  # bytes between two words of progress
_RESULTS_PER_PROCESS = 4  # results that may wait to be asked for, for each process
_LENGTH = struct.Struct("<Q")
_STARTING = threading.Lock()
_MOST_FILES = 1 << 20  # numbers of open files that are looked through for those to close
# Libraries that start a thread for every processor would need the memory for all of them.
_THREADS = ("POLARS_MAX_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
_BEGIN = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from nanguard.check.workers import serve
serve(int(sys.argv[2]), int(sys.argv[3]))
"""


@dataclass(slots=True, eq=False)
class _Worker:
    """A process that reads.

    Attributes:
        process: Its number.
        jobs: Where jobs are written to.
        answers: Where its answers are read from.
        ended: How it ended; None as long as it has not.
    """

    process: int
    jobs: int
    answers: int
    ended: int | None = None

    def end(self) -> int:
        """Ends the process, if it has not ended; returns how it did, as ``waitpid`` tells it."""
        if self.ended is None:
            os.close(self.jobs)
            os.close(self.answers)
            # One that has ended by itself keeps its own way of having done so.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process, signal.SIGKILL)
            self.ended = os.waitpid(self.process, 0)[1]
        return self.ended


@dataclass(slots=True)
class Workers:
    """Processes that read files, used in a ``with``; its ``spread`` is that of a scan."""

    _idle: list[_Worker] = field(default_factory=list)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.end()

    def end(self) -> None:
        """Ends the processes that wait for work."""
        while self._idle:
            self._idle.pop().end()

    def spread(
        self,
        work: Callable[[Item, Scan], Result],
        items: Iterable[Item],
        scan: Scan,
        *,
        files: Callable[[Item], Sequence[Path]] | None = None,
        lost: Callable[[Item, SourceError], Result] | None = None,
    ) -> Iterator[Result]:
        """Yields what comes of each item, in their order.

        Args:
            work: A function of a module.
            items: The items.
            scan: How to scan.
            files: Returns the files of an item, whose sizes set its limits.
            lost: Returns what comes of an item that ended its process.

        Raises:
            SourceError: An item ended its process, and nothing says what comes of it then.
        """
        todo = list(items)
        if not can_limit():
            yield from in_threads(work, todo, scan, files=files, lost=lost)
            return
        count = max(1, min(scan.threads, len(todo)))
        alone = replace(scan.elsewhere(), threads=scan.threads if len(todo) == 1 else 1)
        busy: dict[_Worker, int] = {}
        done: dict[int, Result] = {}
        next_job = 0
        try:
            for at in range(len(todo)):
                while at not in done:
                    while (
                        next_job < len(todo)
                        and len(busy) < count
                        and len(done) < _RESULTS_PER_PROCESS * count
                    ):
                        item = todo[next_job]
                        limits = _limits(files(item) if files else ())
                        worker = self._given((work, item, alone, limits), scan.threads)
                        busy[worker] = next_job
                        next_job += 1
                    for worker in _ready(list(busy)):
                        answer = _receive(worker.answers)
                        if answer is not None and answer[0] == "read":
                            scan.progress(answer[1], answer[2])
                            continue
                        number = busy.pop(worker)
                        done[number] = self._result(worker, answer, todo[number], files, lost)
                yield done.pop(at)
        finally:
            for worker in busy:
                worker.end()

    def _given(self, job: tuple[Any, ...], threads: int) -> _Worker:
        """Returns a process that has got a job; an idle one may have been killed meanwhile."""
        while self._idle:
            worker = self._idle.pop()
            try:
                _send(worker.jobs, job)
            except BrokenPipeError:
                worker.end()
            else:
                return worker
        worker = _start(threads)
        _send(worker.jobs, job)
        return worker

    def _result(
        self,
        worker: _Worker,
        answer: tuple[Any, ...] | None,
        item: Item,
        files: Callable[[Item], Sequence[Path]] | None,
        lost: Callable[[Item, SourceError], Result] | None,
    ) -> Result:
        """Returns what a process made of an item, and keeps the process if it can be used again."""
        if answer is not None:
            if answer[2]:
                self._idle.append(worker)
            else:
                worker.end()
            if answer[0] == "made":
                return answer[1]  # type: ignore[no-any-return]
        seconds, memory = _limits(files(item) if files else ())
        if answer is not None:
            what = answer[1] or f"it needs more than {memory >> 20} MB of memory"
        else:
            what = _last_words(worker.end(), seconds)
        paths = files(item) if files else ()
        error = SourceError(
            what, where=str(paths[0]) if paths else str(item), do="Look at it with its own reader."
        )
        if lost is None:
            raise error
        return lost(item, error)


def can_limit() -> bool:
    """Returns whether this system has processes whose memory and time can be limited."""
    return sys.platform.startswith("linux")


def _limits(files: Sequence[Path]) -> tuple[float, int]:
    """Returns the seconds and the bytes of memory that reading some files may cost."""
    size = 0
    for file in files:
        with contextlib.suppress(OSError):
            size += file.stat().st_size
    return SECONDS + SECONDS_PER_BYTE * size, MEMORY + MEMORY_PER_BYTE * size


def _last_words(status: int, seconds: float) -> str:
    """Returns why a process ended in the midst of its work."""
    if not os.WIFSIGNALED(status):
        return "its reader ended in the midst of it"
    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU:
        return f"it took more than {seconds:.0f} s to read"
    if number == signal.SIGKILL:
        return "its reader was killed: there was not enough memory"
    return f"its reader crashed ({signal.Signals(number).name})"


def _start(threads: int) -> _Worker:
    # Another process that is started meanwhile would hold the same ends of the pipes, and hide that
    # this one has ended.
    with _STARTING:
        jobs, to_worker = os.pipe()
        from_worker, answers = os.pipe()
        # A copy of this process is there at once; but only a process of one thread can be copied.
        if len(list(Path("/proc/self/task").iterdir())) == 1:
            process = os.fork()
            if process == 0:
                _serve_and_end(jobs, answers, threads)
        else:
            process = _begin(jobs, answers, threads)
        os.close(jobs)
        os.close(answers)
        return _Worker(process, to_worker, from_worker)


def _begin(jobs: int, answers: int, threads: int) -> int:
    """Starts Python anew; returns the number of the process."""
    root = str(Path(__file__).parents[2])
    paths = [root, *(path for path in sys.path if path and path != root)]
    os.set_inheritable(jobs, True)  # noqa: FBT003
    os.set_inheritable(answers, True)  # noqa: FBT003
    words = [sys.executable, "-I", "-c", _BEGIN, json.dumps(paths), str(jobs), str(answers)]
    return os.posix_spawn(sys.executable, words, _few_threads(dict(os.environ), threads))


def _few_threads(environment: dict[str, str], threads: int) -> dict[str, str]:
    return {**dict.fromkeys(_THREADS, str(max(1, threads))), **environment}


def _serve_and_end(jobs: int, answers: int, threads: int) -> None:
    """Serves in a copy of the process that was, and never returns to what that was doing."""
    try:
        # The pipes of other workers among them: an end held here would keep those alive.
        first, last = sorted((jobs, answers))
        os.closerange(3, first)
        os.closerange(first + 1, last)
        os.closerange(last + 1, min(_MOST_FILES, os.sysconf("SC_OPEN_MAX")))
        os.environ.update(_few_threads(dict(os.environ), threads))
        serve(jobs, answers)
    finally:
        os._exit(0)


def serve(jobs: int, answers: int) -> None:
    """Reads what it is given, until nobody gives it more.

    Args:
        jobs: Where jobs come from.
        answers: Where answers go to.
    """
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What libraries print about a file that they fail on is no part of any report.
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    first = _held("VmRSS")
    try:
        while (job := _receive(jobs)) is not None:
            work, item, scan, (seconds, memory) = job
            _limit(resource, seconds, memory)
            kind, *answer = _made(work, item, scan, answers)
            _send(answers, (kind, *answer, _held("VmRSS") - first < _MUCH))
    except BrokenPipeError:
        return


def _limit(resource: Any, seconds: float, memory: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = used.ru_utime + used.ru_stime
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    allowed = int(spent + seconds) + 1
    if most == resource.RLIM_INFINITY or allowed <= most:
        resource.setrlimit(resource.RLIMIT_CPU, (allowed, most))
    allowed = _held("VmData") + memory
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    if most == resource.RLIM_INFINITY or allowed <= most:
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, most))


def _held(what: str) -> int:
    """Returns how many bytes of memory of some kind this process holds."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123
        return next((int(line.split()[1]) << 10 for line in file if line.startswith(what)), 0)


def _made(work: Any, item: Any, scan: Scan, answers: int) -> tuple[Any, ...]:
    """Returns the answer to a job: what was made, or why it could not be."""
    import resource

    teller = _Teller(answers)

    @contextlib.contextmanager
    def bring(path: Path) -> Iterator[Path]:
        with scan.bring(path) as here:
            if here != path:  # what lies elsewhere has its size here only
                _limit(resource, *_limits([here]))
            yield here

    try:
        made = work(item, replace(scan, progress=teller, bring=bring))
        teller.flush()
        answer = ("made", made)
        pickle.dumps(answer)
    except MemoryError:
        return "failed", ""
    except BaseException as error:  # noqa: BLE001 - a panic in a library is no Exception
        return "failed", failure(error)
    return answer


@dataclass(slots=True)
class _Teller:
    """Tells the process that waits how much was read, now and then; called by any thread."""

    answers: int
    _path: str = ""
    _read: deque[int] = field(default_factory=deque)

    def __call__(self, path: str, read: int) -> None:
        self._path = path
        self._read.append(read)
        if len(self._read) > 64 or read > _TELL:
            self.flush()

    def flush(self) -> None:
        """Tells what was not told yet."""
        read = 0
        while self._read:
            with contextlib.suppress(IndexError):
                read += self._read.popleft()
        if read:
            # Short enough to be written at once, so that threads do not break into each other.
            _send(self.answers, ("read", self._path[-1000:], read))


def _send(pipe: int, message: tuple[Any, ...]) -> None:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    rest = memoryview(_LENGTH.pack(len(data)) + data)
    while rest:
        rest = rest[os.write(pipe, rest) :]


def _receive(pipe: int) -> tuple[Any, ...] | None:
    """Returns the next message; None if there will be none."""
    length = _exactly(pipe, _LENGTH.size)
    data = None if length is None else _exactly(pipe, _LENGTH.unpack(length)[0])
    # Nothing from a file: both ends of the pipe are this module.
    return None if data is None else pickle.loads(data)  # noqa: S301, TID251


def _exactly(pipe: int, count: int) -> bytes | None:
    parts = []
    while count:
        part = os.read(pipe, min(count, 1 << 20))
        if not part:
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


def _ready(workers: Sequence[_Worker]) -> list[_Worker]:
    """Returns the processes that have something to say, or have ended; waits until one has."""
    import select

    poll = select.poll()
    by_pipe = {worker.answers: worker for worker in workers}
    for pipe in by_pipe:
        poll.register(pipe, select.POLLIN | select.POLLHUP)
    return [by_pipe[pipe] for pipe, _ in poll.poll()]
