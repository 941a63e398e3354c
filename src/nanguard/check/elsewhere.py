"""Standard input and files that lie elsewhere: they have a place here for the time of a check."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tempfile
    from collections.abc import Sequence

    from nanguard.check.outcome import NotChecked, Outcome, Seen
    from nanguard.check.remote import Mirror


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
        from nanguard.check.remote import Mirror, is_remote

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
