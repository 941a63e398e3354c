"""A checkpoint as rules read it: its files, their numbers, and the run it belongs to."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.byte_ranges import (
    Blob,
    DamagedError,
    FileBlob,
    UnreadableError,
    Window,
    read,
)
from nanguard.check.checkpoint.run_checkpoints import POINTER, is_pickle, is_safetensors
from nanguard.check.checkpoint.safetensors import read_safetensors
from nanguard.check.checkpoint.tensor_roles import (
    TensorRole,
    infinities_meant,
    large_values_meant,
    role_of,
    role_of_file,
)
from nanguard.check.checkpoint.tensor_scan import measure_all
from nanguard.check.checkpoint.tensor_tree import TensorTree
from nanguard.check.checkpoint.torch_file import TorchFile, beyond_weights_only, read_torch
from nanguard.errors import SourceError, installing

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from nanguard.check.checkpoint.tensor_scan import TensorNumbers
    from nanguard.check.checkpoint.tensors import StoredTensor
    from nanguard.check.scan import Scan

_KIB64 = 1 << 16
# From here on a value is unusual for a weight, whatever its type.
LARGE_WEIGHT = 1e4
# Weights beyond this are not learned any more, whatever their type.
EXPLODED = 1e6
_PARAMETER = re.compile(
    r"(?:.*\.)?(?:weights?|bias|kernel|running_\w+)|\w*model\w*|\w*state_dict|params|net\w*"
)
_CALLED_MODEL = re.compile(r"model|ck?pt|checkpoint|weight|param|net|snapshot|state|optim|^m\.")
# Half of what fp16 can hold.
NEARLY_HALF = 32768


@dataclass(frozen=True, slots=True)
class Measured:
    """A tensor and what its numbers are.

    Attributes:
        name: What it is called.
        role: What it is for.
        dtype: The type of its numbers, as torch calls it.
        shape: Its shape.
        numbers: What its numbers are; all zero for whole numbers.
        scale: What quantised numbers are multiplied by; None for others.
        attribute: Whether it belongs to an object that is no module, such as a normaliser.
    """

    name: str
    role: TensorRole
    dtype: str
    shape: tuple[int, ...]
    numbers: TensorNumbers
    scale: float | None = None
    attribute: bool = False

    @property
    def poisoned(self) -> bool:
        """Whether it holds numbers that are not finite and not meant to be so."""
        if self.scale is not None and not abs(self.scale) < float("inf"):
            return True
        if not self.numbers.nonfinite:
            return False
        if self.role is TensorRole.RECORD:
            return False
        return self.role in (TensorRole.OPTIMIZER, TensorRole.SCALER) or not infinities_meant(
            self.name, self.shape, self.numbers
        )

    @property
    def stands_out(self) -> bool:
        """Whether anything about its numbers is unusual."""
        numbers = self.numbers
        return self.poisoned or bool(numbers.nonfinite) or numbers.largest > LARGE_WEIGHT

    @property
    def large_meant(self) -> bool:
        """Whether large values are there on purpose."""
        return self.attribute or large_values_meant(self.name, self.shape, self.numbers)

    @property
    def exploded(self) -> bool:
        """Whether it is a weight that is far too large to be learned."""
        if self.role not in (TensorRole.WEIGHT, TensorRole.EMA) or self.poisoned:
            return False
        largest = self.numbers.largest
        if largest <= NEARLY_HALF or self.large_meant:
            return False
        if self.dtype == "float16":  # where nothing can be much larger
            return self.name.endswith("weight")
        return largest > EXPLODED


@dataclass(slots=True)
class CheckpointFile:
    """One file.

    Attributes:
        path: The file.
        size: How many bytes it has.
        tensors: Its tensors.
        count: How many tensors it has.
        scalars: Plain numbers that are not finite, by name, with what they are for.
        needs: Classes and functions it needs that torch refuses to load with ``weights_only``.
        counters: Whole numbers at its root, such as the step.
        damage: What is not there that should be.
        unread: How many tensors could not be followed.
        not_checked: Why it was not read; None if it was.
        is_pointer: Whether it stands for a file that Git LFS has not fetched.
        is_data: Whether it is a pickle in which nothing is of torch, and not called a model:
            a data set, as far as anything tells.
    """

    path: str
    size: int = 0
    tensors: list[Measured] = field(default_factory=list)
    count: int = 0
    scalars: list[tuple[str, TensorRole, float]] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    unread: int = 0
    not_checked: str | None = None
    is_data: bool = False
    is_pointer: bool = False

    @property
    def poisoned(self) -> list[Measured]:
        """The tensors with numbers that are not finite."""
        return [tensor for tensor in self.tensors if tensor.poisoned]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be read of a file.

    Attributes:
        path: The file.
        numbers: Whether numbers are read, or only what the file says about itself.
        slices: The parts of the file that are files of their own, each with the name of its
            tensor; None if the file is read as a whole.
    """

    path: Path
    numbers: bool = True
    slices: tuple[tuple[str, int, int], ...] | None = None


