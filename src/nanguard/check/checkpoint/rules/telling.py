"""How rules about checkpoints put what they found into words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.findings import Fix, name_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.check.checkpoint.checkpoint import Checkpoint
    from nanguard.check.checkpoint.part import Measured

NAMED = 3


def told_nonfinite(tensors: Sequence[Measured]) -> str:
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


def told_large(tensors: Sequence[Measured]) -> str:
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
