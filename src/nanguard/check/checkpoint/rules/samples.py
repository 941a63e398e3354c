"""Small checkpoints for the examples of rules, written without torch."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

NAN, INF = float("nan"), float("inf")
HEALTHY = {"head.weight": (0.1, -0.2), "head.bias": (0.0,)}


def safetensors(tensors: Mapping[str, Sequence[float]], *, cut: int = 0) -> bytes:
    """Returns a safetensors file of fp32 vectors.

    Args:
        tensors: The numbers by name.
        cut: How many bytes are missing at its end.
    """
    header, data = {}, b""
    for name, values in tensors.items():
        packed = struct.pack(f"<{len(values)}f", *values)
        offsets = [len(data), len(data) + len(packed)]
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": offsets}
        data += packed
    about = json.dumps(header).encode()
    whole = len(about).to_bytes(8, "little") + about + data
    return whole[: len(whole) - cut]


def file_of(
    tensors: Mapping[str, Sequence[float]], name: str = "model.safetensors", *, cut: int = 0
) -> Callable[[Path], None]:
    """Returns what writes such a file into a folder."""

    def write(folder: Path) -> None:
        (folder / name).write_bytes(safetensors(tensors, cut=cut))

    return write


def run_of(*steps: Mapping[str, Sequence[float]]) -> Callable[[Path], None]:
    """Returns what writes a run into a folder: a checkpoint for every hundred steps."""

    def write(folder: Path) -> None:
        for number, tensors in enumerate(steps, 1):
            inside = folder / f"checkpoint-{number * 100}"
            inside.mkdir()
            (inside / "model.safetensors").write_bytes(safetensors(tensors))

    return write


def pickle_of(function: str, name: str = "model.pkl") -> Callable[[Path], None]:
    """Returns what writes a pickle that asks for a function, which loading it would call."""

    def write(folder: Path) -> None:
        module, _, what = function.rpartition(".")
        (folder / name).write_bytes(b"\x80\x02c%s\n%s\n)R." % (module.encode(), what.encode()))

    return write
