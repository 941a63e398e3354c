"""The check of Python files and notebooks, in several processes; what has not changed is kept."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
import warnings
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from nanguard import __version__
from nanguard.check.code.project import torch_floor
from nanguard.check.outcome import (
    FileOutcome,
    NotChecked,
    Omission,
    Seen,
    failure,
    in_order,
    judge,
    seen_in,
)
from nanguard.check.paths import KIND_BYTES, FileKind, kind_of
from nanguard.check.rule import all_rules, plugins
from nanguard.check.selection import ignores_in, suppress, unused
from nanguard.errors import SourceError
from nanguard.findings import Finding, Fix, Severity
from nanguard.source.edits import diff_of
from nanguard.source.text import (
    NOTEBOOK_LIMIT,
    PYTHON_LIMIT,
    Text,
    decode,
    own_folder,
    read_bytes,
    write_atomically,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import ProcessPoolExecutor
    from types import FrameType

    from nanguard.check.code.project import Project
    from nanguard.check.engine import Plan
    from nanguard.check.selection import Selection
    from nanguard.source.text import Notebook

    Job = tuple[str, FileKind]
    Batch = Sequence[Job]

_SCHEMA = "nanguard.cache/3"
_CACHE_BYTES = 64 << 20
_MOST_ENTRIES = 50_000
_PLAIN = tuple(f.name for f in fields(Finding) if f.name not in ("path", "severity", "fixes"))


class Cache:
    """The outcomes of files, by what the files hold and by what looks at them.

    Args:
        folder: Where it is kept.
        selection: The rules of the check.
    """

    def __init__(self, folder: Path, selection: Selection) -> None:
        self._file = folder / "check.json"
        self._made_by = f"{program_state()}|{selection!r}"
        self._old = self._load()
        self._new: dict[str, Any] = {}
        self._digests: dict[str, str] = {}
        self._changed = False

    def key(self, path: str, content: bytes) -> str:
        """Returns what the outcome of a file is kept under."""
        floor = torch_floor(path)
        about = f"{self._made_by}|{path}|{floor}".encode("utf-8", "surrogateescape")
        return hashlib.blake2b(content, digest_size=16, key=_short(about)).hexdigest()

    def get(self, key: str, path: str) -> FileOutcome | None:
        """Returns a kept outcome; None without one or a key, or if a file it needed has changed."""
        entry = self._old.get(key) if key else None
        if entry is None:
            return None
        try:
            if any(self._digest(needed) != digest for needed, digest in entry["needs"]):
                return None
            outcome = _from_json(entry, path)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None
        self._new[key] = entry
        return outcome

    def put(self, key: str, outcome: FileOutcome) -> None:
        """Keeps an outcome, if there is a key for it."""
        if key:
            needs = [[needed, self._digest(needed)] for needed in outcome.needs]
            self._new[key] = {**_to_json(outcome), "needs": needs}
            self._changed = True

    def _digest(self, path: str) -> str:
        """Returns what tells one content of a file from another; empty if it cannot be read."""
        if path not in self._digests:
            try:
                data = read_bytes(path, PYTHON_LIMIT)
                self._digests[path] = hashlib.blake2b(data, digest_size=16).hexdigest()
            except SourceError:
                self._digests[path] = ""
        return self._digests[path]

    def save(self) -> None:
        """Writes everything to disk: what this check used first, then what older ones did."""
        if not self._changed:
            return
        entries = dict(list(self._new.items())[:_MOST_ENTRIES])
        for key, entry in self._old.items():
            if len(entries) >= _MOST_ENTRIES:
                break
            entries.setdefault(key, entry)
        told = json.dumps({"schema": _SCHEMA, "entries": entries}, separators=(",", ":"))
        try:
            own_folder(self._file.parent)
            if len(told) <= _CACHE_BYTES:
                write_atomically(self._file, told.encode())
        except OSError:  # a folder that cannot be written to is no reason to fail
            return

    def _load(self) -> dict[str, Any]:
        try:
            if self._file.stat().st_size > _CACHE_BYTES:
                return {}
            told = json.loads(self._file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(told, dict) or told.get("schema") != _SCHEMA:
            return {}
        entries = told.get("entries")
        return entries if isinstance(entries, dict) else {}


def _short(about: bytes) -> bytes:
    return hashlib.blake2b(about, digest_size=32).digest()


def program_state() -> str:
    """Returns what tells one state of the checking code from another."""
    package = Path(__file__).parents[1]
    parts = [__version__, sys.version]
    for folder in ("check", "source"):
        for place, _, names in sorted(os.walk(package / folder)):
            for name in sorted(names):
                if name.endswith(".py"):
                    stat = Path(place, name).stat()
                    parts.append(f"{name}:{stat.st_mtime_ns}:{stat.st_size}")
    for origin, rule in plugins():
        file = getattr(sys.modules.get(type(rule).__module__), "__file__", None)
        changed = Path(file).stat().st_mtime_ns if file and Path(file).exists() else 0
        parts.append(f"{origin}:{rule.code}:{changed}")
    return "|".join(parts)


def _to_json(outcome: FileOutcome) -> dict[str, Any]:
    return {
        "checked": outcome.checked,
        "suppressed": outcome.suppressed,
        "not_checked": [[e.reason, e.omission.value, e.rule] for e in outcome.not_checked],
        "seen": [
            {
                **{name: getattr(seen.finding, name) for name in _PLAIN},
                "severity": seen.finding.severity.value,
                "fixes": [[fix.title, fix.safe, list(fix.plan)] for fix in seen.finding.fixes],
                "text": seen.text,
                "diffs": list(seen.diffs),
            }
            for seen in outcome.seen
        ],
    }


def _from_json(entry: dict[str, Any], path: str) -> FileOutcome:
    return FileOutcome(
        path,
        seen=[_seen(one, path) for one in entry["seen"]],
        checked=bool(entry["checked"]),
        not_checked=[
            NotChecked(path, str(reason), Omission(omission), rule=str(rule))
            for reason, omission, rule in entry["not_checked"]
        ],
        suppressed=int(entry["suppressed"]),
    )


def _seen(entry: dict[str, Any], path: str) -> Seen:
    fixes = tuple(
        Fix(str(title), safe=bool(safe), plan=tuple(map(str, plan)))
        for title, safe, plan in entry["fixes"]
    )
    plain = {name: entry[name] for name in _PLAIN}
    severity = Severity(entry["severity"])
    finding = Finding(path=path, severity=severity, fixes=fixes, **plain)
    return Seen(finding, str(entry["text"]), tuple(map(str, entry["diffs"])))


class TooSlowError(BaseException):
    """Raised in the midst of a check that takes too long; no rule may take it for its own."""


@contextlib.contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Raises ``TooSlowError`` in the block once it has cost so much processor time.

    Where the system has no such clock, or in a thread, the block is not bounded.
    """
    if not hasattr(signal, "ITIMER_VIRTUAL") or (
        threading.current_thread() is not threading.main_thread()
    ):
        yield
        return

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGVTALRM, ring)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


