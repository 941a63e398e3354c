"""Every repaired copy of a configuration, kept with what was changed and why."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any

from nanguard.engine.writing import own_folder, write_atomically

_SCHEMA = "nanguard.configs/1"
_MOST = 200
_LARGEST = 32 << 20
_STRANGE = re.compile(r"[^A-Za-z0-9._-]+")


def keep(
    folder: Path, path: str, target: str, data: bytes, changes: list[dict[str, Any]], diff: str
) -> str:
    """Keeps a repaired copy, and the file it is going to replace if nothing else has it.

    Args:
        folder: Where the history is.
        path: The configuration.
        target: Where the copy is going to be.
        data: The copy.
        changes: What was changed and why.
        diff: The same as a unified diff.

    Returns:
        Why it could not be kept; empty if it was.
    """
    try:
        own_folder(folder)
        entries = _entries(folder)
        entries += _replaced(folder, path, target, data, {entry.get("sha256") for entry in entries})
        entries.append(_stored(folder, path, target, data) | {"changes": changes, "diff": diff})
        for old in entries[:-_MOST]:
            _forget(folder, old)
        told = {"schema": _SCHEMA, "entries": entries[-_MOST:]}
        write_atomically(folder / "index.json", (json.dumps(told, indent=1) + "\n").encode())
    except OSError as error:
        return f"the history of configurations cannot be written: {error.strerror}"
    return ""


def _replaced(
    folder: Path, path: str, target: str, data: bytes, known: set[Any]
) -> list[dict[str, Any]]:
    """Keeps a file of the user's that happens to have the name of the copy."""
    place = Path(target)
    if not place.is_file() or place.stat().st_size > _LARGEST:
        return []
    before = place.read_bytes()
    if before == data or _sha(before) in known:
        return []
    return [_stored(folder, path, target, before) | {"changes": [], "diff": "", "replaced": True}]


def _stored(folder: Path, path: str, target: str, data: bytes) -> dict[str, Any]:
    place = Path(target)
    sha = _sha(data)
    stem = _STRANGE.sub("_", place.stem)[:80].lstrip(".") or "config"
    ending = _STRANGE.sub("_", place.suffix)[:10]
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{sha[:8]}{ending}"
    write_atomically(folder / name, data)
    when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return {"file": path, "target": target, "copy": name, "time": when, "sha256": sha}


def _entries(folder: Path) -> list[dict[str, Any]]:
    try:
        if (folder / "index.json").stat().st_size > _LARGEST:
            return []
        told = json.loads((folder / "index.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return []
    entries = told.get("entries") if isinstance(told, dict) else None
    return [e for e in entries if isinstance(e, dict)] if isinstance(entries, list) else []


def _forget(folder: Path, entry: dict[str, Any]) -> None:
    """Removes an old copy, if its name is one that this module gives."""
    name = entry.get("copy")
    if isinstance(name, str) and re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