def read_part(path: Path, scan: Scan) -> CheckpointFile:
    """Reads a file of a checkpoint, all of it.

    Args:
        path: The file.
        scan: How to scan.
    """
    return _read(Job(path), scan)


def read_job(job: Job, scan: Scan) -> CheckpointFile:
    """Reads a file as asked, and keeps only the tensors that something can be said about."""
    part = _read(job, scan)
    part.tensors = [tensor for tensor in part.tensors if tensor.stands_out]
    return part


def _read(job: Job, scan: Scan) -> CheckpointFile:
    part = CheckpointFile(str(job.path))
    try:
        with scan.at_hand(job.path) as here, FileBlob(here, part.path) as blob:
            part.size = blob.size
            if job.slices is None:
                _fill(part, blob, job, scan)
            else:
                _fill_slices(part, blob, job, scan)
    except UnreadableError as error:
        # Loading would run what comes before the damage.
        part.needs += beyond_weights_only(error.names, PurePath(part.path).name)
        part.is_data = _is_data(part.path, error.names)
        if isinstance(error, DamagedError):
            part.damage.append(str(error))
        else:
            part.not_checked = str(error)
    except SourceError as error:
        part.not_checked = error.what
    except ModuleNotFoundError as error:
        part.not_checked = f"it needs {error.name}: {installing('scan')}"
    except (OSError, MemoryError) as error:
        part.not_checked = f"{type(error).__name__}: {error}"
    return part


def _fill(part: CheckpointFile, blob: Blob, job: Job, scan: Scan) -> None:
    head = read(blob, 0, _KIB64)
    name = PurePath(part.path).name
    missing = _nothing(head)
    part.is_pointer = head.startswith(POINTER)
    if missing:
        raise DamagedError(missing)
    if name.endswith(".safetensors") or is_safetensors(head):
        _add(part, read_safetensors(blob), job, scan)
        return
    if not head.startswith((b"PK\3\4", b"\x80")) and not is_pickle(head):
        raise DamagedError("it begins as no checkpoint does: it is damaged or something else")
    found: TorchFile = read_torch(blob)
    part.needs = beyond_weights_only(found.names, name, script=found.script)
    keys = {key for tensor, _ in found.tree.tensors for key in tensor.keys}
    parameters = any(_PARAMETER.fullmatch(key) for key in keys)
    part.is_data = _is_data(part.path, found.names) and not parameters
    _add(part, found.tree, job, scan)


def _is_data(path: str, names: Iterable[str]) -> bool:
    """Returns whether a pickle is a data set: nothing in it is of torch, nor is it called so."""
    name = PurePath(path).name.lower()
    if not name.endswith((".pkl", ".pickle")) or _CALLED_MODEL.search(name):
        return False
    return not any(asked.startswith("torch") for asked in names)


def _nothing(head: bytes) -> str:
    """Returns why there is no checkpoint at all; empty if there may be one."""
    if not head:
        return "the file is empty"
    if head.startswith(POINTER):
        return "the file is a pointer of Git LFS: the checkpoint itself was never fetched"
    if not head.strip(b"\0"):
        return "the file begins with nothing but zeros: it was made and never written"
    return ""


def _fill_slices(part: CheckpointFile, blob: Blob, job: Job, scan: Scan) -> None:
    """Reads the files that a file is made of, each of which holds a tensor or an object."""
    merged = TensorTree()
    for name, offset, size in job.slices or ():
        if offset + size > blob.size:
            raise DamagedError(f"{name} ends at byte {offset + size:,} of {blob.size:,}")
        found = read_torch(Window(blob, offset, size))
        for tensor, optimizer in found.tree.tensors:
            merged.tensors.append((replace(tensor, keys=(name, *tensor.keys)), optimizer))
        part.needs += beyond_weights_only(found.names, PurePath(part.path).name)
        merged.unread += found.tree.unread
    part.needs = list(dict.fromkeys(part.needs))
    _add(part, merged, job, scan)


def _add(part: CheckpointFile, tree: TensorTree, job: Job, scan: Scan) -> None:
    """Measures the tensors of a tree and adds them to a part."""
    part.count += len(tree.tensors)
    part.damage += tree.damage
    part.unread += tree.unread
    part.counters.update(tree.counters)
    about = _file_role(part, [tensor for tensor, _ in tree.tensors])
    for keys, value, optimizer in tree.scalars:
        role = role_of(keys, dimensions=0, optimizer=optimizer, file=about)
        role = TensorRole.RECORD if part.is_data else role
        part.scalars.append((".".join(keys), role, value))
    if not job.numbers:
        return
    tensors = [tensor for tensor, _ in tree.tensors]
    measured = measure_all(tensors, threads=scan.threads, progress=scan.progress)
    for (tensor, optimizer), numbers in zip(tree.tensors, measured, strict=True):
        role = role_of(tensor.keys, dimensions=len(tensor.shape), optimizer=optimizer, file=about)
        role = TensorRole.RECORD if part.is_data else role
        dtype, shape = tensor.dtype.name, tensor.shape
        part.tensors.append(
            Measured(
                tensor.name, role, dtype, shape, numbers, tensor.scale, attribute=tensor.attribute
            )
        )


