"""Every repaired copy of a configuration, kept with what was changed and why."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.source.writing import own_folder, write_atomically

if TYPE_CHECKING:
    from nanguard.check.outcome import Repair

_SCHEMA = "nanguard.configs/1"
_MOST = 200
_LARGEST = 32 << 20
_STRANGE = re.compile(r"[^A-Za-z0-9._-]+")


def keep(folder: Path, repair: Repair, data: bytes) -> str:
    """Keeps a repaired copy, and the file it is going to replace if nothing else has it.

    Args:
        folder: Where the history is.
        repair: What was repaired, how and why.
        data: The copy.

    Returns:
        Why it could not be kept; empty if it was.
    """
    told = repair.to_json()
    why = {"changes": told["changes"], "diff": told["diff"]}
    try:
        own_folder(folder)
        entries = _entries(folder)
        known = {entry.get("sha256") for entry in entries}
        entries += _replaced(folder, repair, data, known)
        if _is_last(entries, repair, data):
            return ""
        entries.append(_stored(folder, repair, data) | why)
        for old in entries[:-_MOST]:
            _forget(folder, old)
        kept = {"schema": _SCHEMA, "entries": entries[-_MOST:]}
        write_atomically(folder / "index.json", (json.dumps(kept, indent=1) + "\n").encode())
    except OSError as error:
        return f"the history of configurations cannot be written: {error.strerror}"
    return ""


def _is_last(entries: list[dict[str, Any]], repair: Repair, data: bytes) -> bool:
    """Returns whether the newest copy of a file is the same one."""
    own = [entry for entry in entries if entry.get("file") == repair.path]
    return bool(own) and own[-1].get("sha256") == _sha(data)


def _replaced(folder: Path, repair: Repair, data: bytes, known: set[Any]) -> list[dict[str, Any]]:
    """Keeps a file of the user's that happens to have the name of the copy."""
    place = Path(repair.target)
    if not place.is_file() or place.stat().st_size > _LARGEST:
        return []
    before = place.read_bytes()
    if before == data or _sha(before) in known:
        return []
    return [_stored(folder, repair, before) | {"changes": [], "diff": "", "replaced": True}]


def _stored(folder: Path, repair: Repair, data: bytes) -> dict[str, Any]:
    place = Path(repair.target)
    sha = _sha(data)
    stem = _STRANGE.sub("_", place.stem)[:80].lstrip(".") or "config"
    ending = _STRANGE.sub("_", place.suffix)[:10]
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{sha[:8]}{ending}"
    write_atomically(folder / name, data)
    return {
        "file": repair.path,
        "target": repair.target,
        "copy": name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "sha256": sha,
    }


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
