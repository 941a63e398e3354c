"""Outcomes of files that have not changed, kept from one check to the next.

The cache is a convenience: whatever is wrong with it, the files are checked as if there were none.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard import __version__
from nanguard.check.code.project import torch_floor
from nanguard.check.outcome import FileOutcome, NotChecked, Omission, Seen
from nanguard.check.rule import plugins
from nanguard.errors import SourceError
from nanguard.findings import Finding, Fix, Severity
from nanguard.source.text import PYTHON_LIMIT, own_folder, read_bytes, write_atomically

if TYPE_CHECKING:
    from nanguard.check.selection import Selection

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
        self._made_by = f"{_program()}|{selection!r}"
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


def _program() -> str:
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
