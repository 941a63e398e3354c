"""From what the user names, files, folders, patterns, to the files that are looked at."""

from __future__ import annotations

import glob
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from pathspec import GitIgnoreSpec

_NAME = ".gitignore"
_GITIGNORE_BYTES = 1 << 20


class Ignored:
    """Decides for every file and folder below a folder; folders are entered from the top."""

    def __init__(self, top: str, exclude: Iterable[str], root: str) -> None:
        """Reads the patterns that hold for a folder as a whole.

        Args:
            top: The folder that is walked.
            exclude: Patterns of the settings.
            root: The folder those are relative to.
        """
        self._specs: dict[str, GitIgnoreSpec] = {}
        self._root = _full(root)
        patterns = list(exclude)
        self._exclude = _spec(patterns) if patterns else None
        self._read_above(Path(_full(top)))

    def enter(self, folder: str, names: Collection[str]) -> None:
        """Reads the ``.gitignore`` of a folder, if there is one among its names."""
        if _NAME in names:
            self._read(_full(folder), _NAME)

    def __call__(self, path: str, *, folder: bool) -> bool:
        """Returns whether a file or folder is left out."""
        if not self._specs and self._exclude is None:
            return False
        full = _full(path)
        if self._exclude is not None and full.startswith(f"{self._root}/"):
            below = full[len(self._root) + 1 :]
            if _verdict(self._exclude, below, folder=folder):
                return True
        return self._by_git(full, folder=folder)

    def _by_git(self, full: str, *, folder: bool) -> bool:
        """Returns what the nearest ``.gitignore`` that speaks of a path says."""
        at = full.rfind("/")
        while at >= 0:
            spec = self._specs.get(full[:at] or "/")
            if spec is not None:
                verdict = _verdict(spec, full[at + 1 :], folder=folder)
                if verdict is not None:
                    return verdict
            at = full.rfind("/", 0, at)
        return False

    def _read_above(self, top: Path) -> None:
        """Reads the patterns of the repository a folder lies in."""
        above = [top, *top.parents]
        repository = next((folder for folder in above if (folder / ".git").exists()), None)
        if repository is None:
            return
        self._read(repository.as_posix(), ".git/info/exclude")
        for folder in above[1 : above.index(repository) + 1]:
            self._read(folder.as_posix(), _NAME)
        if top != repository and self._by_git(top.as_posix(), folder=True):
            # Whoever names an ignored folder means it.
            self._specs.clear()

    def _read(self, folder: str, name: str) -> None:
        try:
            with (Path(folder) / name).open(encoding="utf-8", errors="replace") as file:
                lines = file.read(_GITIGNORE_BYTES).splitlines()
        except OSError:
            return
        lines = [line for line in lines if line.strip() and not line.startswith("#")]
        spec = _spec(lines) if lines else None
        if spec is None:
            return
        known = self._specs.get(folder)
        self._specs[folder] = spec if known is None else known + spec


def _full(path: str) -> str:
    # Not resolved: what a link is called is what the patterns speak of.
    return os.path.abspath(path).replace(os.sep, "/")  # noqa: PTH100


def _spec(lines: list[str]) -> GitIgnoreSpec | None:
    from pathspec import GitIgnoreSpec

    good = []
    for line in lines:
        try:
            GitIgnoreSpec.from_lines([line])
        except ValueError:  # git overlooks patterns it does not understand, too
            continue
        good.append(line)
    return GitIgnoreSpec.from_lines(good) if good else None


def _verdict(spec: GitIgnoreSpec, below: str, *, folder: bool) -> bool | None:
    return spec.check_file(f"{below}/" if folder else below).include


STDIN = "-"
_SKIPPED = frozenset(
    (
        ".git", ".hg", ".svn", ".bzr", ".venv", "venv", ".env", ".tox", ".nox", ".eggs", ".direnv",
        ".pyenv", "__pypackages__", "node_modules", "site-packages", "dist-packages", "__pycache__",
        ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".ipynb_checkpoints",
        ".import_linter_cache", ".nanguard", ".vscode", ".idea", ".cache",
    )
)  # fmt: skip
_MARKS = ("pyvenv.cfg", "CACHEDIR.TAG")
_COPY = "_fixed"
_TESTS = re.compile(r"(^|/)((unit_?)?tests?|test_?(scripts?|cases|suite|runs|utils))/")
_STARS = re.compile(r"(?:^|(?<=/))\*\*(?:/|$)")


def in_tests(path: str) -> bool:
    """Returns whether a file lies in a folder of tests, going by the folder's name."""
    return _TESTS.search(path.replace("\\", "/")) is not None


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """A file to look at.

    Attributes:
        path: The file, as the user would name it.
        named: Whether the user named it, rather than a folder it is in.
    """

    path: str
    named: bool


@dataclass(slots=True)
class Missed:
    """What was named or met and cannot be looked at.

    Attributes:
        path: The file or folder.
        reason: Why.
        spared: Whether it could be looked at, and is left out on purpose.
    """

    path: str
    reason: str
    spared: bool = False


