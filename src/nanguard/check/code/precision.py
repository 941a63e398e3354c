"""Which values are float16."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.check.code.values import Value


def half_of(op: str, inputs: tuple[Value, ...], keywords: dict[str, Value]) -> bool | None:
    """Returns whether an operation's result is float16, as far as it can be told."""
    if op == "half":
        return True
    if op in ("float", "double", "bfloat16"):
        return False
    dtype = keywords.get("dtype")
    candidates = [dtype] if dtype is not None else list(inputs[1:]) if op in ("to", "type") else []
    for value in candidates:
        last = value.path.rpartition(".")[2] if value.path.startswith("torch.") else ""
        if last in ("float16", "half", "HalfTensor"):
            return True
        if last in ("float32", "float", "float64", "double", "bfloat16"):
            return False
    states = [value.half for value in inputs if value.half is not None]
    if not states or (op in ("compare", "new", "call", "matmul") and not any(states)):
        return None
    return all(states)
