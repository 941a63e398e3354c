"""States as plain values, which a file can hold and a loader can read without running code.

``torch.load(weights_only=True)`` knows tensors and the plain containers. Schedulers and random
streams hold more than that: tuples, NumPy numbers, counters. They are written
under a tag and come back as they were.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from typing import Any

import torch

from nanguard.errors import SnapshotError

_TAG = "$type"
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_KEYS = (bool, int, float, str, type(None))


def portable(state: Any, path: str = "") -> Any:
    """Returns a state in types that can be loaded without running code.

    Args:
        state: A tree of containers, tensors and plain values.
        path: Where in a larger tree it stands, for the message if it cannot be done.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(state, numpy.generic):
        return {_TAG: "number", "of": portable_array(state.reshape(1))}
    if numpy is not None and isinstance(state, numpy.ndarray) and state.dtype != object:
        return {_TAG: "array", "of": portable_array(state)}
    if isinstance(state, dict):
        return _portable_dict(state, path)
    if isinstance(state, (list, tuple)) and not isinstance(state, torch.Size):
        items = [portable(value, f"{path}/{index}") for index, value in enumerate(state)]
        return items if isinstance(state, list) else {_TAG: "tuple", "of": items}
    if type(state) in _PLAIN or isinstance(state, (torch.Tensor, torch.Size)):
        return state
    for plain in (int, float, str):
        if isinstance(state, plain):  # an enumeration, say
            return plain(state)
    raise SnapshotError(
        f"{path.lstrip('/')} is of type {type(state).__name__}, which could not be loaded again "
        "without running code.",
        where="writing a snapshot",
        do="Keep plain values, lists, dicts and tensors in the state_dict of your own scheduler.",
    )


def _portable_dict(state: dict[Any, Any], path: str) -> dict[Any, Any]:
    kind = "dict"
    if isinstance(state, (Counter, OrderedDict)):
        kind = "counter" if isinstance(state, Counter) else "ordered"
    elif _TAG not in state and all(type(key) in _KEYS for key in state):
        return {key: portable(value, f"{path}/{key}") for key, value in state.items()}
    pairs = [
        [portable(key, f"{path}/{key}"), portable(value, f"{path}/{key}")]
        for key, value in state.items()
    ]
    return {_TAG: kind, "of": pairs}


def from_portable(state: Any) -> Any:
    """Returns the state that ``portable`` was given."""
    if isinstance(state, list):
        return [from_portable(value) for value in state]
    if not isinstance(state, dict):
        return state
    kind = state.get(_TAG)
    if kind is None:
        return {key: from_portable(value) for key, value in state.items()}
    if kind in ("array", "number"):
        array = _array_of(state["of"])
        return array if kind == "array" else array[0]
    if kind == "tuple":
        return tuple(from_portable(value) for value in state["of"])
    pairs = [(from_portable(key), from_portable(value)) for key, value in state["of"]]
    return {"counter": Counter, "ordered": OrderedDict, "dict": dict}[kind](dict(pairs))


def portable_array(array: Any) -> dict[str, Any]:
    """Returns a NumPy array as bytes in a tensor; torch does not know all of its types."""
    data = torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8) if array.size else None
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def _array_of(saved: dict[str, Any]) -> Any:
    import numpy as np

    data = b"" if saved["data"] is None else saved["data"].numpy().tobytes()
    return np.frombuffer(data, dtype=saved["dtype"]).reshape(saved["shape"]).copy()
