"""``nanguard check`` as a function: paths in, an outcome out."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.code_check import (
    TooSlowError,
    check_bytes,
    check_files,
    cpu_limit,
    program_state,
)
from nanguard.check.config.key_usage import Usage, is_launcher, project_of, repository_of
from nanguard.check.config_check import NO_TRAINING, Configs
from nanguard.check.outcome import NotChecked, Omission, Outcome, failure
from nanguard.check.paths import (
    KIND_BYTES,
    SCAN_HEAD,
    SCANNED,
    STDIN,
    FileKind,
    FoundFiles,
    Search,
    by_name,
    kind_of,
    may_be_scanned,
    may_configure,
    may_point,
    scanned_as,
)
from nanguard.check.remote_files import Elsewhere
from nanguard.check.rule import broken
from nanguard.check.scan import Scan, in_threads
from nanguard.check.scan_check import Meter, Scans
from nanguard.check.selection import Selection
from nanguard.errors import SourceError
from nanguard.source.text import (
    CONFIG_LIMIT,
    NOTEBOOK_LIMIT,
    Text,
    decode,
    read_bytes,
    read_head,
    read_stdin,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from nanguard.check.code.project import Project
    from nanguard.check.code.project_index import KeptIndex

STDIN_NAME = "<stdin>"
_MOST_AROUND = 20_000  # files of a project that are listed around what was named
_CODE = (".py", ".ipynb")  # a notebook may be the only one that calls what other files define
_KIND_CPU_SECONDS = 15.0  # of processor time that one file may cost before anybody reads it
_NOTHING = "there is nothing in it that can be checked"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a check is asked to do.

    Attributes:
        selection: The rules.
        exclude: Patterns of what is left out of folders.
        root: The folder patterns are relative to.
        jobs: How many processes may work; 0 for as many as there are processors.
        cache: The folder where outcomes of unchanged files are kept; None for nowhere.
        progress: Told how many files are done, and of how many.
        scan: How data, checkpoints and logs are read.
        scanned: Told how many bytes of them are read, and of how many.
    """

    selection: Selection = field(default_factory=Selection)
    exclude: tuple[str, ...] = ()
    root: str = "."
    jobs: int = 0
    cache: Path | None = None
    progress: Callable[[int, int], None] | None = None
    scan: Scan = field(default_factory=Scan)
    scanned: Callable[[int, int], None] | None = None


