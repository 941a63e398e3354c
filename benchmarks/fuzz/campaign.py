"""Checks fuzzed files in processes that may die, and says what went wrong with which input.

The processes check thousands of inputs each and read files themselves, which is quick. Every 16th
input is read by a worker as ``nanguard check`` has them, with its limits, and every 1,000th of a
kind by the command itself, whose exit code has to be the one that was worked out. What ends a
process, or makes nanguard fail, is checked again by the command; only what goes wrong then counts.

The format's own reader is asked about every file for which the exit code is 0 and no finding says
that something in it cannot be read. What exits with 1 or 2 is not called clean, whatever the reader
would say.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import mmap
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.fuzz.inputs import KINDS, beside, input_of, seeds
from benchmarks.fuzz.readers import READERS, refusal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nanguard.check.outcome import Outcome
    from nanguard.check.scan import Spread

# What may go wrong with an input.
WRONG = ("traceback", "died", "slow", "large", "clean-but-refused", "exit-code")
# What one input may cost.
SECONDS = 20.0
MEMORY = 1 << 30
_FOR_LIBRARIES = 1 << 29  # that are imported for an input
# Seconds without any progress, by the clock, after which a process hangs: machines are busy.
_HANGS = 180.0
# What a process that is at work says: which input, and whether the format's own reader has it now.
_SAYS = struct.Struct("<qqq")
_CHECKING, _READING, _DONE = 0, 1, 2
# Of how many inputs one is read by a worker that may die, and one is checked by the command.
BY_WORKER, BY_COMMAND = 16, 1_000
# Findings that say what cannot be read, and leave the exit code at 0: single lines of a file whose
# other lines were judged; Python objects in a checkpoint, which torch loads if it is allowed to.
_NAMES_WHAT_IS_REFUSED = frozenset(("DAT009", "LOG010", "CKP006"))
# Failures of one sort in one kind after which the command is no longer asked about more of them.
_MOST_ASKED = 50
_TELL = 60.0  # seconds between two times that the figures are written
# What stands in the output of a command that failed, as Python, the check or the program says it.
_FAILED = re.compile(
    r"Traceback \(most recent call last\)|nanguard failed on|nanguard: it failed"
    r"|rule [a-z-]+ failed on"
)
_TRIES = 300  # checks that making a failing input smaller may take


@dataclass(frozen=True, slots=True)
class Failure:
    """An input that something went wrong with.

    Attributes:
        kind: What it is.
        number: Its number; -1 for an input that has none.
        what: One of ``WRONG``.
        why: What was said about it.
        data: The input.
    """

    kind: str
    number: int
    what: str
    why: str
    data: bytes


@dataclass(slots=True)
class Tally:
    """What came of a campaign.

    Attributes:
        inputs: How many inputs were checked, by kind.
        verdicts: How often ``clean``, ``findings`` and ``not checked`` came out, by kind.
        codes: How often each exit code came out, by kind.
        compared: How many files the format's own reader was asked about, by kind.
        slowest: The processor time of the input that took longest, in seconds, by kind.
        spent: The processor time of all inputs, in seconds, by kind.
        failures: What went wrong.
        digests: One number for each input; those that are alike have the same.
        by_worker: How many inputs of data, checkpoints and logs a worker has read.
        by_command: How many inputs the command has checked.
        memory: The most that a process has held, in bytes, with every library that it loaded.
        unconfirmed: Inputs that something went wrong with, but not when a user has them checked:
            the kind, the number, what it was, and what was said about it.
        slowest_command: The processor time of the command that took longest, in seconds.
        stopped: What ended the campaign: ``count`` or ``seconds``.
    """

    inputs: Counter[str] = field(default_factory=Counter)
    verdicts: dict[str, Counter[str]] = field(default_factory=dict)
    codes: dict[str, Counter[int]] = field(default_factory=dict)
    compared: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    digests: array[int] = field(default_factory=lambda: array("Q"))
    by_worker: int = 0
    by_command: int = 0
    memory: int = 0
    unconfirmed: list[tuple[str, int, str, str]] = field(default_factory=list)
    slowest_command: float = 0.0
    stopped: str = "count"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one check came to.

    Attributes:
        says: ``clean``, ``findings`` or ``not checked``.
        failed: What nanguard says about a file that it failed on; empty if it did not.
        code: The exit code.
        named: Whether a finding says what its reader may refuse in it.
    """

    says: str
    failed: str = ""
    code: int = 0
    named: bool = False

    @property
    def vouches(self) -> bool:
        """Returns whether a user may take the file for one that its reader reads."""
        return self.code == 0 and not self.named


