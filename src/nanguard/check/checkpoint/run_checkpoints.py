"""Which files are one checkpoint, and which checkpoints are one run."""

from __future__ import annotations

import json
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.paths import INDEX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from nanguard.check.checkpoint.checkpoint import Checkpoint

    Read = Callable[[Sequence["Unit"], bool], list[Checkpoint]]

# A folder of ``torch.distributed.checkpoint``: its description, and what its files end with.
METADATA = ".metadata"
DISTRIBUTED_ENDING = ".distcp"
_STEP = re.compile(r"(?:global_?)?(?:step|iter(?:ation)?|it)s?[-_=. ]?(\d+)", re.IGNORECASE)
_EPOCH = re.compile(
    r"(?<![a-z])(?:checkpoint|ckpt|chkpt|epoch|ep|e|snapshot)s?[-_=. ]?(\d+)", re.IGNORECASE
)
_NUMBER = re.compile(r"(?:^|[-_=. ])(\d+)(?=$|[-_=. ])")
_FOLDER = re.compile(
    r"(?:tmp[-_])?(?:checkpoint|ckpt|chkpt|global_?step|step|epoch|iter(?:ation)?|it|ep|snapshot)s?"
    r"[-_=.]?\d+(?:\D.*)?|\d{3,}",
    re.IGNORECASE,
)
# Numbers behind these words count something else than steps.
_OTHER = re.compile(
    r"(?:shard|rank|part|fold|seed|mp|pp|tp|dp|ep|stage|layer|layers|v|ver|version|size|of|expert"
    r"|worker|split|chunk|lora|r|rng|state|states|gpu|device|group|task|sampler|custom"
    r"|optimizer|scheduler|head|block|width|depth|dim|bs|batch)[-_=. ]?\d+$",
    re.IGNORECASE,
)
_SHARD = re.compile(r"(.+?)-(\d{5})-of-(\d{5})\.(safetensors|bin|pt|pth)")
_DIGITS = re.compile(r"\d+(?:\.\d+)?")
_LAST = frozenset({"last", "latest", "final", "current", "model", "pytorch_model", "adapter_model"})


def step_in(name: str) -> int | None:
    """Returns the step or epoch that a name says; None if it says none."""
    found = _STEP.findall(name) or _EPOCH.findall(name)
    if found:
        return int(found[-1][:18])
    stem = name.split(".")[0] or name
    for match in reversed(list(_NUMBER.finditer(stem))):
        if not _OTHER.search(stem[: match.end(1)]):
            return int(match[1][:18])
    return None


def is_step_folder(name: str) -> bool:
    """Returns whether a folder's name is that of one checkpoint of a run."""
    return _FOLDER.fullmatch(name) is not None


def is_leftover(name: str) -> bool:
    """Returns whether a folder's name is that of a checkpoint that is still being written."""
    return name.lower().startswith(("tmp-", "tmp_", "."))


def template(name: str) -> str:
    """Returns a name without its numbers, which checkpoints of one run have in common."""
    return _DIGITS.sub("#", name)


def shard_of(name: str) -> tuple[str, int, int] | None:
    """Returns the whole a file is a part of, which part it is, and how many there are."""
    match = _SHARD.fullmatch(name)
    return None if match is None else (match[1], int(match[2]), int(match[3]))


def is_last(name: str) -> bool:
    """Returns whether a name is that of the newest checkpoint of a run."""
    return name.split(".")[0].lower() in _LAST


POINTER = b"version https://git-lfs"
# What torch.save of old begins with: the pickle of a magic number.
LEGACY = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# What pickles of the oldest protocols begin with, which are text.
_TEXT = re.compile(
    rb"\(*(?:c[A-Za-z_][\w.]*\n[A-Za-z_][\w.]*\n(?:[()]|[pq]\d)|[dl]p\d+\n|i[\w.]+\n[A-Za-z_]\w*\n[p.])"
)
_SURE = (".pt", ".pth", ".ckpt", ".safetensors", ".distcp", ".pth.tar", ".pt.tar")
_MAYBE = (*_SURE, ".bin", ".tar", ".pkl", ".pickle", ".th", ".chkpt", ".model", ".pyt")
_WEIGHTS = re.compile(r"(?:pytorch_model|adapter_model|model|optimizer|diffusion_pytorch)\S*\.bin")
_IN_ARCHIVE = re.compile(
    rb"(?:[^/]+/)?(?:data\.pkl|constants\.pkl|byteorder|version|\.format_version"
    rb"|\.storage_alignment|\.data/.*|data/\d+|code/.*|extra/.*)"
)
_OTHERS = (
    b"\x89HDF",
    b"\x93NUMPY",
    b"PAR1",
    b"ARROW1",
    b"GGUF",
    b"\x1f\x8b",
    b"\x89PNG",
    b"\xff\xd8",
)
_LABELS = frozenset(
    {"label", "labels", "target", "targets", "y", "input_ids", "token_ids", "tokens"}
)
_FEATURES = frozenset(
    {"x", "feature", "features", "input", "inputs", "image", "images", "pixel_values", "data"}
)
_NAME = re.compile(rb'"((?:[^"\\]|\\.){1,300})"\s*:\s*\{\s*"(?:dtype|shape|data_offsets)"')