@dataclass(slots=True)
class Check:
    """One check, from paths to an outcome.

    Attributes:
        plan: What it is asked to do.
        outcome: What has come of it so far.
        code: Files of Python code and notebooks.
        configs: The configurations.
        scans: Data, checkpoints and logs.
        existing: How many of the named paths there are.
        named: The files and folders that were named, one by one or by a pattern.
        projects: The code that each file is judged with.
        scripts: Scripts that may start a training.
    """

    plan: Plan
    outcome: Outcome = field(default_factory=Outcome)
    code: list[tuple[str, FileKind]] = field(default_factory=list)
    configs: Configs = field(default_factory=Configs)
    scans: Scans = field(default_factory=Scans)
    existing: int = 0
    named: set[str] = field(default_factory=set)
    projects: dict[str, Project] = field(default_factory=dict)
    scripts: list[str] = field(default_factory=list)
    _others: dict[str, int] = field(default_factory=dict)
    _elsewhere: Elsewhere = field(default_factory=Elsewhere)

    def run(self, paths: Sequence[str]) -> Outcome:
        """Returns what came of everything that was named."""
        began = time.monotonic()
        with Elsewhere() as self._elsewhere:
            here = self._elsewhere.here(paths)
            self.named = {_plain(path) for path in (*paths, *here)}
            self._find(here)
            for files, project in self._projects():
                self.projects.update((path, project) for path, _ in files)
                for file in check_files(files, self.plan, project):
                    self.outcome.add(file)
            self.configs.usage = self._usage()
            for file in self.configs.check(self.plan.selection):
                self.outcome.add(file)
            self._scan()
            if self.configs.documents:
                self.outcome.alignment = self.configs.alignment()
            self._finish()
            self._elsewhere.rename(self.outcome)
        self.outcome.seconds = time.monotonic() - began
        return self.outcome

    def refused(self) -> list[NotChecked]:
        """Returns what was named and could not be read or judged; all, if nothing could be."""
        missed = self.outcome.not_checked
        checked = {_plain(path) for path in self.outcome.checked}
        if not self.outcome.checked and all(e.omission is not Omission.UNRELATED for e in missed):
            return missed or [NotChecked(path, _NOTHING) for path in sorted(self.named)]
        return [
            entry
            for entry in missed
            if entry.omission is Omission.UNREADABLE
            and _plain(entry.path) in self.named
            and (entry.rule or _plain(entry.path) not in checked)
        ]

    def _usage(self) -> Usage:
        """Returns what the project's code reads: the code that was named, or lies around."""
        named = [path for path, kind in self.code if kind is FileKind.PYTHON]
        return Usage(lambda: named or self._code_around(), tuple(self.scripts))

    def _projects(self) -> Iterator[tuple[list[tuple[str, FileKind]], Project]]:
        """Yields the files of each repository with the code that they are judged with.

        That is the code of the repository, whatever part of it was named: a finding is the same
        whether its file, its folder or the whole is checked.
        """
        from nanguard.check.code.project import Project

        repositories: dict[str | None, list[tuple[str, FileKind]]] = {}
        for file in self.code:
            repositories.setdefault(repository_of(file[0]), []).append(file)
        for root, files in repositories.items():
            paths = [path for path, _ in files]
            around = _code_below(root or self._folder_around(paths), self.plan.exclude)
            known = {os.path.abspath(path) for path in paths}  # noqa: PTH100 - a Path is slow
            others = (_as_named(path) for path in around if path not in known)
            every = [*paths, *others]
            yield files, Project(every, self._kept(root or paths[0]))

    def _kept(self, of: str) -> KeptIndex | None:
        """Returns where what is counted in a project is kept, for who stands where we stand."""
        if self.plan.cache is None:
            return None
        from nanguard.check.code.project_index import KeptIndex

        name = hashlib.blake2b(f"{Path.cwd()}|{of}".encode("utf-8", "replace"), digest_size=8)
        return KeptIndex(self.plan.cache / f"project-{name.hexdigest()}.json", program_state())

    def _folder_around(self, paths: list[str]) -> str | None:
        """Returns the folder of the project that files outside a repository belong to."""
        marked = self._root(paths)
        if marked is not None or any(_plain(path) not in self.named for path in paths):
            return marked  # what lies in a folder that was named belongs together
        here, folder = Path.cwd(), Path(paths[0]).absolute().parent
        below = here in (folder, *folder.parents) and here not in (Path.home(), Path(here.anchor))
        return str(here if below else folder)

    def _code_around(self) -> list[str]:
        """Returns the code of the project that the configurations belong to."""
        return _code_below(self._root(self.configs.texts), self.plan.exclude)

    def _root(self, paths: Iterable[str]) -> str | None:
        return next((found for path in paths if (found := project_of(path))), None)

    def _find(self, paths: Sequence[str]) -> None:
        """Sorts every file that is meant."""
        search = Search(self.plan.exclude, self.plan.root)
        for found in search.files(paths):
            self._sort(found)
        if not self.code and not self.configs.texts and not self.scans.files:
            for path in paths:
                if os.path.isdir(path):  # noqa: PTH112 - as the user wrote it
                    self.scans.take_folder(path)
        self.existing = search.existing
        mirror = self._elsewhere.mirror
        for missed in [*search.missed, *(mirror.missed if mirror else ())]:
            spared = getattr(missed, "spared", False)
            omission = Omission.UNRELATED if spared else Omission.UNREADABLE
            self._leave_out(missed.path, missed.reason, omission)

    def _sort(self, found: FoundFiles) -> None:
        """Puts a file where it is checked, or says why it is not."""
        if found.named:
            self.named.add(_plain(found.path))
        if found.path == STDIN:
            self.named.add(STDIN_NAME)
            self._take_stdin()
            return
        kind = by_name(found.path)
        if is_launcher(found.path):
            self.scripts.append(found.path)
        if kind is FileKind.OTHER and not found.named:
            self._count(found.path)
            return
        try:
            with cpu_limit(_KIND_CPU_SECONDS):
                self._place(found, kind)
        except TooSlowError:
            self._leave_out(
                found.path, f"it took more than {_KIND_CPU_SECONDS:.0f} s to tell what it is"
            )
        except SourceError as error:
            self._leave_out(found.path, error.reason)
        except Exception as error:  # noqa: BLE001 - the other files have to be checked
            self._leave_out(found.path, failure(error))

    def _place(self, found: FoundFiles, kind: FileKind | None) -> None:
        path = found.path
        if found.named or may_be_scanned(path):
            head = read_head(path, SCAN_HEAD)
            scanned = scanned_as(path, head)
            if scanned is not None:
                self.scans.take(scanned, path)
                return
            kind = kind_of(path, head[:KIND_BYTES])
        if kind is FileKind.CONFIG:
            self._take_config(path, read_bytes(path, CONFIG_LIMIT), found.named)
        elif kind in (FileKind.PYTHON, FileKind.NOTEBOOK):
            self.code.append((path, kind))
        elif kind is None or (kind is FileKind.OTHER and not found.named):
            self._count(path)
        else:
            self._leave_out(path, _unruled(kind), Omission.UNKNOWN)

    def _scan(self) -> None:
        """Reads data, checkpoints and logs, and the data that configurations point to."""
        if any(may_point(text.content) for text in self.configs.texts.values()):
            self._point()
        if not self.scans.files and not self.scans.requests:
            return
        from nanguard.check.workers import Workers

        meter = Meter(self.scans.size(), self.plan.scanned)
        mirror = self._elsewhere.mirror
        scan = replace(self.plan.scan, progress=meter)
        if mirror is not None:
            scan = replace(scan, bring=mirror.bring)
        with Workers() as workers:
            if scan.spread is in_threads:
                scan = replace(scan, spread=workers.spread)
            try:
                for file in self.scans.check(self.plan.selection, scan):
                    self.outcome.add(file)
            finally:
                meter.stopped = True

    def _point(self) -> None:
        from nanguard.check.data.pointers import requests_of

        try:
            found = self.scans.files.get("data", [])
            self.scans.requests = requests_of(self.configs.runs(), found)
        except Exception as error:  # noqa: BLE001 - what is in the folders has to be checked
            self._leave_out("data that configurations point to", failure(error))

    def _take_config(self, path: str, data: bytes, named: bool) -> None:  # noqa: FBT001
        kind = kind_of(path, data[:KIND_BYTES])
        if kind is FileKind.NOTEBOOK:
            self.code.append((path, kind))
        elif kind is not FileKind.CONFIG:
            self._leave_out(path, _unruled(kind), Omission.UNKNOWN)
        elif not named and not may_configure(data):
            self._leave_out(path, NO_TRAINING, Omission.UNRELATED, expected=True)
        else:
            decoded = decode(path, data, python=False)
            text = Text(path, decoded.content, decoded.bom)
            sure = named or by_name(path) is not None
            if not self.configs.read(text, sure=sure, named=named):
                self._count(path)

    def _take_stdin(self) -> None:
        try:
            data = read_stdin(NOTEBOOK_LIMIT)
            kind = kind_of(STDIN_NAME, data[:KIND_BYTES])
            scanned = scanned_as(STDIN_NAME, data[:SCAN_HEAD])
            if scanned is not None:
                self.scans.take(scanned, self._elsewhere.put(STDIN_NAME, data))
            elif kind is FileKind.CONFIG:
                self._take_config(STDIN_NAME, data, named=True)
            elif kind in (FileKind.PYTHON, FileKind.NOTEBOOK):
                self.outcome.add(check_bytes(STDIN_NAME, data, kind, self.plan.selection))
            else:
                self._leave_out(STDIN_NAME, _unruled(kind), Omission.UNKNOWN)
        except SourceError as error:
            self._leave_out(STDIN_NAME, error.reason)

    def _leave_out(
        self,
        path: str,
        reason: str,
        omission: Omission = Omission.UNREADABLE,
        *,
        expected: bool = False,
    ) -> None:
        self.outcome.not_checked.append(NotChecked(path, reason, omission, expected=expected))

    def _count(self, path: str) -> None:
        name = path.replace("\\", "/").rpartition("/")[2]
        ending = f".{name.rpartition('.')[2]}" if "." in name[1:] else "no ending"
        self._others[ending] = self._others.get(ending, 0) + 1

    def _finish(self) -> None:
        """Adds what concerns no single file, and puts everything in order."""
        for origin, why in sorted(broken().items()):
            self._leave_out(origin, f"it could not be loaded: {why}")
        if self._others:
            most = sorted(self._others.items(), key=lambda item: (-item[1], item[0]))
            listed = ", ".join(f"{ending} {count}" for ending, count in most[:8])
            total, more = sum(self._others.values()), ", ..." if len(most) > 8 else ""
            files = "1 file is" if total == 1 else f"{total} files are"
            reason = f"{files} of kinds without rules ({listed}{more})"
            self._leave_out("other files", reason, Omission.UNKNOWN, expected=True)
        self.outcome.checked.sort()
        self.outcome.seen.sort(
            key=lambda s: (s.finding.path or "", s.finding.line or 0, s.finding.column or 0)
        )


def _code_below(root: str | None, exclude: tuple[str, ...]) -> list[str]:
    """Returns the Python files of a project, up to a number that can be looked through."""
    if root is None:
        return []
    found = (entry.path for entry in Search(exclude, root).files([root]))
    return [path for path in islice(found, _MOST_AROUND) if path.endswith(_CODE)]


def _as_named(path: str) -> str:
    """Returns a path as somebody would name it who stands in the current folder."""
    here = os.path.join(Path.cwd(), "")  # noqa: PTH118 - with a separator at its end
    return path.removeprefix(here)


def _plain(path: str) -> str:
    """Returns a path as every part of a check writes it."""
    return path if "://" in path else str(Path(path))


def _unruled(kind: FileKind) -> str:
    if kind in SCANNED:
        return f"no reader knows this kind of {kind.value}"
    if kind is FileKind.BINARY:
        return "it is a binary file of unknown kind"
    return "it is neither Python code, a notebook, a configuration, data, a checkpoint nor a log"