_CPU_SECONDS_PER_FILE = 15.0


def check_path(
    path: str, kind: FileKind, selection: Selection, project: Project | None = None
) -> FileOutcome:
    """Returns what came of a file of Python code or a notebook.

    Args:
        path: The file.
        kind: What it is taken for.
        selection: The rules of the check.
        project: The files it may import from.
    """
    try:
        limit = NOTEBOOK_LIMIT if kind is FileKind.NOTEBOOK else PYTHON_LIMIT
        data = read_bytes(path, limit)
    except SourceError as error:
        return FileOutcome.left_out(path, error.reason)
    if project is not None:
        project.consulted.clear()
    outcome = check_bytes(path, data, kind, selection, project)
    if project is not None:
        outcome.needs = tuple(sorted(project.needed()))
    return outcome


def check_bytes(
    path: str,
    data: bytes,
    kind: FileKind,
    selection: Selection,
    project: Project | None = None,
) -> FileOutcome:
    """Returns what came of the bytes of a file; bounded in time."""
    really = kind_of(path, data[:KIND_BYTES])
    if really in (FileKind.BINARY, FileKind.CHECKPOINT, FileKind.DATA):
        return FileOutcome.left_out(path, "it is a binary file, not Python code")
    try:
        with cpu_limit(_CPU_SECONDS_PER_FILE), warnings.catch_warnings():
            # Python itself remarks on odd escapes while it parses; that is not our business.
            warnings.simplefilter("ignore")
            return _check(path, data, kind, selection, project)
    except SourceError as error:
        return FileOutcome.left_out(path, error.reason)
    except (RecursionError, MemoryError):
        return FileOutcome.left_out(path, "it is nested too deeply")
    except TooSlowError:
        return FileOutcome.left_out(path, f"it took more than {_CPU_SECONDS_PER_FILE:.0f} s")
    except Exception as error:  # noqa: BLE001 - one file that we cannot read must not end the check
        return FileOutcome.left_out(path, failure(error))


