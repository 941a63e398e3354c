"""What ``.gitignore`` files leave out, nested ones and exceptions included."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from pathspec import GitIgnoreSpec

_NAME = ".gitignore"
_LARGEST = 1 << 20


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
                lines = file.read(_LARGEST).splitlines()
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
