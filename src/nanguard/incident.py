"""Incidents on disk: one folder per bad step, complete or not there, and only ever read."""

from __future__ import annotations

import json
import math
import os
import stat
from typing import TYPE_CHECKING, Any

from nanguard.errors import IncidentError
from nanguard.masking import hidden_tree
from nanguard.run_folder import make_private, open_private

if TYPE_CHECKING:
    from pathlib import Path

SCHEMA = "nanguard.incident/1"
NAME = "incident.json"
# The variable that keeps batches of training data out of incidents; second runs have to know, too.
NO_BATCH = "NANGUARD_NO_BATCH"
# A larger file was not written by us.
_LIMIT = 16 << 20


def new_folder(incidents: Path, step: int, rank: int) -> Path:
    """Makes the folder for an incident; another of the same step gets a number at its end."""
    name = f"step-{step:06d}-rank{rank}"
    for number in range(1, 10000):
        folder = incidents / (name if number == 1 else f"{name}-{number}")
        try:
            make_private(incidents)
            make_private(folder, exist_ok=False)
        except FileExistsError:
            continue
        return folder
    raise IncidentError(
        f"there are thousands of incidents of step {step} already.",
        where=str(incidents),
        do="Give an empty folder: nanguard run --incidents DIR -- ...",
    )


def write(folder: Path, incident: dict[str, Any]) -> None:
    """Writes an incident; a reader sees the old one or the new one, and nothing in between.

    Keys and passwords are hidden, wherever in it they stand.
    """
    make_private(folder)
    path = folder / NAME
    draft = folder / f".{NAME}.{os.getpid()}"
    text = json.dumps(hidden_tree(_plain(incident)), indent=1, ensure_ascii=False, allow_nan=False)
    with open_private(draft) as file:
        file.write(f"{text}\n".encode())
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read(path: Path) -> dict[str, Any]:
    """Reads an incident from its folder or from ``incident.json``.

    Raises:
        IncidentError: If it is not one that this version can read.
    """
    file = path / NAME if path.is_dir() else path
    try:
        # A device or a pipe would never end.
        if not stat.S_ISREG(file.stat().st_mode):
            raise IncidentError(
                f"{file.name} is not a file.",
                where=str(file),
                do="Give the folder of an incident, such as .nanguard/runs/NAME/step-000007-rank0.",
            )
        with file.open("rb") as opened:
            content = opened.read(_LIMIT + 1)
        if len(content) > _LIMIT:
            raise IncidentError(
                f"{file.name} is larger than {_LIMIT >> 20} MiB, which no incident is.",
                where=str(file),
                do="Look whether this is the file you meant.",
            )
        incident = json.loads(content.decode("utf-8"))
    except OSError as error:
        raise IncidentError(
            f"there is no incident to read: {error.strerror}.",
            where=str(file),
            do="Give the folder of an incident, such as .nanguard/runs/NAME/step-000007-rank0.",
        ) from error
    except (ValueError, RecursionError) as error:
        raise IncidentError(
            f"{file.name} is not complete JSON ({error}).",
            where=str(file),
            do="The file was damaged after it was written; run the command again for a new one.",
        ) from error
    return _checked(incident, file)


def newest_first(folder: Path) -> list[Path]:
    """Returns the incidents that runs have left below a folder, the newest first."""
    found = [path for path in (folder / ".nanguard").glob(f"**/{NAME}") if path.is_file()]
    return sorted(found, key=lambda path: -path.stat().st_mtime)


def _checked(incident: Any, file: Path) -> dict[str, Any]:
    schema = incident.get("schema") if isinstance(incident, dict) else None
    if not isinstance(schema, str) or schema.rpartition("/")[0] != SCHEMA.rpartition("/")[0]:
        raise IncidentError(
            f"this is no incident: its schema is {str(schema)[:80]!r}.",
            where=str(file),
            do=f"Give a folder that holds an {NAME} of schema {SCHEMA}.",
        )
    if schema != SCHEMA:
        raise IncidentError(
            f"the incident has the schema {schema[:80]!r}; this version reads {SCHEMA!r}.",
            where=str(file),
            do="Read it with the version of nanguard that wrote it, or a newer one.",
        )
    for key, kind in _FIELDS.items():
        if key in incident and incident[key] is not None and not isinstance(incident[key], kind):
            raise IncidentError(
                f"the field {key!r} holds {type(incident[key]).__name__}, not {kind.__name__}.",
                where=str(file),
                do="The file was changed after it was written; run the command again.",
            )
    return dict(incident)


_FIELDS: dict[str, type] = {
    "step": int,
    "rank": int,
    "sentence": str,
    "symptom": dict,
    "origin": dict,
    "cause": dict,
    "evidence": list,
    "samples": list,
    "fixes": list,
    "replay": dict,
}


def _plain(value: Any) -> Any:
    """Returns a value that JSON can hold; non-finite numbers become their names."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return value
