"""Snapshots on disk: complete or not there, checked before they are trusted.

A snapshot is a folder. It is written under a temporary name, every file is flushed to the disk
and named with its size and SHA-256 in a manifest, and then the folder is renamed. Whatever dies
at whatever moment, a folder with the final name is whole, and the one before it is still there.

States are written as plain values, which a loader can read without running code:
``torch.load(weights_only=True)`` knows tensors and the plain containers. Schedulers and random
streams hold more than that: tuples, NumPy numbers, counters. They are written under a tag and come
back as they were.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import re
import shutil
import stat
import sys
import threading
import time
from collections import Counter, OrderedDict
from typing import IO, TYPE_CHECKING, Any, cast

import torch

from nanguard.errors import SnapshotError
from nanguard.run_folder import make_private, open_private

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from nanguard.snapshots.training_state import Snapshot

_TAG = "$type"
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_KEYS = (bool, int, float, str, type(None))
log = logging.getLogger("nanguard")

SCHEMA = "nanguard.snapshot/1"
_PREFIX = "snapshot-"
_NAME = re.compile(_PREFIX + r"[0-9]{1,12}-update-[0-9]{1,15}")
STATE = "state.pt"
_MANIFEST = "manifest.json"
_BLOCK = 1 << 22
_LARGEST_MANIFEST = 1 << 26


def portable(state: Any, path: str = "") -> Any:
    """Returns a state in types that can be loaded without running code.

    Args:
        state: A tree of containers, tensors and plain values.
        path: Where in a larger tree it stands, for the message if it cannot be done.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(state, numpy.generic):
        return {_TAG: "number", "of": portable_array(state.reshape(1))}
    if numpy is not None and isinstance(state, numpy.ndarray) and state.dtype != object:
        return {_TAG: "array", "of": portable_array(state)}
    if isinstance(state, dict):
        return _portable_dict(state, path)
    if isinstance(state, (list, tuple)) and not isinstance(state, torch.Size):
        items = [portable(value, f"{path}/{index}") for index, value in enumerate(state)]
        return items if isinstance(state, list) else {_TAG: "tuple", "of": items}
    if type(state) in _PLAIN or isinstance(state, (torch.Tensor, torch.Size)):
        return state
    for plain in (int, float, str):
        if isinstance(state, plain):  # an enumeration, say
            return plain(state)
    raise SnapshotError(
        f"{path.lstrip('/')} is of type {type(state).__name__}, which could not be loaded again "
        "without running code.",
        where="writing a snapshot",
        do="Keep plain values, lists, dicts and tensors in the state_dict of your own scheduler.",
    )


def _portable_dict(state: dict[Any, Any], path: str) -> dict[Any, Any]:
    kind = "dict"
    if isinstance(state, (Counter, OrderedDict)):
        kind = "counter" if isinstance(state, Counter) else "ordered"
    elif _TAG not in state and all(type(key) in _KEYS for key in state):
        return {key: portable(value, f"{path}/{key}") for key, value in state.items()}
    pairs = [
        [portable(key, f"{path}/{key}"), portable(value, f"{path}/{key}")]
        for key, value in state.items()
    ]
    return {_TAG: kind, "of": pairs}


def from_portable(state: Any) -> Any:
    """Returns the state that ``portable`` was given."""
    if isinstance(state, list):
        return [from_portable(value) for value in state]
    if not isinstance(state, dict):
        return state
    kind = state.get(_TAG)
    if kind is None:
        return {key: from_portable(value) for key, value in state.items()}
    if kind in ("array", "number"):
        array = _array_of(state["of"])
        return array if kind == "array" else array[0]
    if kind == "tuple":
        return tuple(from_portable(value) for value in state["of"])
    pairs = [(from_portable(key), from_portable(value)) for key, value in state["of"]]
    return {"counter": Counter, "ordered": OrderedDict, "dict": dict}[kind](dict(pairs))


