"""Files that are not on this disk: standard input, ``s3://``, ``gs://`` and what fsspec knows.

Each gets a stand-in here: small files whole, large ones with their first bytes and their size, but
without what lies between. That is enough to tell what they are. A large file is brought here as a
whole only while it is read.
"""

from __future__ import annotations

import contextlib
import posixpath
import re
import shutil
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.check.paths import SCAN_HEAD, FileKind, Missed, by_name, is_skipped
from nanguard.errors import SourceError, installing

if TYPE_CHECKING:
    import tempfile
    from collections.abc import Iterable, Iterator, Sequence

    from nanguard.check.outcome import NotChecked, Outcome, Seen

_SCHEME = re.compile(r"(?!file:)[a-z][a-z0-9+.-]*(?:::[a-z][a-z0-9+.-]*)*://", re.IGNORECASE)
_WHOLE_BYTES = 1 << 20  # bytes; up to here a stand-in is the file itself
_FILES_AT_ONCE = 64
_CHUNK_BYTES = 8 << 20
_MOST_LISTED = 500_000
_ROOM_LEFT_BYTES = 1 << 30  # bytes of the disk that are left alone
_MAGIC = re.compile(r"[*?\[]")


class NoMatchError(FileNotFoundError):
    """A pattern that nothing matches."""


def is_remote(path: str) -> bool:
    """Returns whether a path leads elsewhere."""
    return _SCHEME.match(path) is not None


@dataclass(frozen=True, slots=True)
class Distant:
    """A file that lies elsewhere.

    Attributes:
        url: Where.
        size: How many bytes it has.
        whole: Whether its stand-in holds all of them.
    """

    url: str
    size: int
    whole: bool


@dataclass(slots=True)
class Mirror:
    """Stand-ins for files that lie elsewhere.

    Attributes:
        folder: Where the stand-ins are.
        files: What each of them stands for.
        tops: The address that each path the user named has here.
        missed: What could not be reached, and why.
    """

    folder: Path
    files: dict[str, Distant] = field(default_factory=dict)
    tops: dict[str, str] = field(default_factory=dict)
    missed: list[Missed] = field(default_factory=list)

    def take(self, url: str) -> list[str]:
        """Makes stand-ins for what an address leads to; returns those that the user named."""
        try:
            system, listed = _listed(url)
        except Exception as error:  # noqa: BLE001 - every service raises errors of its own
            self.missed.append(Missed(url, _said(error)))
            return []
        root, base = self.folder / str(len(self.tops)), _common(listed)
        named, wanted = [], []
        for top, names in listed.items():
            here = _place(root, base, top) or root / "top"
            self.tops[str(here)] = str(system.unstrip_protocol(top))
            named.append(str(here))
            wanted += [(here, top, name, size) for name, size in names.items()]
        self._stand_in(system, [one for one in wanted if not is_skipped(one[2])])
        return named

    def _stand_in(self, system: Any, wanted: list[tuple[Path, str, str, int]]) -> None:
        """Writes the stand-ins, a batch at a time."""
        rest = iter(wanted)
        while batch := list(islice(rest, _FILES_AT_ONCE)):
            places = [_place(here, top, name) for here, top, name, _ in batch]
            ends = [_wanted_of(name, size) for _, _, name, size in batch]
            found = _heads(system, [name for _, _, name, _ in batch], ends)
            for place, head, (_, _, name, size) in zip(places, found, batch, strict=True):
                self._write(place, head, str(system.unstrip_protocol(name)), size)

    def _write(self, place: Path | None, head: bytes | Exception, url: str, size: int) -> None:
        if place is None:
            self.missed.append(Missed(url, "its name leads out of its folder"))
            return
        if isinstance(head, Exception):
            self.missed.append(Missed(url, _said(head)))
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        with place.open("wb") as file:
            file.write(head)
            file.truncate(max(size, len(head)))
        self.files[str(place)] = Distant(url, size, whole=len(head) >= size)

    def name_of(self, text: str) -> str:
        """Returns a text in which every stand-in has the name of what it stands for."""
        mark = str(self.folder)
        if mark not in text:
            return text
        for here, url in sorted(self.tops.items(), reverse=True):
            text = text.replace(here, url.rstrip("/"))
        return text

    @contextlib.contextmanager
    def bring(self, path: Path) -> Iterator[Path]:
        """Gives a file that can be read, as long as the context lasts.

        Raises:
            SourceError: It cannot be brought here.
        """
        distant = self.files.get(str(path))
        if distant is None or (distant.whole and path.exists()):
            yield path
            return
        import tempfile

        room = shutil.disk_usage(tempfile.gettempdir()).free - _ROOM_LEFT_BYTES
        if distant.size > room:
            raise SourceError(
                f"it has {distant.size >> 20} MB, and there is room for {max(0, room) >> 20} MB",
                where=distant.url,
                do="Set TMPDIR to a folder with more room.",
            )
        with tempfile.TemporaryDirectory(prefix="nanguard-") as folder:
            here = Path(folder) / path.name
            _fetch(distant, here)
            yield here