@dataclass(slots=True)
class Search:
    """Walks what the user named, once.

    Attributes:
        exclude: Patterns, as in a ``.gitignore``, of what is left out of folders.
        root: The folder the patterns are relative to.
        missed: What could not be looked at, after the walk.
        existing: How many of the named paths there are, after the walk.
    """

    exclude: tuple[str, ...] = ()
    root: str = "."
    missed: list[Missed] = field(default_factory=list)
    existing: int = 0
    _seen: set[str] = field(default_factory=set)

    def files(self, paths: Iterable[str]) -> Iterator[FoundFiles]:
        """Yields every file once, in a fixed order."""
        for path in paths:
            yield from self._once(self._one(path))

    def _once(self, found: Iterable[FoundFiles]) -> Iterator[FoundFiles]:
        for file in found:
            key = os.path.abspath(file.path)  # noqa: PTH100 - a Path for every file of a tree is slow
            if key not in self._seen:
                self._seen.add(key)
                yield file

    def _one(self, path: str) -> Iterator[FoundFiles]:
        if path == STDIN:
            self.existing += 1
            yield FoundFiles(STDIN, named=True)
            return
        try:
            mode = os.stat(path).st_mode  # noqa: PTH116 - may be no path at all
        except (OSError, ValueError) as error:
            yield from self._absent(path, error)
            return
        self.existing += 1
        if stat.S_ISDIR(mode):
            yield from self._folder(path)
        elif stat.S_ISREG(mode):
            yield FoundFiles(path, named=True)
        else:
            self.missed.append(Missed(path, "it is not a regular file"))

    def _absent(self, path: str, error: OSError | ValueError) -> Iterator[FoundFiles]:
        if not isinstance(error, FileNotFoundError) or not glob.has_magic(path):
            known = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
            reason = f"it cannot be read: {error.strerror}" if known else "there is no such file"  # type: ignore[union-attr]
            self.missed.append(Missed(path, reason))
            return
        matches = sorted({m for m in _matching(path) if not is_skipped(m)})
        if not matches:
            self.missed.append(Missed(path, "no file matches this pattern"))
        for match in matches:
            if os.path.isfile(match):  # noqa: PTH113
                self.existing += 1
                yield FoundFiles(match, named=True)

    def _folder(self, top: str) -> Iterator[FoundFiles]:
        ignored = Ignored(top, self.exclude, self.root)
        stack = [top]
        while stack:
            folder = stack.pop()
            try:
                with os.scandir(folder) as entries:
                    members = sorted(entries, key=lambda entry: entry.name)
            except OSError as error:
                self.missed.append(Missed(folder, f"it cannot be read: {error.strerror}"))
                continue
            names = {entry.name for entry in members}
            if folder != top and not names.isdisjoint(_MARKS):
                continue
            ignored.enter(folder, names)
            yield from self._members(members, names, ignored, stack)

    def _members(
        self, members: list[os.DirEntry[str]], names: set[str], ignored: Ignored, stack: list[str]
    ) -> Iterator[FoundFiles]:
        below = []
        for entry in members:
            path = entry.path.removeprefix("./") if entry.path.startswith("./") else entry.path
            if entry.is_dir(follow_symlinks=False):
                if entry.name not in _SKIPPED and not ignored(path, folder=True):
                    below.append(path)
            elif ignored(path, folder=False):
                continue
            elif original := _original(entry.name, names):
                reason = f"it is the repaired copy of {original}; name it to check it"
                self.missed.append(Missed(path, reason, spared=True))
            elif _is_file(entry):
                yield FoundFiles(path, named=False)
        stack.extend(reversed(below))


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError:
        return False


def is_skipped(path: str) -> bool:
    """Returns whether a file lies in a folder that nobody wants to be looked into."""
    return not _SKIPPED.isdisjoint(path.replace(os.sep, "/").split("/")[:-1])


def _matching(pattern: str) -> Iterator[str]:
    """Yields what a pattern matches; ``**`` follows no links, which may lead round in circles."""
    stars = _STARS.search(pattern)
    if stars is None:
        yield from glob.iglob(pattern)  # noqa: PTH207
        return
    above, below = pattern[: stars.start()], pattern[stars.end() :] or "*"
    for top in glob.iglob(above) if glob.has_magic(above) else [above]:  # noqa: PTH207
        for folder, names, _ in os.walk(top or "."):
            names[:] = [n for n in names if not n.startswith(".") and n not in _SKIPPED]
            start = glob.escape(folder.rstrip("/")) + "/"
            yield from _matching((start if top else start.removeprefix("./")) + below)


def _original(name: str, names: set[str]) -> str | None:
    stem, dot, ending = name.rpartition(".")
    if not stem.endswith(_COPY) or ending not in ("yaml", "yml", "json", "toml"):
        return None
    original = stem.removesuffix(_COPY) + dot + ending
    return original if original in names else None