def portable_array(array: Any) -> dict[str, Any]:
    """Returns a NumPy array as bytes in a tensor; torch does not know all of its types."""
    data = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.size else None
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def _array_of(saved: dict[str, Any]) -> Any:
    import numpy as np

    data = b"" if saved["data"] is None else saved["data"].numpy().tobytes()
    return np.frombuffer(data, dtype=saved["dtype"]).reshape(saved["shape"]).copy()


class DiskSnapshots:
    """A folder of snapshots that always holds the last good one.

    Attributes:
        folder: Where they are.
        keep: How many are kept.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        on_failure: Callable[[str], None],
        before_finish: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self._on_failure = on_failure
        self._before_finish = before_finish
        self._jobs: queue.Queue[Snapshot | None] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None

    def write_later(self, snapshot: Snapshot) -> bool:
        """Writes a good snapshot in the background; returns False if one is being written."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name="nanguard-snapshots", daemon=True
            )
            self._thread.start()
        try:
            self._jobs.put_nowait(snapshot.hold())
        except queue.Full:
            snapshot.release()
            return False
        return True

    def close(self) -> None:
        """Waits until what was handed over is written."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (snapshot := self._jobs.get()) is not None:
            try:
                self.write(snapshot.tree, update=snapshot.update, step=snapshot.step)
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                why = getattr(error, "what", error)
                self._on_failure(f"the snapshot after update {snapshot.update}: {why}")
            finally:
                snapshot.release()

    def write(self, tree: dict[str, Any], *, update: int, step: int) -> Path:
        """Writes a state and returns its folder. Nothing half-written is ever left behind."""
        with Unfinished(self.folder, update) as unfinished:
            save_tree(tree, unfinished.path / STATE)
            self._before_finish()
            return unfinished.finish(update=update, step=step, keep=self.keep)

    def load_last_good(self, use: Callable[[dict[str, Any]], None]) -> dict[str, Any] | None:
        """Uses the newest snapshot that is whole; returns its manifest, None if there is none.

        A damaged snapshot is passed over with a warning, never loaded.

        Args:
            use: Takes the state, or raises a SnapshotError if it does not fit.

        Raises:
            SnapshotError: If there are snapshots, but none that can be used. A run that began
                anew without a word would be worse.
        """
        # What is still being written may be the newest.
        self.close()
        first: SnapshotError | None = None
        for path in reversed(finished(self.folder)):
            try:
                manifest = verify(path)
                use(load_tree(path / STATE))
            except SnapshotError as error:
                log.warning("nanguard: snapshot passed over: %s", error)
                first = first or error
            else:
                return manifest
        if first is not None:
            raise first
        return None


class Unfinished:
    """A snapshot folder under its temporary name; gone afterwards unless it was finished."""

    def __init__(self, folder: Path, update: int) -> None:
        self._folder = folder
        # Numbered in the order of writing: after a rollback, a smaller update is the newer one.
        name = f"{_PREFIX}{_next_number(folder):06d}-update-{update}"
        self._final = folder / name
        self.path = folder / f".{name}.{os.getpid()}.tmp"

    def __enter__(self) -> Unfinished:
        self.create()
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()

    def create(self) -> None:
        """Makes the folder."""
        make_private(self._folder)
        self.remove()
        make_private(self.path, exist_ok=False)

    def remove(self) -> None:
        """Deletes what was not finished."""
        shutil.rmtree(self.path, ignore_errors=True)

    def finish(self, *, update: int, step: int, keep: int) -> Path:
        """Writes the manifest, gives the folder its name, and rotates older ones out."""
        files = sorted(p for p in self.path.rglob("*") if p.is_file())
        manifest = {
            "schema": SCHEMA,
            "update": update,
            "step": step,
            "written": time.time(),
            "torch": torch.__version__,
            "files": {p.relative_to(self.path).as_posix(): _fingerprint(p) for p in files},
        }
        manifest_path = self.path / _MANIFEST
        manifest_path.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        for path in (*files, manifest_path):
            path.chmod(0o600)
            _flush(path)
        for folder in {path.parent for path in files} | {self.path}:
            _flush(folder)
        self.path.rename(self._final)
        _flush(self._folder)
        self._rotate(keep)
        return self._final

    def _rotate(self, keep: int) -> None:
        for path in finished(self._folder)[:-keep]:
            # A folder being deleted must not look finished if the process dies half-way.
            doomed = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def finished(folder: Path) -> list[Path]:
    """Returns the snapshots of a folder that carry their final name, oldest first."""
    if not folder.is_dir():
        return []
    numbered = [(_number(p), p) for p in folder.iterdir() if _NAME.fullmatch(p.name) and p.is_dir()]
    return [path for _, path in sorted(numbered)]


def _number(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX).split("-")[0])


def _next_number(folder: Path) -> int:
    return 1 + max(map(_number, finished(folder)), default=0)


def remove_leftovers(folder: Path) -> None:
    """Deletes what a process that died left behind under a temporary name."""
    if folder.is_dir():
        for path in folder.glob(f".{_PREFIX}*"):
            if not _alive(path):
                shutil.rmtree(path, ignore_errors=True)


def verify(path: Path) -> dict[str, Any]:
    """Returns a snapshot's manifest; raises if anything in the folder is not as it says."""
    try:
        manifest: dict[str, Any] = _read_manifest(path / _MANIFEST)
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["schema"] != SCHEMA:
            raise damaged(path, f"its schema is {manifest['schema']!r}, not {SCHEMA!r}")
        for name, expected in files.items():
            member = path / name
            if path.resolve() not in member.resolve().parents:
                raise damaged(path, f"its manifest names a file outside of it: {name!r}")
            if _fingerprint(member) != expected:
                raise damaged(path, f"{name} does not match its checksum")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise damaged(path, f"its manifest cannot be read ({error})") from error
    return manifest


