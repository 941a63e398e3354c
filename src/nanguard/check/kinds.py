"""What kind of file a file is: by what it holds, with its name as a first guess."""

from __future__ import annotations

import re
from enum import Enum
from importlib import import_module
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.check.scan import Scan

KIND_BYTES = 8192
SCAN_HEAD = 64 << 10
# What the list of the files of a checkpoint is called.
INDEX = (".safetensors.index.json", ".bin.index.json")


class FileKind(str, Enum):
    """What can be done with a file."""

    PYTHON = "Python code"
    NOTEBOOK = "notebook"
    CONFIG = "configuration"
    DATA = "data"
    CHECKPOINT = "checkpoint"
    LOG = "log"
    BINARY = "binary file"
    OTHER = "other"


# What is scanned, by the name of the package that reads it; in the order in which they are asked.
SCANNED = {FileKind.LOG: "log", FileKind.DATA: "data", FileKind.CHECKPOINT: "checkpoint"}

_ENDINGS = {
    FileKind.PYTHON: ".py .pyw .pyi",
    FileKind.NOTEBOOK: ".ipynb",
    FileKind.CONFIG: ".yaml .yml .json .json5 .jsonc .toml",
    FileKind.DATA: ".csv .tsv .jsonl .ndjson .parquet .npy .npz .arrow .feather .h5 .hdf5 .lmdb "
    ".tfrecord .mat",
    FileKind.CHECKPOINT: ".pt .pth .ckpt .bin .safetensors .distcp .pkl .pickle .onnx .gguf",
    FileKind.LOG: ".log .tfevents .wandb",
    FileKind.OTHER: ".md .rst .html .css .js .ts .sh .bat .c .cc .cpp .cu .cuh .h .hpp .java .rs "
    ".go .lua .rb .png .jpg .jpeg .gif .svg .webp .ico .bmp .tif .tiff .mp3 .mp4 .wav .flac .ogg "
    ".avi .mov .mkv .webm .pdf .gz .bz2 .xz .zip .tar .tgz .7z .zst .whl .egg .so .dll .dylib .a "
    ".o .pyc .pyo .pyd .class .jar .exe .ttf .woff .woff2 .otf .lock .xml .tex .bib .patch .diff",
}
_BY_ENDING = {ending: kind for kind, endings in _ENDINGS.items() for ending in endings.split()}
_MAGIC = (
    (b"\x93NUMPY", FileKind.DATA),
    (b"PAR1", FileKind.DATA),
    (b"ARROW1", FileKind.DATA),
    (b"\x89HDF", FileKind.DATA),
    (b"PK\x03\x04", FileKind.CHECKPOINT),
    (b"\x80\x02", FileKind.CHECKPOINT),
    (b"GGUF", FileKind.CHECKPOINT),
)
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_SHEBANG = re.compile(rb"#!.*\bpython[\d.]*\b")
_IMPORT = re.compile(rb"^(?:import [\w.]+|from [\w.]+ import )", re.MULTILINE)
_DEFINITION = re.compile(rb"^(?:def|class) \w.*:\s*(?:#.*)?$", re.MULTILINE)
_KEY = re.compile(rb"^[ \t]*(?:- )?[\w.\"'/-]+[ \t]*(?::(?:\s|$)|=)", re.MULTILINE)
_TABLE = re.compile(rb"^\[\[?[\w.\"' -]+\]\]?\s*$", re.MULTILINE)
_CALLED_CONFIG = re.compile(r"^[^.]*$|conf|cfg|settings|h?params|options|\.(?:ini|gin|yaml|yml)")
_STEP = re.compile(rb"\b(?:step|epoch|iter)(?:\w*\d|\w*\W{1,3}\d)")
_LOSS = re.compile(rb"\bloss")
_DATA = re.compile(
    r"data|train_(?:dir|path|file)|"
    r"\.(?:jsonl?|ndjson|jsonlines|[ct]sv|parquet|pq|arrow|feather|np[yz]|safetensors)\b",
    re.IGNORECASE,
)
_TRAINING = re.compile(
    rb"lr\b|learning|optim|batch|epoch|precision|float16|fp16|bf16|train|gradient|grad_|sched|"
    rb"accumul|max_steps|warm|weight_decay|zero_opt|deepspeed|distributed|mixed|loss|num_labels|"
    rb"num_classes|dropout|clip|checkpoint|ckpt|_target_|seed",
    re.IGNORECASE,
)


def by_name(name: str) -> FileKind | None:
    """Returns the kind a file's name promises; None if the name says nothing."""
    path = PurePath(name)
    if ".tfevents." in path.name or path.name == "trainer_state.json":
        return FileKind.LOG
    if path.name.endswith(INDEX):
        return FileKind.CHECKPOINT
    kind = _BY_ENDING.get(path.suffix.lower())
    if kind is FileKind.OTHER:  # packed, or by an old habit: model.pth.tar
        inner = _BY_ENDING.get(PurePath(path.stem).suffix.lower())
        return inner if inner in SCANNED else kind
    return kind