def _check(
    path: str, data: bytes, kind: FileKind, selection: Selection, project: Project | None
) -> FileOutcome:
    if kind is FileKind.NOTEBOOK:
        from nanguard.source.text import Notebook

        notebook = Notebook.read(path, decode(path, data, python=False).content)
        return check_notebook(notebook, selection, project)
    text = Text(path, decode(path, data, python=True).content)
    return check_python(text, selection, project)


def check_python(text: Text, selection: Selection, project: Project | None = None) -> FileOutcome:
    """Returns what came of a text of Python code.

    Raises:
        SourceError: It is not Python.
    """
    findings, outcome = _judged(text, selection, project)
    outcome.seen = [seen_in(text, finding) for finding in findings]
    return outcome


def check_notebook(
    notebook: Notebook, selection: Selection, project: Project | None = None
) -> FileOutcome:
    """Returns what came of the code cells of a notebook.

    Raises:
        SourceError: No cell is Python.
    """
    findings, outcome = _judged(notebook.code, selection, project)
    outcome.not_checked += [
        NotChecked(notebook.path, f"{cell} is not Python: {why}", Omission.UNRELATED)
        for cell, why in notebook.broken
    ]

    def diff(fix: Fix) -> str:
        return diff_of(f"{notebook.path} (code cells)", notebook.code, fix.edits)

    for finding in findings:
        line, where = notebook.place(finding.line or 1)
        place = where if not finding.where else f"{where}, {finding.where}"
        seen = seen_in(notebook.code, finding, diff)
        moved = replace(finding, line=line, column=None, where=place)
        outcome.seen.append(replace(seen, finding=moved))
    return outcome


def _judged(
    text: Text, selection: Selection, project: Project | None
) -> tuple[list[Finding], FileOutcome]:
    """Returns what rules and comments say about Python code, with everything but the lines."""
    from nanguard.check.code.code import Code

    rules = [r for r in selection.rules("code") if selection.applies(r.code, r.name, text.path)]
    raw, failed = judge(rules, Code.parse(text, project), text.path)
    ignores = ignores_in(text, python=True)
    findings, allowed = suppress(_once_a_line(raw), ignores)
    if ignores:
        broken = {entry.rule for entry in failed}
        ran = {rule.name for rule in rules} - broken
        known = {rule.name: rule.code for rule in all_rules()}
        findings += unused(text.path, ignores, known, ran, selection)
    outcome = FileOutcome(text.path, not_checked=failed, suppressed=allowed)
    return in_order(findings), outcome


def _once_a_line(findings: list[Finding]) -> list[Finding]:
    """Returns findings without those that say the same of the same line again.

    The worst is kept, and among equals the first that comes with a change of the code: once that is
    made, the line is looked at again.
    """
    kept: dict[tuple[str, int | None, str], Finding] = {}
    for finding in findings:
        key = (finding.name, finding.line, finding.message)
        known = kept.get(key)
        if known is None or _weight(finding) > _weight(known):
            kept[key] = finding
    chosen = {id(finding) for finding in kept.values()}
    return [finding for finding in findings if id(finding) in chosen]


def _weight(finding: Finding) -> tuple[int, bool]:
    return finding.severity.rank, any(fix.edits for fix in finding.fixes)


_WORTH_IT = 400_000  # bytes; below, other processes cost more than they save
_FILES_PER_JOB = 16
_CACHED_FROM = 4  # files; below, reading the cache costs more than it saves
_DIED = "the process that checked it died"