def _read_manifest(path: Path) -> dict[str, Any]:
    if _regular(path).st_size > _LARGEST_MANIFEST:
        raise ValueError("it is too large")
    manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if not all(isinstance(manifest[key], int) for key in ("update", "step")):
        raise ValueError("it does not say which update it is of")
    if STATE not in manifest["files"]:
        raise ValueError(f"it does not name {STATE}")
    return manifest


def _regular(path: Path) -> os.stat_result:
    """Returns the status of a plain file; a pipe would make its reader wait for ever."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is not a plain file")
    return status


def save_tree(tree: dict[str, Any], path: Path) -> None:
    """Writes a state in such a form that it can be loaded without running anything."""
    with open_private(path) as file:
        noted = _Noting(file)
        try:
            torch.save(portable(tree), cast("IO[bytes]", noted))
        except RuntimeError as error:
            # Torch says "unexpected pos" about whatever the system said.
            raise noted.error or error from error


class _Noting:
    """A file that keeps what the system says about a write that failed.

    Attributes:
        error: That; None if none failed.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        """Writes all of it."""
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        """Hands everything to the system."""
        try:
            self._file.flush()
        except OSError as error:
            self.error = error
            raise


def load_tree(path: Path) -> dict[str, Any]:
    """Returns a saved state without running anything from the file."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)  # noqa: TID251
        tree = from_portable(saved)
    except Exception as error:  # a stranger's file can be wrong in any way
        raise damaged(path, f"it cannot be loaded ({error})") from error
    if not isinstance(tree, dict):
        raise damaged(path, f"it holds a {type(tree).__name__}, not a state")
    return tree


def damaged(path: Path, why: str) -> SnapshotError:
    """Returns the error for a snapshot that cannot be trusted."""
    return SnapshotError(
        f"the snapshot is damaged: {why}.",
        where=str(path),
        do="Use an older snapshot; this one is passed over and can be deleted.",
    )


def _fingerprint(path: Path) -> dict[str, Any]:
    _regular(path)
    digest = hashlib.sha256()
    size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _alive(path: Path) -> bool:
    try:
        os.kill(int(path.name.split(".")[2]), 0)
    except (ValueError, IndexError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