def _here(
    work: Any, items: Any, scan: Any, *, files: Any = None, lost: Any = None
) -> Iterator[Any]:
    """Reads files in this process, which is one that may die."""
    del files, lost
    yield from (work(item, scan) for item in items)


def check(kind: str, path: Path, spread: Spread = _here) -> Verdict:
    """Checks a file and renders what came of it, as each format of the report does.

    Args:
        kind: What it is.
        path: The file.
        spread: Who reads data, checkpoints and logs.
    """
    if kind in ("incident", "run"):
        return _shown(kind, path)
    from nanguard.check.engine import Check, Plan
    from nanguard.check.scan import Scan
    from nanguard.cli.checking import UNABLE, exit_code, rendered
    from nanguard.cli.commands.before import CheckOptions

    made = Check(Plan(jobs=1, scan=Scan(threads=1, spread=spread)))
    outcome = made.run([str(path)])
    for form in ("text", "json", "github"):
        rendered(CheckOptions((str(path),), form=form), outcome)
    code = UNABLE if made.refused() else exit_code(outcome, _fail_on(path.parent))
    return verdict_of(outcome, code)


@functools.cache
def _fail_on(folder: Path) -> str:
    """Returns from which severity on a check in a folder exits with 1."""
    from nanguard.check.project_settings import find_project

    return find_project(str(folder)).fail_on


def verdict_of(outcome: Outcome, code: int) -> Verdict:
    """Returns what a user would take from a check of one file."""
    missed = outcome.not_checked
    failed = [one.reason for one in missed if one.rule or "nanguard failed on" in one.reason]
    if failed:
        return Verdict("not checked", failed[0], code)
    named = any(one.finding.code in _NAMES_WHAT_IS_REFUSED for one in outcome.seen)
    if outcome.seen:
        return Verdict("findings", "", code, named)
    return Verdict("clean" if outcome.checked and not missed else "not checked", "", code)


def _reader_of(kind: str, verdict: Verdict) -> str:
    """Returns the kind whose reader is asked.

    JSON in which nobody knows data is taken for a configuration, and those may have comments and
    commas behind the last value; nothing is said about it but that it holds no settings.
    """
    return "json-config" if (kind, verdict.says) == ("json-data", "not checked") else kind


def _shown(kind: str, path: Path) -> Verdict:
    """Shows an incident, or the folder of a run, as ``explain`` and ``report`` do."""
    from rich.console import Console

    from nanguard import incident
    from nanguard.check.scan import Scan
    from nanguard.errors import NanguardError
    from nanguard.view.report.html import page
    from nanguard.view.report.incident_page import incident_page
    from nanguard.view.report.verdict import judge
    from nanguard.view.runs import find_runs, open_run

    try:
        if kind == "incident":
            found = incident.read(path)
            with Path(os.devnull).open("w") as nowhere:
                Console(file=nowhere, width=100).print(
                    incident_page(found, folder=str(path.parent))
                )
        runs = [open_run(one, Scan(threads=1)) for one in find_runs([str(path.parent)])]
        for run in runs:
            judge(run)
        page(runs, None).encode("utf-8", "backslashreplace")
    except NanguardError:
        return Verdict("not checked", code=2)
    return Verdict("clean")


