"""What kind of file a file is: by what it holds, with its name as a first guess."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import PurePath

HEAD = 8192


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


UNRULED = frozenset({FileKind.DATA, FileKind.CHECKPOINT, FileKind.LOG})

_ENDINGS = {
    FileKind.PYTHON: ".py .pyw .pyi",
    FileKind.NOTEBOOK: ".ipynb",
    FileKind.CONFIG: ".yaml .yml .json .json5 .jsonc .toml",
    FileKind.DATA: ".csv .tsv .jsonl .ndjson .parquet .npy .npz .arrow .feather .h5 .hdf5 .lmdb "
    ".tfrecord .mat",
    FileKind.CHECKPOINT: ".pt .pth .ckpt .bin .safetensors .distcp .pkl .pickle .onnx .gguf",
    FileKind.LOG: ".log .tfevents",
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
_BLOCK = re.compile(rb"^(?:def|class) \w+.*:\s*(?:#.*)?$", re.MULTILINE)
_KEY = re.compile(rb"^[ \t]*(?:- )?[\w.\"'/-]+[ \t]*(?::(?:\s|$)|=)", re.MULTILINE)
_TABLE = re.compile(rb"^\[\[?[\w.\"' -]+\]\]?\s*$", re.MULTILINE)
_STEP = re.compile(rb"(?:\bstep|\bepoch|\biter)\w*\W{0,3}\d+.*\bloss", re.IGNORECASE)
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
    return _BY_ENDING.get(path.suffix.lower())


def kind_of(name: str, head: bytes) -> FileKind:
    """Returns the kind of a file.

    Args:
        name: The file's name.
        head: Its first bytes; ``HEAD`` of them are enough.
    """
    guess = by_name(name)
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return guess if guess in UNRULED else kind
    if b"\0" in head and not head.startswith(_UTF16):
        return guess if guess in UNRULED else FileKind.BINARY
    if guess is FileKind.CONFIG or guess is None:
        return _by_content(head, guess)
    return guess


def may_configure(content: bytes) -> bool:
    """Returns whether any word of a training configuration occurs in a file."""
    return _TRAINING.search(content) is not None


def _by_content(head: bytes, guess: FileKind | None) -> FileKind:
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if start[:1] in (b"{", b"["):
        return _json(start, guess)
    if guess is not None:
        return guess
    if _SHEBANG.match(head):
        return FileKind.PYTHON
    if head.startswith(b"#!"):
        return FileKind.OTHER
    if len(_STEP.findall(head)) >= 3:
        return FileKind.LOG
    if _IMPORT.search(head) or _BLOCK.search(head):
        return FileKind.PYTHON
    lines = [line for line in head.splitlines() if line.strip() and line.lstrip()[:1] != b"#"]
    keys = len(_KEY.findall(head)) + len(_TABLE.findall(head))
    return FileKind.CONFIG if lines and keys * 2 >= len(lines) else FileKind.OTHER


def _json(start: bytes, guess: FileKind | None) -> FileKind:
    if b'"nbformat"' in start or (b'"cells"' in start and b'"cell_type"' in start):
        return FileKind.NOTEBOOK
    if b'"log_history"' in start:
        return FileKind.LOG
    first, _, rest = start.partition(b"\n")
    if guess is None and first.rstrip().endswith(b"}") and rest.lstrip()[:1] == b"{":
        return FileKind.DATA
    return FileKind.CONFIG