def _listed(url: str) -> tuple[Any, dict[str, dict[str, int]]]:
    """Returns the service, and by each file or folder that is meant, the files and their sizes."""
    from fsspec.core import url_to_fs

    system, root = url_to_fs(url)
    if _MAGIC.search(url.partition("://")[2]) and not system.exists(root):
        matches = system.glob(root, detail=True)
        if not matches:
            raise NoMatchError(root)
        files = {n: i for n, i in matches.items() if i.get("type") == "file"}
        return system, {name: {name: _size(info)} for name, info in sorted(files.items())}
    info = system.info(root)
    if info.get("type") == "file":
        return system, {root: {root: _size(info)}}
    found = system.find(root, detail=True)
    if len(found) > _MOST_LISTED:
        raise OSError(f"it holds more than {_MOST_LISTED} files")
    return system, {root.rstrip("/"): {n: _size(i) for n, i in sorted(found.items())}}


def _size(info: dict[str, Any]) -> int:
    size = info.get("size")
    return int(size) if isinstance(size, (int, float)) and size > 0 else 0


def _common(tops: Iterable[str]) -> str:
    """Returns the folder that all of some names are in."""
    return posixpath.commonpath([top.rpartition("/")[0] for top in tops])


def _place(here: Path, top: str, name: str) -> Path | None:
    """Returns where the stand-in of a file goes; None if its name leads elsewhere."""
    if name == top:
        return here
    prefix = f"{top.rstrip('/')}/" if top else ""
    parts = name.removeprefix(prefix).split("/")
    if not name.startswith(prefix) or any(
        part in ("", ".", "..") or "\0" in part for part in parts
    ):
        return None
    return here.joinpath(*parts)


def _wanted_of(name: str, size: int) -> int:
    """Returns how many bytes of a file its stand-in gets; none if nobody would read them."""
    if by_name(name) is FileKind.OTHER:
        return 0
    return size if size <= _WHOLE_BYTES else SCAN_HEAD


def _heads(system: Any, names: list[str], ends: list[int]) -> list[bytes | Exception]:
    asked = [number for number, end in enumerate(ends) if end]
    found: list[bytes | Exception] = [b""] * len(names)
    some = [names[number] for number in asked]
    if some:
        stops = [ends[number] for number in asked]
        got = system.cat_ranges(some, [0] * len(some), stops, on_error="return")
        for number, head in zip(asked, got, strict=True):
            found[number] = head
    return found


def _fetch(distant: Distant, here: Path) -> None:
    """Copies a file here, a piece at a time."""
    import fsspec

    try:
        with fsspec.open(distant.url, "rb") as source, here.open("wb") as target:
            shutil.copyfileobj(source, target, _CHUNK_BYTES)
    except Exception as error:  # every service raises errors of its own
        raise SourceError(
            _said(error), where=distant.url, do="Try again, or copy the file first."
        ) from error
    if here.stat().st_size < distant.size:
        raise SourceError("it ended early while it was read", where=distant.url, do="Try again.")


def _said(error: Exception) -> str:
    if isinstance(error, NoMatchError):
        return "no file matches this pattern"
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if isinstance(error, ImportError):
        return f"it needs a package: {installing('remote')} (or fsspec's for this service)"
    lines = f"{type(error).__name__}: {error}".splitlines()
    return f"it cannot be reached: {lines[0][:200]}"


@dataclass(slots=True)
class Elsewhere:
    """Places here for what is no file here; used in a ``with``, after which they are gone.

    Attributes:
        mirror: Stand-ins of files that lie elsewhere; None as long as there are none.
    """

    mirror: Mirror | None = None
    _folder: tempfile.TemporaryDirectory[str] | None = None
    _names: dict[str, str] = field(default_factory=dict)

    def __enter__(self) -> Elsewhere:
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    def here(self, paths: Sequence[str]) -> list[str]:
        """Returns paths that can be walked, with stand-ins for those that lead elsewhere."""
        out: list[str] = []
        for path in paths:
            out += self._remote(path) if "://" in path else [path]
        return out

    def _remote(self, path: str) -> list[str]:
        if not is_remote(path):
            return [path.removeprefix("file://")]
        if self.mirror is None:
            self.mirror = Mirror(self._place() / "remote")
        return self.mirror.take(path)

    def put(self, name: str, data: bytes) -> str:
        """Writes what is no file into one; returns its path.

        Args:
            name: What it is called in the report.
            data: What it holds.
        """
        path = self._place() / "input"
        path.write_bytes(data)
        self._names[str(path)] = name
        return str(path)

    def rename(self, outcome: Outcome) -> None:
        """Gives everything in an outcome the name the user knows."""
        if self._folder is None:
            return
        outcome.seen = [self._seen(one) for one in outcome.seen]
        outcome.checked = [self._name(path) for path in outcome.checked]
        outcome.not_checked = [self._entry(entry) for entry in outcome.not_checked]
        for row in outcome.alignment:
            row.update({k: self._name(v) for k, v in row.items() if isinstance(v, str)})

    def _seen(self, seen: Seen) -> Seen:
        finding = seen.finding
        fixes = tuple(replace(fix, title=self._name(fix.title)) for fix in finding.fixes)
        named = replace(
            finding,
            path=self._name(finding.path or ""),
            message=self._name(finding.message),
            where=None if finding.where is None else self._name(finding.where),
            fixes=fixes,
        )
        return replace(seen, finding=named, diffs=tuple(map(self._name, seen.diffs)))

    def _entry(self, entry: NotChecked) -> NotChecked:
        return replace(entry, path=self._name(entry.path), reason=self._name(entry.reason))

    def _name(self, text: str) -> str:
        for here, name in self._names.items():
            text = text.replace(here, name)
        return text if self.mirror is None else self.mirror.name_of(text)

    def _place(self) -> Path:
        import tempfile

        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(
                prefix="nanguard-", ignore_cleanup_errors=True
            )
        return Path(self._folder.name)
