"""Which files are checkpoints: by what they begin with, their names as a hint."""

from __future__ import annotations

import json
import re
import struct
from typing import TYPE_CHECKING

from nanguard.check.kinds import INDEX

if TYPE_CHECKING:
    from pathlib import Path

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