def recognises(path: Path, head: bytes) -> bool:
    """Returns whether a file is a checkpoint, or was to become one.

    Args:
        path: The file.
        head: Its first 64 KiB.
    """
    name = path.name.lower()
    if name == ".metadata":
        return head[:1] == b"\x80" and b"torch.distributed" in head
    if name.endswith(INDEX):
        return True
    if head.startswith(b"PK\3\4"):
        return name.endswith(_SURE) or name.endswith(".bin") or _archive(head)
    if is_pickle(head):
        return name.endswith(_MAYBE) or head.startswith(LEGACY)
    if is_safetensors(head):
        return not holds_data(head)
    return _was_to_be(name, head)


def is_pickle(head: bytes) -> bool:
    """Returns whether a file begins as a pickle does."""
    if head[:1] == b"\x80":
        return head[1:2] in (b"\0", b"\1", b"\2", b"\3", b"\4", b"\5")
    return _TEXT.match(head) is not None


def holds_data(head: bytes) -> bool:
    """Returns whether a safetensors file is a data set: labels or token ids, no parameters.

    Args:
        head: Its first bytes.
    """
    names = {name.decode("utf-8", "replace").lower() for name in _NAME.findall(head)}
    if not names or any("." in name or name in ("weight", "bias") for name in names):
        return False
    words = {
        re.sub(r"^(?:train|val|valid|test|eval)_|_(?:train|val|valid|test)$", "", n) for n in names
    }
    return bool(words & _LABELS) or words <= _FEATURES


def _archive(head: bytes) -> bool:
    """Returns whether an archive begins as those of torch do."""
    if len(head) < 30:
        return False
    size = struct.unpack_from("<H", head, 26)[0]
    return _IN_ARCHIVE.fullmatch(head[30 : 30 + size]) is not None


def is_safetensors(head: bytes) -> bool:
    """Returns whether a file begins with a safetensors header."""
    size = int.from_bytes(head[:8], "little")
    if not 2 <= size < 1 << 32 or head[8:9] != b"{":
        return False
    if size <= len(head) - 8:
        try:
            header = json.loads(head[8 : 8 + size])
        except (ValueError, RecursionError):
            return False
        return isinstance(header, dict) and all(
            isinstance(about, dict) and (key == "__metadata__" or "data_offsets" in about)
            for key, about in header.items()
        )
    return b'"data_offsets"' in head or b'"__metadata__"' in head[:64]


def _was_to_be(name: str, head: bytes) -> bool:
    """Returns whether a file has the name of a checkpoint and holds none, or only its beginning."""
    sure = name.endswith(_SURE) or _WEIGHTS.fullmatch(name) is not None
    if not sure:
        return False
    if not head or head.startswith(POINTER):
        return True
    if head.startswith(_OTHERS):
        return False
    return name.endswith(".safetensors") or b"\0" in head


MAX_FILES = 100_000
MAX_DEPTH = 5
CHECKPOINT_HEAD_BYTES = 1 << 16
_TOGETHER = frozenset(
    {"optimizer.pt", "optimizer.bin", "scheduler.pt", "scaler.pt", "scheduler.bin"}
)
_RANKS = ("mp_rank_", "zero_pp_rank_", "bf16_zero_pp_rank_")


@dataclass(frozen=True, slots=True)
class Unit:
    """The files of one checkpoint.

    Attributes:
        path: The file or folder.
        files: Its files.
        step: The step its name says.
    """

    path: Path
    files: tuple[Path, ...]
    step: int | None


def files_in(paths: Iterable[Path]) -> list[Path]:
    """Returns the files of checkpoints among paths and in folders among them."""
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found.update(dict.fromkeys(_inside(path)))
        else:
            found[path] = None
        if len(found) >= MAX_FILES:
            break
    return list(found)


def units_of(files: Sequence[Path]) -> list[list[Unit]]:
    """Returns runs, each a list of checkpoints in their order; most runs are of one.

    Args:
        files: All files that were found.
    """
    together: dict[Path, list[Path]] = {}
    beside: dict[Path, set[str]] = {}
    for file in files:
        beside.setdefault(file.parent, set()).add(file.name)
    for file in files:
        together.setdefault(_unit_path(file, beside[file.parent]), []).append(file)
    units = [
        Unit(path, tuple(sorted(members)), step_in(path.name))
        for path, members in sorted(together.items())
        if not is_leftover(path.name)
    ]
    return _runs(units)