def kind_of(name: str, head: bytes) -> FileKind:
    """Returns the kind of a file.

    Args:
        name: The file's name.
        head: Its first bytes; ``KIND_BYTES`` of them are enough.
    """
    guess = by_name(name)
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return guess if guess in SCANNED else kind
    if b"\0" in head and not head.startswith(_UTF16):
        return guess if guess in SCANNED else FileKind.BINARY
    if guess is FileKind.CONFIG or guess is None:
        return _by_content(name, head, guess)
    return guess


def may_be_scanned(name: str) -> bool:
    """Returns whether a file may hold data, a checkpoint or a log, going by its name."""
    kind = by_name(name)
    return kind is None or kind in SCANNED or name.lower().endswith(".json")


def scanned_as(path: str, head: bytes) -> FileKind | None:
    """Returns whether a file holds data, a checkpoint or a log; None if none of them.

    Args:
        path: The file.
        head: Its first bytes; ``SCAN_HEAD`` of them.
    """
    # Asking costs an import, and nobody has to look at what can be told here.
    if kind_of(path, head[:KIND_BYTES]) not in SCANNED:
        if not may_be_scanned(path) or _SHEBANG.match(head):
            return None
        if kind_of(path, head[:KIND_BYTES]) is FileKind.NOTEBOOK or not head.strip():
            return None
    for kind in _asked(path, head):
        if reader(SCANNED[kind]).recognises(Path(path), head):
            return kind
    return None


def _asked(path: str, head: bytes) -> list[FileKind]:
    """Returns whose readers are asked about a file, in their order."""
    kinds = list(SCANNED)
    # Nobody but the reader of checkpoints knows these; the import of the others can be saved.
    packed = head.startswith((b"PK\x03\x04", b"\x80")) and b".npy" not in head
    if packed and by_name(path) is FileKind.CHECKPOINT:
        kinds.sort(key=lambda kind: kind is not FileKind.CHECKPOINT)
    return kinds


class Source(Protocol):
    """What rules read: a data set, a checkpoint or a log."""

    @property
    def path(self) -> str:
        """The file or folder that stands for it."""

    @property
    def read_from(self) -> Sequence[str]:
        """Every file it was read from."""

    @property
    def not_read(self) -> Sequence[tuple[str, str]]:
        """What of it could not be read, each with the reason."""


class SourceReader(Protocol):
    """What a package that reads data, checkpoints or logs can do."""

    def recognises(self, path: Path, head: bytes) -> bool:
        """Returns whether a file is of its kind."""

    def recognises_folder(self, path: Path) -> bool:
        """Returns whether a folder is one source of its kind."""

    def open_sources(self, paths: Sequence[Path], scan: Scan) -> Iterator[Source]:
        """Yields what its rules read."""


def reader(name: str) -> SourceReader:
    """Returns what reads one kind of source.

    Args:
        name: ``data``, ``checkpoint`` or ``log``.
    """
    return cast("SourceReader", import_module(f"nanguard.check.{name}.{name}_reader"))


def may_point(content: str) -> bool:
    """Returns whether a configuration may name data to train on."""
    return _DATA.search(content) is not None


def may_configure(content: bytes) -> bool:
    """Returns whether any word of a training configuration occurs in a file."""
    return _TRAINING.search(content) is not None


def _by_content(name: str, head: bytes, guess: FileKind | None) -> FileKind:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start[:1] in (b"{", b"["):
        return _json(start, guess)
    if guess is not None:
        return guess
    if _SHEBANG.match(head):
        return FileKind.PYTHON
    if head.startswith(b"#!"):
        return FileKind.OTHER
    if sum(map(_is_step, head.lower().splitlines())) >= 3:
        return FileKind.LOG
    if _IMPORT.search(head) or _DEFINITION.search(head):
        return FileKind.PYTHON
    lines = [line for line in head.splitlines() if line.strip() and line.lstrip()[:1] != b"#"]
    if not _CALLED_CONFIG.search(PurePath(name).name.lower()):
        return FileKind.OTHER  # notes, logs and the formats of other programs have keys as well
    keys = len(_KEY.findall(head)) + len(_TABLE.findall(head))
    return FileKind.CONFIG if lines and keys * 2 >= len(lines) else FileKind.OTHER


def _is_step(line: bytes) -> bool:
    """Returns whether a line, in lower case, names a numbered step and then a loss."""
    at = -1
    for found in _LOSS.finditer(line):
        at = found.start()
    return at >= 0 and _STEP.search(line, 0, at) is not None


def _json(start: bytes, guess: FileKind | None) -> FileKind:
    if b'"nbformat"' in start or (b'"cells"' in start and b'"cell_type"' in start):
        return FileKind.NOTEBOOK
    if b'"log_history"' in start:
        return FileKind.LOG
    first, _, rest = start.partition(b"\n")
    if guess is None and first.rstrip().endswith(b"}") and rest.lstrip()[:1] == b"{":
        return FileKind.DATA
    return FileKind.CONFIG
