"""Snapshots on disk of a model that is sharded over ranks (FSDP2).

Every rank writes its shards through ``torch.distributed.checkpoint``, so that a run can be
resumed on another number of ranks. The first rank writes everything else, and gives the folder
its name when all of it is there.
"""

from __future__ import annotations

import io
import logging
import pickle
from collections import OrderedDict
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, cast

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    _StorageInfo,
    _StoragePrefix,
)
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.serialization import _get_layout

from nanguard.errors import SnapshotError
from nanguard.snapshots.disk import (
    STATE,
    Unfinished,
    damaged,
    finished,
    load_tree,
    save_tree,
    verify,
)
from nanguard.snapshots.training_state import map_tensors, tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor

log = logging.getLogger("nanguard")

_SHARDS = "shards"
_REFERENCE = "$tensor"


class ShardRanks(Protocol):
    """The ranks that write one snapshot together."""

    group: Any

    @property
    def first(self) -> bool:
        """Whether this rank does what is done once for all ranks."""

    def gather(self, mine: Any) -> list[Any]:
        """Returns what every rank has to say."""

    def any(self, flag: Tensor) -> Tensor:
        """Returns whether a 0-dim bool holds on any rank."""


class ShardedSnapshots:
    """A folder of sharded snapshots that always holds the last good one.

    Attributes:
        folder: Where they are; all ranks must see it.
        keep: How many are kept.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        ranks: ShardRanks,
        on_failure: Callable[[str], None],
        before_finish: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder = folder
        self.keep = keep
        self._ranks = ranks
        self._on_failure = on_failure
        self._before_finish = before_finish

    def write(
        self, tree: dict[str, Any], sharded: Sequence[str], *, update: int, step: int
    ) -> bool:
        """Writes a state; all ranks call it together. Returns whether it was written.

        Args:
            tree: The live state.
            sharded: The parts whose tensors are written by all ranks.
            update: How many updates the state has seen.
            step: The step it was taken after.
        """
        first = self._ranks.first
        unfinished = Unfinished(self.folder, update)
        error = _attempt(unfinished.create) if first else None
        path = Path(self._ranks.gather(str(unfinished.path))[0])
        tensors = dict(tensors_in({name: tree[name] for name in sharded}))
        if self._all_well(error):
            error = _attempt(
                lambda: save(
                    dict(tensors), checkpoint_id=path / _SHARDS, process_group=self._ranks.group
                )
            )
        if self._all_well(error) and first:
            rest = {name: part for name, part in tree.items() if name not in sharded}
            rest.update({name: _references(tree[name], name) for name in sharded})
            error = _attempt(lambda: save_tree(rest, path / STATE))
            self._before_finish()
            error = error or _attempt(
                lambda: unfinished.finish(update=update, step=step, keep=self.keep)
            )
        if first:
            unfinished.remove()
        written = self._all_well(error)
        if not written and first:
            self._on_failure(f"the snapshot after update {update}: {error or 'on another rank'}")
        return written

    def load_last_good(
        self,
        live: Callable[[], Mapping[str, Any]],
        parameters: Mapping[str, Sequence[Tensor]],
        use: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any] | None:
        """Uses the newest snapshot that is whole; returns its manifest, None if there is none.

        Args:
            live: Returns the live state, whose tensors say how the saved ones are to be sharded.
            parameters: The parameters of each optimizer part, in order, for the same purpose.
            use: Takes the state, or raises a SnapshotError if it does not fit.

        Raises:
            SnapshotError: If there are snapshots, but none that can be used on every rank.
        """
        candidates = iter(reversed(finished(self.folder))) if self._ranks.first else iter(())
        first: SnapshotError | None = None
        while (found := self._ranks.gather(_choose(candidates))[0]) is not None:
            error: SnapshotError | None = found if isinstance(found, SnapshotError) else None
            if not isinstance(found, SnapshotError):
                try:
                    use(self._load(Path(found[0]), live(), parameters))
                except SnapshotError as failed:
                    error = failed
            errors = [failed for failed in self._ranks.gather(error) if failed is not None]
            if not errors:
                return cast("dict[str, Any]", found[1])
            log.warning("nanguard: snapshot passed over: %s", errors[0])
            first = first or errors[0]
        if first is not None:
            raise first
        return None

    def _load(
        self, path: Path, live: Mapping[str, Any], parameters: Mapping[str, Sequence[Tensor]]
    ) -> dict[str, Any]:
        try:
            tree = load_tree(path / STATE)
            reader = _CheckedReader(path / _SHARDS)
            like = dict(tensors_in(live))
            kinds = reader.index.state_dict_metadata.items()
            wanted = {name: _empty(name, kind, like, parameters) for name, kind in kinds}
            load(wanted, storage_reader=reader, process_group=self._ranks.group)
            return cast("dict[str, Any]", _resolved(tree, wanted))
        except SnapshotError:
            raise
        except (Exception, CheckpointException) as error:  # a stranger's files
            raise damaged(path, f"its shards cannot be loaded ({error})") from error

    def _all_well(self, error: str | None) -> bool:
        return not any(self._ranks.gather(error))


def _choose(candidates: Iterator[Path]) -> tuple[str, dict[str, Any]] | SnapshotError | None:
    """Returns the next snapshot and its manifest, or why it is none; None at the end."""
    path = next(candidates, None)
    if path is None:
        return None
    try:
        return str(path), verify(path)
    except SnapshotError as error:
        return error


def _attempt(action: Callable[[], Any]) -> str | None:
    """Returns what went wrong, so that all ranks can hear of it before any of them gives up."""
    try:
        action()
    except (OSError, RuntimeError, CheckpointException, SnapshotError) as error:
        return str(error) or type(error).__name__
    return None


def _references(tree: Any, path: str) -> Any:
    """Returns a tree with the name of each tensor in its place."""
    names = iter([name for name, _ in tensors_in(tree, path)])
    return map_tensors(tree, lambda _tensor: {_REFERENCE: next(names)})


def _resolved(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Returns a tree with the tensors in the place of their names."""
    if isinstance(tree, dict):
        if set(tree) == {_REFERENCE}:
            return tensors[tree[_REFERENCE]]
        return {key: _resolved(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_resolved(value, tensors) for value in tree]
    return tree


def _empty(
    name: str,
    kind: Any,
    like: Mapping[str, Tensor],
    parameters: Mapping[str, Sequence[Tensor]],
) -> Tensor:
    """Returns a tensor to load a saved one into, sharded as the run has it now."""
    model = like.get(name)
    if model is None:
        part, *rest = name.split("/")
        if part in parameters and len(rest) > 2 and rest[0] == "state" and rest[1].isdigit():
            model = parameters[part][int(rest[1])]
    dtype = kind.properties.dtype
    if model is not None and model.shape == kind.size:
        return torch.empty_like(model, dtype=dtype, requires_grad=False)
    return torch.empty(kind.size, dtype=dtype)


class _CheckedReader(FileSystemReader):
    """Reads shards by an index that was checked, and not by what the file says meanwhile."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.index = _checked_index(path)

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        """Returns the checked index."""
        self.index.storage_meta = StorageMeta(load_id=self.load_id)
        return self.index


def _checked_index(path: Path) -> Metadata:
    """Returns the index of a sharded checkpoint. Nothing in it is run."""
    try:
        index = _IndexReader(io.BytesIO((path / ".metadata").read_bytes())).load()
        tensors: dict[str, Any] = index.state_dict_metadata
        others = [n for n, kind in tensors.items() if not isinstance(kind, TensorStorageMetadata)]
        files = {str(info.relative_path) for info in index.storage_data.values()}
    except Exception as error:  # a stranger's file can be wrong in any way
        raise damaged(path, f"its index cannot be read ({error})") from error
    if others:
        raise damaged(path, f"it holds more than tensors: {others[0]!r}")
    outside = [name for name in files if Path(name).name != name]
    if outside:
        raise damaged(path, f"its index names a file outside of it: {outside[0]!r}")
    checked: Metadata = index
    return checked


def _member(owner: Any, name: Any) -> Any:
    """Returns the member of an enumeration, as Python 3.11.0 to 3.11.3 write it."""
    if owner is not metadata._MEM_FORMAT_ENCODING or name not in owner.__members__:
        raise pickle.UnpicklingError("it asks for an attribute, which has no place in an index")
    return owner[name]


class _IndexReader(pickle._Unpickler):
    """Reads an index; refuses whatever an index is not made of.

    It makes objects of the few classes below and fills them. Nothing else can be called, and a
    class itself cannot be changed. Python's own unpickler in Python is the one that can be held
    to this.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        found = _KNOWN.get((module, name))
        if (module, name) == ("builtins", "getattr"):
            found = _member
        if found is None and module == "torch":
            dtype = getattr(torch, name, None)
            found = dtype if isinstance(dtype, torch.dtype) else None
        if found is None:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in an index")
        return found

    def load_build(self) -> None:
        """Fills an object, if it is one of those that may be filled."""
        if type(self.stack[-2]) not in _FILLED:  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it fills something that has no place in an index")
        super().load_build()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build


_FILLED = (
    metadata.Metadata,
    metadata.MetadataIndex,
    metadata.TensorStorageMetadata,
    metadata.BytesStorageMetadata,
    metadata.ChunkStorageMetadata,
    metadata.TensorProperties,
    metadata.StorageMeta,
    _StorageInfo,
    _StoragePrefix,
)
_KNOWN: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in _FILLED},
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): (
        metadata._MEM_FORMAT_ENCODING
    ),
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("pathlib", "PosixPath"): PurePath,
    ("pathlib", "WindowsPath"): PurePath,
    ("pathlib._local", "PosixPath"): PurePath,
    ("pathlib._local", "WindowsPath"): PurePath,
    ("collections", "OrderedDict"): OrderedDict,
}