def is_one_source(folder: Path) -> bool:
    """Returns whether a folder is one checkpoint or one run."""
    try:
        names = {entry.name: entry.is_dir() for entry in _entries(folder)}
    except OSError:
        return False
    files = {name for name, is_folder in names.items() if not is_folder}
    if METADATA in files or any(name.endswith((DISTRIBUTED_ENDING, *INDEX)) for name in files):
        return True
    if any(shard_of(name) or name.startswith(_RANKS) for name in files):
        return True
    steps = [name for name, is_folder in names.items() if is_folder and is_step_folder(name)]
    if any(_holds_any(folder / name) for name in steps[:3]):
        return True
    inside = [Path(folder, name) for name in files if step_in(name) is not None]
    kept = [path for path in inside if _recognised(path)]
    if len({template(path.name) for path in kept}) < len(kept):
        return True
    return is_step_folder(folder.name) and any(_recognised(folder / name) for name in files)


def _unit_path(file: Path, names: set[str]) -> Path:
    """Returns the file or folder that is the checkpoint a file belongs to."""
    steps = [folder for folder in list(file.parents)[:MAX_DEPTH] if is_step_folder(folder.name)]
    if steps:
        whole = steps[0]
        for outer in steps[1:]:  # a folder of the same step around it is the same checkpoint
            whole = outer if step_in(outer.name) == step_in(whole.name) else whole
        return whole
    if (
        file.name == METADATA
        or file.name.endswith((DISTRIBUTED_ENDING, *INDEX))
        or shard_of(file.name)
    ):
        return file.parent
    if file.name.startswith(_RANKS):
        return file.parent
    if names & _TOGETHER and step_in(file.name) is None:
        return file.parent
    return file


def _runs(units: list[Unit]) -> list[list[Unit]]:
    groups: dict[tuple[Path, str], list[Unit]] = {}
    alone: list[list[Unit]] = []
    for unit in units:
        if unit.step is None:
            alone.append([unit])
        else:
            groups.setdefault((unit.path.parent, template(unit.path.name)), []).append(unit)
    runs = [sorted(group, key=_order) for group in groups.values()]
    long = {group[0].path.parent: group for group in runs if len(group) > 1}
    rest = []
    for (unit,) in alone:
        run = long.get(unit.path.parent) or long.get(unit.path)
        if run is not None and (is_last(unit.path.name) or run is long.get(unit.path)):
            run.append(unit)
        else:
            rest.append([unit])
    return sorted([*runs, *rest], key=lambda run: run[0].path)


def _order(unit: Unit) -> tuple[int, str]:
    return unit.step or 0, unit.path.name


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return sorted((e for e, _ in zip(entries, range(MAX_FILES), strict=False)), key=_name)


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _inside(folder: Path) -> Iterator[Path]:
    """Yields the files of a run's folder: those in it, and those of checkpoints below it."""
    whole = is_one_source(folder)
    todo = [(folder, 0)]
    while todo:
        here, depth = todo.pop()
        try:
            entries = _entries(here)
        except OSError:
            continue
        for entry in entries:
            path = here / entry.name
            if entry.is_dir(follow_symlinks=False):
                below = depth > 0 or not whole or is_step_folder(entry.name)
                if depth < MAX_DEPTH and below:
                    todo.append((path, depth + 1))
            elif entry.is_file() and _recognised(path):
                yield path


def _recognised(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return recognises(path, file.read(CHECKPOINT_HEAD_BYTES))
    except OSError:
        return False


def _holds_any(folder: Path) -> bool:
    return next(_inside(folder), None) is not None


# How many checkpoints are read only to see whether bad ones really come after good ones.
WITNESSES = 6


def read_run_in_part(units: Sequence[Unit], read: Read) -> list[Checkpoint]:
    """Reads the checkpoints that tell from which one on a run is bad.

    Numbers that are not finite stay: once a checkpoint has them, every later one does. So the
    first bad one is found by halving. That the run is of this kind is not taken for granted: some
    more checkpoints are read, and all of them if one of those does not fit. What files say about
    themselves is read of every checkpoint.

    Args:
        units: The checkpoints, oldest first.
        read: Reads some of them, with or without their numbers.
    """
    found = read(units, False)  # noqa: FBT003
    whole = [index for index, one in enumerate(found) if not one.damaged]
    bad: dict[int, bool] = {}

    def is_bad(at: int) -> bool:
        if at not in bad:
            (found[whole[at]],) = read([units[whole[at]]], True)  # noqa: FBT003
            bad[at] = not found[whole[at]].good
        return bad[at]

    low, high = 0, len(whole)  # below low all are good; from high on all are bad
    if whole and not is_bad(len(whole) - 1):
        low = high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if is_bad(middle) else (middle + 1, high)
    witnesses = {len(whole) * n // WITNESSES for n in range(WITNESSES)} if whole else set()
    if any(is_bad(at) != (at >= low) for at in sorted(witnesses)):
        for at in range(len(whole)):
            is_bad(at)
    return found