def check_files(files: Batch, plan: Plan, project: Project | None = None) -> Iterator[FileOutcome]:
    """Yields what came of each file of Python code or notebook, in no fixed order.

    Args:
        files: The files, each with what it is taken for.
        plan: How they are checked.
        project: The files they may import from.
    """
    if plan.cache is None or len(files) < _CACHED_FROM:
        yield from _told(_checked(files, plan, project), 0, len(files), plan)
        return
    from nanguard.check.code_check import Cache

    cache = Cache(plan.cache, plan.selection)
    keys = {path: _key(cache, path, kind) for path, kind in files}
    kept = {path: cache.get(key, path) for path, key in keys.items()}
    left = [job for job in files if kept[job[0]] is None]
    yield from (outcome for outcome in kept.values() if outcome is not None)
    for outcome in _told(_checked(left, plan, project), len(files) - len(left), len(files), plan):
        if all(entry.reason != _DIED for entry in outcome.not_checked):
            cache.put(keys[outcome.path], outcome)
        yield outcome
    cache.save()


def _told(
    outcomes: Iterator[FileOutcome], done: int, total: int, plan: Plan
) -> Iterator[FileOutcome]:
    """Yields outcomes, and tells how many there were."""
    for number, outcome in enumerate(outcomes, start=done + 1):
        if plan.progress is not None:
            plan.progress(number, total)
        yield outcome


def _key(cache: Cache, path: str, kind: FileKind) -> str:
    """Returns what the outcome of a file is kept under; empty if it cannot be read."""
    limit = NOTEBOOK_LIMIT if kind is FileKind.NOTEBOOK else PYTHON_LIMIT
    try:
        return cache.key(path, read_bytes(path, limit))
    except SourceError:
        return ""


def _checked(files: Batch, plan: Plan, project: Project | None) -> Iterator[FileOutcome]:
    workers = min(plan.jobs or processors(), len(files))
    if workers <= 1 or (not plan.jobs and _size(files) < _WORTH_IT):
        for path, kind in files:
            yield check_path(path, kind, plan.selection, project)
        return
    yield from _in_processes(files, plan, workers, project)


def processors() -> int:
    """Returns how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _size(files: Batch) -> int:
    total = 0
    for path, _ in files:
        try:
            total += os.stat(path).st_size  # noqa: PTH116 - a Path for every file of a tree is slow
        except OSError:
            continue
    return total


def _in_processes(
    files: Batch, plan: Plan, workers: int, project: Project | None
) -> Iterator[FileOutcome]:
    """Yields outcomes from other processes; a file that kills its process is reported."""
    left = dict(files)
    size = max(1, min(_FILES_PER_JOB, len(files) // (4 * workers)))
    batches = [files[i : i + size] for i in range(0, len(files), size)]
    for outcome in _round(batches, plan, workers, project):
        left.pop(outcome.path, None)
        yield outcome
    # After a crash nobody knows whose fault it was: what is left goes one by one.
    for job in list(left.items()):
        alone = list(_round([[job]], plan, 1, project))
        yield alone[0] if alone else FileOutcome.left_out(job[0], _DIED)


def _round(
    batches: Sequence[Batch], plan: Plan, workers: int, project: Project | None
) -> Iterator[FileOutcome]:
    """Yields outcomes until everything is done or a process dies."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool

    # Forked processes have the rules already; elsewhere forking is not safe.
    how = "fork" if sys.platform.startswith("linux") else "spawn"
    plan.selection.rules("code")
    if project is not None and how == "fork":
        project.prepare()
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context(how), initializer=_begin, initargs=(project,)
    )
    try:
        futures = [pool.submit(_batch, batch, plan.selection) for batch in batches]
        for future in as_completed(futures):
            try:
                yield from future.result()
            except BrokenProcessPool:
                continue
        pool.shutdown()
    except BaseException:  # Ctrl-C, too, and it goes on
        _abandon(pool)
        raise


def _abandon(pool: ProcessPoolExecutor) -> None:
    """Ends the processes of a check that is broken off."""
    for process in list((pool._processes or {}).values()):
        process.terminate()
    # Its thread is waited for: Python, ending at the same moment, would trip over a closed pipe.
    pool.shutdown(cancel_futures=True)


def _batch(files: Batch, selection: Selection) -> list[FileOutcome]:
    return [check_path(path, kind, selection, _CodeWorker.project) for path, kind in files]


class _CodeWorker:
    """What a process that checks files keeps from one batch to the next."""

    project: ClassVar[Project | None] = None


def _begin(project: Project | None) -> None:
    """Takes over the project, and leaves Ctrl-C to the process that waits for this one."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _CodeWorker.project = project