class Campaign:
    """Inputs of some kinds, one after the other, over some processes.

    Args:
        kinds: The kinds, which take turns.
        seed: What all inputs come from.
        begin: The number of the first input of each kind.
        processes: How many processes work.
        tell: Called with the tally, now and then.
    """

    def __init__(
        self,
        kinds: list[str],
        *,
        seed: int = 0,
        begin: int = 0,
        processes: int = 1,
        tell: Callable[[Tally], None] = lambda tally: None,
    ) -> None:
        self._kinds = kinds
        self._seed = seed
        self._begin = begin
        self._processes = processes
        self._tell = tell
        self._asked: list[tuple[UserCheck, int, str, str]] = []
        self._often: Counter[tuple[str, str]] = Counter()
        self.tally = Tally(
            verdicts={kind: Counter() for kind in kinds}, codes={kind: Counter() for kind in kinds}
        )

    def run(self, *, count: int | None = None, seconds: float | None = None) -> Tally:
        """Checks so many inputs of all kinds together, or for so many seconds.

        Args:
            count: How many inputs; None for no bound.
            seconds: For how long; None for no bound.
        """
        for kind in self._kinds:
            seeds(kind)  # read once, before there are several processes
        until = None if seconds is None else time.monotonic() + seconds
        with tempfile.TemporaryDirectory(prefix="nanguard-fuzz-", dir=_quick_disk()) as scratch:
            lanes = [
                _Lane(self, Path(scratch), lane, self._processes, count, until)
                for lane in range(self._processes)
            ]
            told = time.monotonic()
            while any(not lane.ended for lane in lanes):
                for lane in lanes:
                    lane.look()
                self._look_at_commands()
                time.sleep(0.02)
                if time.monotonic() - told > _TELL:
                    told = time.monotonic()
                    self._tell(self.tally)
            while self._asked:
                self._look_at_commands()
                time.sleep(0.02)
        if count is None or self.tally.inputs.total() < count:
            self.tally.stopped = "seconds"
        return self.tally

    def named(self, number: int) -> tuple[str, int]:
        """Returns the kind of the input of a turn, and its number."""
        turn, at = divmod(number, len(self._kinds))
        # Each turn begins with another kind: every process gets its share of the slow ones.
        return self._kinds[(at + turn) % len(self._kinds)], self._begin + turn

    def made(self, kind: str, number: int) -> bytes:
        """Returns an input."""
        return input_of(kind, self._seed, number)

    def take(self, line: bytes) -> None:
        """Takes in what a process says about one input."""
        about = json.loads(line)
        kind, number, says, tally = about["kind"], about["number"], about["says"], self.tally
        tally.inputs[kind] += 1
        tally.verdicts[kind][says] += 1
        tally.compared[kind] += about["compared"]
        tally.by_worker += about["by_worker"]
        tally.codes[kind][about["code"]] += 1
        tally.slowest[kind] = max(tally.slowest.get(kind, 0.0), about["seconds"])
        tally.spent[kind] = tally.spent.get(kind, 0.0) + about["seconds"]
        tally.memory = max(tally.memory, about["memory"])
        tally.digests.append(about["digest"])
        if says in ("traceback", "clean-but-refused"):
            self.fail(kind, number, says, about["why"])
        elif (number + BY_COMMAND // 2) % BY_COMMAND == self._kinds.index(kind):
            tally.by_command += 1
            self._ask(kind, number, "", "", about["code"])

    def fail(self, kind: str, number: int, what: str, why: str) -> None:
        """Notes a failure; what the format's own reader does not say is for the command to confirm.

        Args:
            kind: What the input is.
            number: Its number.
            what: What went wrong.
            why: What was said about it.
        """
        self._often[kind, what] += 1
        if what == "clean-but-refused" or self._often[kind, what] > _MOST_ASKED:
            data = self.made(kind, number)
            self.tally.failures.append(Failure(kind, number, what, why, data))
        else:
            self._ask(kind, number, what, why, None)

    def _ask(self, kind: str, number: int, what: str, why: str, code: int | None) -> None:
        self._asked.append((UserCheck(kind, self.made(kind, number), code), number, what, why))

    def _look_at_commands(self) -> None:
        """Takes in what commands say that have ended; as many as processes are under way."""
        for entry in self._asked[: self._processes]:
            check, number, suspected, why = entry
            if not check.ended():
                continue
            self._asked.remove(entry)
            self.tally.slowest_command = max(self.tally.slowest_command, check.seconds)
            if check.what:
                failure = Failure(check.kind, number, check.what, check.why, check.data)
                self.tally.failures.append(failure)
            elif suspected:
                self.tally.unconfirmed.append((check.kind, number, suspected, why))


class _Lane:
    """One process after the other, and what it says."""

    def __init__(
        self,
        campaign: Campaign,
        scratch: Path,
        lane: int,
        lanes: int,
        count: int | None,
        until: float | None,
    ) -> None:
        self._campaign = campaign
        self._folder = scratch / str(lane)
        self._folder.mkdir()
        self._next, self._lanes = lane, lanes
        self._count, self._until = count, until
        self._shared = mmap.mmap(-1, _SAYS.size)
        self._since = time.monotonic()
        self._last = -1
        self._rest = b""
        self._files: dict[str, Path] = {}
        self.ended = False
        self._start()

    def look(self) -> None:
        """Takes in what the process has said, and starts the next where it ended."""
        if self.ended:
            return
        with contextlib.suppress(BlockingIOError):
            while said := os.read(self._pipe, 1 << 16):
                *lines, self._rest = (self._rest + said).split(b"\n")
                for line in lines:
                    self._campaign.take(line)
        number, phase, _ = _SAYS.unpack(self._shared[:])
        if number != self._last:
            self._last, self._since = number, time.monotonic()
        hangs = time.monotonic() - self._since > _HANGS and phase != _DONE
        if hangs:
            os.kill(self._process, signal.SIGKILL)
        done, status = os.waitpid(self._process, 0 if hangs else os.WNOHANG)
        if not done:
            return
        self._drain()
        if status == 0:
            self.ended = True
            return
        kind, at = self._campaign.named(number)
        tally = self._campaign.tally
        tally.inputs[kind] += 1
        what = "slow" if hangs or os.WTERMSIG(status) == signal.SIGXCPU else "died"
        if phase == _READING:  # nanguard said clean, and the format's own reader fell over it
            what = "clean-but-refused"
        tally.verdicts[kind][what] += 1
        self._campaign.fail(kind, at, what, f"the process ended with {status}")
        self._next = number + self._lanes
        self._start()

    def _drain(self) -> None:
        os.set_blocking(self._pipe, True)
        while said := os.read(self._pipe, 1 << 16):
            self._rest += said
        os.close(self._pipe)
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            self._campaign.take(line)
        self._rest = b""

    def _start(self) -> None:
        self._pipe, end = os.pipe()
        self._since = time.monotonic()
        self._process = os.fork()
        if self._process == 0:
            code = 1
            try:
                os.close(self._pipe)
                self._work(end)
                code = 0
            finally:
                os._exit(code)
        os.close(end)
        os.set_blocking(self._pipe, False)

    def _work(self, pipe: int) -> None:
        """Checks inputs until there are no more."""
        from nanguard.check.workers import Workers

        _hold_back()
        campaign = self._campaign
        with Workers() as workers:
            for number in range(self._next, sys.maxsize, self._lanes):
                late = self._until is not None and time.monotonic() > self._until
                if late or (self._count is not None and number >= self._count):
                    _SAYS.pack_into(self._shared, 0, number, _DONE, 0)
                    return
                _SAYS.pack_into(self._shared, 0, number, _CHECKING, 0)
                kind, at = campaign.named(number)
                data = campaign.made(kind, at)
                by_worker = at % BY_WORKER == 0
                spent = _allow(SECONDS)
                spread = workers.spread if by_worker else _here
                says, code, compared, why = self._one(kind, data, number, spread)
                used = resource.getrusage(resource.RUSAGE_SELF)
                about = {
                    "kind": kind,
                    "number": at,
                    "says": says,
                    "code": code,
                    "compared": compared,
                    "by_worker": by_worker and KINDS[kind].scanned,
                    "seconds": used.ru_utime + used.ru_stime - spent,
                    "memory": used.ru_maxrss << 10,
                    "digest": int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big"),
                    "why": why,
                }
                os.write(pipe, json.dumps(about).encode() + b"\n")

    def _one(
        self, kind: str, data: bytes, number: int, spread: Spread
    ) -> tuple[str, int, bool, str]:
        """Returns what came of an input, the exit code, if it was compared, and why it failed."""
        path = self._files.get(kind)
        if path is None:  # of its own: no input may find what is of another kind
            path = self._files[kind] = placed(kind, self._folder / kind)
        path.write_bytes(data)
        try:
            verdict = check(kind, path, spread)
            if verdict.failed:
                return "traceback", verdict.code, False, verdict.failed
            if not verdict.vouches:
                return verdict.says, verdict.code, False, ""
            _SAYS.pack_into(self._shared, 0, number, _READING, 0)
            why = refusal(_reader_of(kind, verdict), path)
        except BaseException as error:  # noqa: BLE001 - this is what is looked for
            return "traceback", -1, False, f"{type(error).__name__}: {error}"[:300]
        says = verdict.says if why is None else "clean-but-refused"
        return says, verdict.code, kind in READERS, why or ""


def _hold_back() -> None:
    """Sets the limits of a process, and keeps what libraries print out of the way."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.environ["POLARS_MAX_THREADS"] = "1"  # handing small files to threads takes longer
    os.environ["RUST_BACKTRACE"] = "0"  # and so does naming each function of a panic
    import nanguard.check.engine  # noqa: F401 - imported once, and not for the first input


def _allow(seconds: float) -> float:
    """Allows so much more processor time, and memory for one input; returns the time used so far.

    What a process holds already is not counted: libraries are loaded for the first input that needs
    them, and torch alone takes more, the more processors there are, than an input may cost.
    """
    with Path("/proc/self/status").open(encoding="ascii", errors="replace") as file:
        held = next(int(line.split()[1]) << 10 for line in file if line.startswith("VmData"))
    most = held + MEMORY + _FOR_LIBRARIES
    resource.setrlimit(resource.RLIMIT_DATA, (most, resource.RLIM_INFINITY))
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = used.ru_utime + used.ru_stime
    most = int(spent) + int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))
    return spent


class UserCheck:
    """Checks an input with the command, in processes of its own, while others work.

    Args:
        kind: What it is.
        data: The input.
        code: The exit code that is due; None if it is not known.

    Attributes:
        kind: What it is.
        data: The input.
        what: What went wrong, once it has ended; empty if nothing did.
        why: What was said about it.
        seconds: The processor time of the command that took longest.
    """

    def __init__(self, kind: str, data: bytes, code: int | None = None) -> None:
        self.kind, self.data, self._code = kind, data, code
        self.what = self.why = ""
        self.seconds = 0.0
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._commands: list[list[str]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._since = 0.0

    def ended(self) -> bool:
        """Returns whether all is said; starts what is next."""
        if self._scratch is None:
            self._scratch = tempfile.TemporaryDirectory(prefix="nanguard-fuzz-", dir=_quick_disk())
            path = placed(self.kind, Path(self._scratch.name, "input"))
            path.write_bytes(self.data)
            report = ["report", str(path.parent), "-o", "r.html"]
            commands = {"incident": [["explain", str(path.parent)], report], "run": [report]}
            usual = ["check", "--format", "json", "--no-cache", str(path)]
            self._commands = commands.get(self.kind, [usual])
        if self._process is not None:
            done, status, used = os.wait4(self._process.pid, os.WNOHANG)
            if not done:
                if time.monotonic() - self._since > _HANGS:
                    self._process.kill()
                return False
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._judge(self._process.returncode, used)
            self._process, self._code = None, None  # what is due is due of the first command
        if self._commands and not self.what:
            self._start(self._commands[0])
            self._commands = self._commands[1:]
            return False
        self._scratch.cleanup()
        return True

    def _start(self, command: list[str]) -> None:
        assert self._scratch is not None
        self._since = time.monotonic()
        with Path(self._scratch.name, "said").open("wb") as file:
            self._process = subprocess.Popen(  # noqa: S603 - our own command
                [sys.executable, "-m", "nanguard", *command],
                cwd=self._scratch.name,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
            )
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(self._process.pid, resource.RLIMIT_CPU, (int(SECONDS), 30))

    def _judge(self, code: int, used: resource.struct_rusage) -> None:
        assert self._scratch is not None
        said = Path(self._scratch.name, "said").read_bytes().decode("utf-8", "replace")
        self.seconds = max(self.seconds, used.ru_utime + used.ru_stime)
        sign = _FAILED.search(said)
        if time.monotonic() - self._since > _HANGS:
            self.what, self.why = "slow", f"it took more than {_HANGS:.0f} s"
        elif code == -signal.SIGXCPU:
            self.what, self.why = "slow", f"it took more than {SECONDS:.0f} s of processor time"
        elif used.ru_maxrss << 10 > MEMORY + (1 << 29):
            self.what, self.why = "large", f"a process held {used.ru_maxrss >> 10} MB"
        elif code not in (0, 1, 2):
            self.what, self.why = "died", f"exit code {code}"
        elif sign is not None:
            self.what, self.why = "traceback", said[sign.start() :][:400]
        elif self._code is not None and code != self._code:
            self.what, self.why = "exit-code", f"it is {code}, not {self._code}: {said[:200]}"


def as_a_user(kind: str, data: bytes, code: int | None = None) -> tuple[str, str]:
    """Checks an input in a process of its own with the command; returns what goes wrong, and why.

    Args:
        kind: What it is.
        data: The input.
        code: The exit code that is due; None if it is not known.
    """
    check = UserCheck(kind, data, code)
    while not check.ended():
        time.sleep(0.02)
    return check.what, check.why


def placed(kind: str, folder: Path) -> Path:
    """Makes a folder with what an input needs beside it; returns where the input goes.

    Args:
        kind: What the input is.
        folder: The folder.
    """
    folder.mkdir(exist_ok=True)
    for path in beside(kind):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder / KINDS[kind].file


def minimised(failure: Failure) -> Failure:
    """Returns a failure with as small an input as a few hundred checks can find."""
    data = failure.data
    tries = _TRIES
    trial = Trial(failure.kind)
    size = max(1, len(data) // 2)
    while size and tries > 0:
        at = 0
        while at < len(data) and tries > 0:
            tries -= 1
            candidate = data[:at] + data[at + size :]
            if candidate and trial.verdict(candidate) == failure.what:
                data = candidate
            else:
                at += size
        size //= 2
    trial.end()
    return Failure(failure.kind, failure.number, failure.what, failure.why, data)


class Trial:
    """Checks candidates in a process that may die of them, and in the next one then."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._process = 0

    def verdict(self, data: bytes) -> str:
        """Returns the verdict on an input, or what went wrong."""
        if not self._process:
            self._start()
        with contextlib.suppress(BrokenPipeError):
            self._to.write(struct.pack("<Q", len(data)) + data)
            self._to.flush()
        said = self._from.readline().decode().strip()
        if said:
            return said
        status = self.end()
        slow = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU
        return "slow" if slow else "died"

    def end(self) -> int:
        """Ends the process; returns how it ended."""
        if not self._process:
            return 0
        with contextlib.suppress(BrokenPipeError):
            self._to.close()
        self._from.close()
        status = os.waitpid(self._process, 0)[1]
        self._process = 0
        return status

    def _start(self) -> None:
        jobs, to = os.pipe()
        back, answers = os.pipe()
        self._process = os.fork()
        if self._process == 0:
            try:
                # The pipes of other trials among them, which would never end otherwise.
                first, last = sorted((jobs, answers))
                os.closerange(3, first)
                os.closerange(first + 1, last)
                os.closerange(last + 1, 1024)
                self._serve(jobs, answers)
            finally:
                os._exit(0)
        os.close(jobs)
        os.close(answers)
        self._to, self._from = os.fdopen(to, "wb"), os.fdopen(back, "rb")

    def _serve(self, jobs: int, answers: int) -> None:
        _hold_back()
        with os.fdopen(jobs, "rb") as file:
            while head := file.read(8):
                data = file.read(struct.unpack("<Q", head)[0])
                _allow(SECONDS)
                os.write(answers, f"{verdict_in(self._kind, data)}\n".encode())


def verdict_in(kind: str, data: bytes) -> str:
    """Checks an input in this process; returns the verdict, or what went wrong."""
    with tempfile.TemporaryDirectory(prefix="nanguard-fuzz-", dir=_quick_disk()) as scratch:
        path = placed(kind, Path(scratch, "input"))
        path.write_bytes(data)
        try:
            verdict = check(kind, path)
        except BaseException:  # noqa: BLE001 - this is what is looked for
            return "traceback"
        if verdict.failed:
            return "traceback"
        if verdict.vouches and refusal(_reader_of(kind, verdict), path) is not None:
            return "clean-but-refused"
        return verdict.says


def _quick_disk() -> str | None:
    """Returns a place in memory, where there is one: a campaign writes each input once."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # noqa: S108
