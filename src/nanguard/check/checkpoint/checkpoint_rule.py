"""How rules about checkpoints say what they found, and small checkpoints for their examples."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

from nanguard.findings import Fix, name_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from nanguard.check.checkpoint.checkpoint import Checkpoint, Measured

# Other tensors that a message names.
NAMED = 3


def nonfinite_text(tensors: Sequence[Measured]) -> str:
    """Returns which tensors hold numbers that are not finite, and how many."""
    first = tensors[0]
    numbers = first.numbers
    if not numbers.nonfinite:
        return f"{first.name} is multiplied by {name_of(first.scale or 0.0)}"
    counts = (("NaN", numbers.nan), ("Inf", numbers.above), ("-Inf", numbers.below))
    kinds = " and ".join(f"{count:,} {kind}" for kind, count in counts if count)
    return (
        f"{_about(first)} holds {kinds} among {numbers.count:,} numbers, the first at index"
        f" {numbers.first}{others(tensors)}"
    )


def large_text(tensors: Sequence[Measured]) -> str:
    """Returns which tensors hold large numbers, how large and how many."""
    worst = max(tensors, key=lambda tensor: tensor.numbers.largest)
    numbers = worst.numbers
    extreme = max(numbers.low, numbers.high, key=abs)
    said = f"{_about(worst)} reaches {name_of(extreme)}"
    if numbers.beyond:
        said += f", and fp16 cannot hold {numbers.beyond:,} of its {numbers.count:,} numbers"
    return said + others([worst, *(tensor for tensor in tensors if tensor is not worst)])


def others(tensors: Sequence[Measured]) -> str:
    """Returns how many tensors there are besides the first."""
    rest = [tensor.name for tensor in tensors[1:]]
    if not rest:
        return ""
    names = ", ".join(rest[:NAMED]) + (", ..." if len(rest) > NAMED else "")
    return f"; so do {len(rest):,} more: {names}" if len(rest) > 1 else f"; so does {names}"


def way_back(checkpoint: Checkpoint) -> tuple[Fix, ...]:
    """Returns how to go on from a checkpoint that is lost."""
    good = checkpoint.run.last_good if checkpoint.run else None
    if good is None:
        return (Fix("Go back to an older checkpoint: training on from this one cannot heal it."),)
    return (Fix(f"Resume from {good.path}, the last good checkpoint."),)


def _about(tensor: Measured) -> str:
    shape = "x".join(map(str, tensor.shape)) or "scalar"
    return f"{tensor.name} ({tensor.dtype}, {shape})"


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
