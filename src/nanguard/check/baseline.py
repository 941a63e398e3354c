"""The findings a project knows about already, so that only new ones count.

An entry names the rule, the file and the line of source, not its number: code may move.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from typing import TYPE_CHECKING, Any

from nanguard.errors import SettingsError
from nanguard.source.writing import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from nanguard.check.outcome import Seen

    Key = tuple[str, str, str]

_SCHEMA = "nanguard.baseline/1"
_LARGEST = 64 << 20
_TEXT = 200


class Baseline:
    """What is known, and how often.

    Args:
        file: Where it is kept; paths in it are relative to its folder.
        known: How often each finding is known.
    """

    def __init__(self, file: Path, known: Counter[Key]) -> None:
        self._file = file
        self._known = known

    @classmethod
    def read(cls, file: Path) -> Baseline:
        """Reads a baseline.

        Raises:
            SettingsError: It is none.
        """
        try:
            known = Counter({_entry(e): int(e["count"]) for e in _entries(_told(file))})
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            said = getattr(error, "strerror", None) or error
            raise SettingsError(
                f"the baseline cannot be read: {said}.",
                where=str(file),
                do="Write it anew: nanguard check --write-baseline FILE PATH",
            ) from error
        return cls(file, known)

    @classmethod
    def of(cls, file: Path, seen: Iterable[Seen]) -> Baseline:
        """Returns the baseline in which everything found is known."""
        return cls(file, Counter(_key(one, file.parent) for one in seen))

    def write(self) -> None:
        """Writes the baseline.

        Raises:
            SettingsError: The file cannot be written.
        """
        entries = [
            {"path": path, "name": name, "text": text, "count": count}
            for (path, name, text), count in sorted(self._known.items())
        ]
        told = json.dumps({"schema": _SCHEMA, "findings": entries}, indent=1) + "\n"
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, told.encode())
        except OSError as error:
            raise SettingsError(
                f"the baseline cannot be written: {error.strerror}.",
                where=str(self._file),
                do="Choose another file.",
            ) from error

    def new(self, seen: Iterable[Seen]) -> list[Seen]:
        """Returns what is not known; of equal findings, those beyond the known number."""
        left = self._known.copy()
        out = []
        for one in seen:
            key = _key(one, self._file.parent)
            if left[key] > 0:
                left[key] -= 1
            else:
                out.append(one)
        return out

    def stale(
        self, seen: Iterable[Seen], checked: Sequence[str], rules: Iterable[str]
    ) -> list[str]:
        """Returns entries that nothing corresponds to any more, in words.

        Args:
            seen: Everything that was found.
            checked: The files that were looked at; entries of others may still hold.
            rules: The names of the rules that looked; likewise.
        """
        root = self._file.parent
        left = self._known - Counter(_key(one, root) for one in seen)
        looked, names = {_relative(path, root) for path in checked}, set(rules)
        return [
            f"{path}: {name}: {text}"
            for path, name, text in sorted(left)
            if name in names and (path in looked or not (root / path).exists())
        ]


def _told(file: Path) -> Any:
    if file.stat().st_size > _LARGEST:
        raise ValueError(f"it is larger than {_LARGEST >> 20} MB")
    return json.loads(file.read_bytes())


def _entries(told: Any) -> list[dict[str, Any]]:
    if not isinstance(told, dict) or told.get("schema") != _SCHEMA:
        raise ValueError(f"it does not begin with the schema {_SCHEMA}")
    entries = told["findings"]
    if not isinstance(entries, list):
        raise TypeError("its findings are no list")
    return entries


def _entry(entry: dict[str, Any]) -> Key:
    return str(entry["path"]), str(entry["name"]), str(entry["text"])


def _key(one: Seen, root: Path) -> Key:
    text = " ".join((one.text or one.finding.where or "").split())[:_TEXT]
    return _relative(one.finding.path or "", root), one.finding.name, text


def _relative(path: str, root: Path) -> str:
    return os.path.relpath(path, root).replace(os.sep, "/") if path else ""