def _file_role(part: CheckpointFile, tensors: Sequence[StoredTensor]) -> TensorRole | None:
    """Returns what a file is for by its name, unless its tree tells parts of it apart."""
    about = role_of_file(PurePath(part.path))
    if about is not TensorRole.EMA:
        return about
    for tensor in tensors:
        if role_of(tensor.keys, dimensions=1, optimizer=False, file=None) is TensorRole.EMA:
            return None
    return about


_COUNTERS = ("global_step", "step", "steps", "iteration", "iter", "it", "num_updates", "epoch")


@dataclass(slots=True, eq=False)
class Checkpoint:
    """One checkpoint: a file, or a folder of files that belong together.

    Attributes:
        path: The file or folder.
        name: Its own name.
        step: The step or epoch it is of; None if nothing says so.
        parts: What is in its files.
        missing: What should be there and is not.
        scanned: Whether its numbers were read; not all are where there are hundreds.
        run: The run it belongs to; None if it stands alone.
        files: Every file it was read from.
    """

    path: str
    name: str
    step: int | None
    parts: list[CheckpointFile]
    missing: list[tuple[str, str]] = field(default_factory=list)
    scanned: bool = True
    run: CheckpointRun | None = field(default=None, repr=False)
    files: list[str] = field(default_factory=list)

    @property
    def read_from(self) -> list[str]:
        """Every file it was read from."""
        return self.files

    @property
    def not_read(self) -> list[tuple[str, str]]:
        """Why it was not checked, or not all of it."""
        error = self._error()
        if error is None:
            return []
        return [(error.where if error.where in self.files else self.path, error.reason)]

    def _error(self) -> SourceError | None:
        if not self.scanned:
            what = "Its numbers were not read: the run has too many checkpoints to read them all."
            return SourceError(what, where=self.path, do="Name it alone to have it checked.")
        for part in self.parts:
            why = part.not_checked
            if why is None and part.unread:
                why = f"{part.unread:,} tensors are stored in a way that is not known"
            if why is not None:
                do = "Look at the file with the library that wrote it."
                return SourceError(f"Not checked: {why}.", where=part.path, do=do)
        return None

    @property
    def damaged(self) -> bool:
        """Whether something is missing."""
        return bool(self.missing) or any(part.damage for part in self.parts)

    @property
    def good(self) -> bool:
        """Whether a run can be resumed from it."""
        if self.damaged or not self.scanned or any(part.not_checked for part in self.parts):
            return False
        return not any(part.poisoned or _bad_scalars(part) for part in self.parts) and not any(
            True for _ in self.exploded()
        )

    @property
    def bad(self) -> bool:
        """Whether a run cannot be resumed from it."""
        read = self.scanned and not any(part.not_checked for part in self.parts)
        return self.damaged or (read and not self.good)

    def exploded(self) -> Iterator[tuple[CheckpointFile, Measured]]:
        """Yields weights that are far too large to be learned."""
        for part in self.parts:
            for tensor in part.tensors:
                if tensor.exploded:
                    yield part, tensor


@dataclass(slots=True, eq=False)
class CheckpointRun:
    """Checkpoints of one run, oldest first.

    Attributes:
        checkpoints: The checkpoints.
    """

    checkpoints: list[Checkpoint]

    @property
    def last_good(self) -> Checkpoint | None:
        """The newest checkpoint that a run can be resumed from."""
        return next((one for one in reversed(self.checkpoints) if one.good), None)

    @property
    def bad(self) -> list[Checkpoint]:
        """The checkpoints that a run cannot be resumed from."""
        return [one for one in self.checkpoints if one.bad]

    @property
    def first_bad(self) -> Checkpoint | None:
        """The checkpoint from which on none is good."""
        good = self.last_good
        rest = self.checkpoints[self.checkpoints.index(good) + 1 :] if good else self.checkpoints
        return next((one for one in rest if one.bad), None)


def step_of(parts: list[CheckpointFile]) -> int | None:
    """Returns the step that the files of a checkpoint say; the most telling counter wins."""
    for name in _COUNTERS:
        for part in parts:
            if part.counters.get(name, -1) >= 0:
                return part.counters[name]
    return None


def bad_scalars(part: CheckpointFile) -> list[tuple[str, float]]:
    """Returns plain numbers of optimizers and scalers that are not finite.

    Infinity is a common setting for "no limit"; NaN is none for anything.
    """
    found = []
    for name, role, value in part.scalars:
        if role not in (TensorRole.OPTIMIZER, TensorRole.SCALER):
            continue
        leaf = name.rsplit(".", 1)[-1]
        if value != value or leaf in ("lr", "scale", "_scale", "cur_scale"):
            found.append((name, value))
    return found


def _bad_scalars(part: CheckpointFile) -> bool:
    return bool(bad_scalars(part))
