"""Folders of ``torch.distributed.checkpoint``: a pickle that says which tensor is where."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.allowed import beyond_weights_only
from nanguard.check.checkpoint.blob import FileBlob
from nanguard.check.checkpoint.inert import Call, DamagedError, Table, TooLargeError
from nanguard.check.checkpoint.part import Job, Part
from nanguard.check.checkpoint.pickles import read_pickle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.check.scanning import Scan

METADATA = ".metadata"
ENDING = ".distcp"


def jobs_of(folder: Path, files: Sequence[Path], scan: Scan) -> tuple[list[Job], Part]:
    """Returns what is to be read of a folder, and what its own description says.

    Args:
        folder: The folder.
        files: The files of it.
        scan: How to scan.
    """
    about = Part(str(folder / METADATA))
    shards = {file.name: file for file in files if file.name.endswith(ENDING)}
    slices: dict[str, list[tuple[str, int, int]]] = {}
    try:
        with scan.at_hand(folder / METADATA) as here, FileBlob(here, about.path) as blob:
            about.size = blob.size
            found = read_pickle(blob)
        about.needs = beyond_weights_only(found.names, METADATA)
        slices = _slices(found.value)
    except FileNotFoundError:
        about.path = str(folder)
        about.damage.append(f"{METADATA}, which is written last, is missing")
    except DamagedError as error:
        about.damage.append(str(error))
    except (OSError, TooLargeError) as error:
        about.not_checked = str(error)
    about.damage += [f"{name} is missing" for name in slices if name not in shards]
    jobs = [
        Job(shards[name], slices=tuple(sorted(parts, key=lambda part: part[1])))
        for name, parts in sorted(slices.items())
        if name in shards
    ]
    return jobs, about


def _slices(value: object) -> dict[str, list[tuple[str, int, int]]]:
    """Returns what is in each file: names, offsets and sizes."""
    state = value.state if isinstance(value, Call) else None
    listed = state.get("storage_data") if isinstance(state, Table) else None
    if not isinstance(listed, (Table, Call)):
        raise DamagedError("the description of the checkpoint does not say where tensors are")
    found: dict[str, list[tuple[str, int, int]]] = {}
    for key, info in listed.pairs or []:
        name = _field(key, "fqn", 0)
        file, offset = _field(info, "relative_path", 0), _field(info, "offset", 1)
        size = _field(info, "length", 2)
        if not isinstance(file, str) or Path(file).name != file:
            raise DamagedError(f"a tensor is said to be in {str(file)[:60]!r}")
        if not isinstance(offset, int) or not isinstance(size, int) or offset < 0 or size < 0:
            raise DamagedError(f"{str(name)[:60]} has no place")
        if _field(info, "transform_descriptors", 3):
            raise TooLargeError("its tensors are stored in a transformed way")
        found.setdefault(file, []).append((str(name)[:300], offset, size))
    return found


def _field(made: object, name: str, index: int) -> object:
    """Returns a field of an object, which may be in its state or among its arguments."""
    if not isinstance(made, Call):
        return None
    state = made.state
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], Table):
        state = state[1]
    if isinstance(state, Table):
        return state.get(name)
    if isinstance(state, (list, tuple)) and index < len(state):
        return state[index]
    args = made.args if isinstance(made.args, tuple) else ()
    return args[index] if index < len(args) else None
