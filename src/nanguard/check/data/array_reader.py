"""Arrays, counted: labels, token ids and features, told by their names and shapes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nanguard.check.data.arrays import Array, arrays_in
from nanguard.check.data.labels import Labels, label_of
from nanguard.check.data.ledger import Ledger
from nanguard.check.data.matrix import MAX_WIDTH, Matrix
from nanguard.check.data.numbers import Numbers
from nanguard.check.data.places import MAX_PLACES, Place
from nanguard.check.data.roles import TOKENS, Column, Roles, Shape, plain_name, roles_of
from nanguard.check.data.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nanguard.check.data.watching import Watch
    from nanguard.check.scanning import Scan

_KINDS: dict[str, Shape] = {"i": "int", "u": "int", "f": "float", "b": "bool"}
MANY = 5000


def read_arrays(path: Path, watch: Watch, scan: Scan) -> tuple[Ledger, Roles]:
    """Returns what a file of arrays holds."""
    arrays = {array.name: array for array in arrays_in(path)}
    roles = _roles(list(arrays.values()), watch)
    ledger = Ledger(records=max((a.shape[0] if a.shape else 1 for a in arrays.values()), default=0))
    done = _Progress(path, scan)
    if roles.label is not None:
        ledger.labels = _labels(_alike(roles.label, arrays), watch, done)
    targets = (roles.targets,) if roles.targets is not None else ()
    for column in (*roles.tokens, *targets):
        ledger.tokens[column.name] = _tokens(
            arrays[column.name], watch, done, targets=column in targets
        )
    for column in roles.features:
        _feature(arrays[column.name], ledger, done)
    return ledger, roles


class _Progress:
    def __init__(self, path: Path, scan: Scan) -> None:
        self.path, self.scan = path, scan

    def blocks(self, array: Array) -> Iterator[tuple[int, Any]]:
        """Yields an array's blocks, each with its first record."""
        at = 0
        for block in array.blocks():
            yield at, block
            at += len(block)
            self.scan.progress(str(self.path), int(block.nbytes))


def _roles(arrays: list[Array], watch: Watch) -> Roles:
    columns = []
    for array in arrays:
        shape = _KINDS.get(array.kind, "other")
        deep = len(array.shape) > 1
        listed: Shape = "ints" if shape in ("int", "bool") else "floats"
        columns.append(
            Column(array.name, listed if deep and shape != "other" else shape, len(array.shape) - 1)
        )
    roles = roles_of([_as_list(column) for column in columns], watch.expected)
    if watch.expected.vocabulary and not roles.tokens and roles.label is None:
        whole = tuple(c for c in columns if c.shape in ("int", "ints"))
        if len(columns) == 1 and whole:
            return Roles(tokens=whole, names=roles.names)
    return roles


def _as_list(column: Column) -> Column:
    """Returns a row of token ids as what it is: a sequence, although it has one dimension."""
    if column.shape == "int" and plain_name(column.name) in TOKENS:
        return Column(column.name, "ints", 1)
    return column


def _alike(label: Column, arrays: dict[str, Array]) -> list[Array]:
    """Returns the labels, and those of other parts of the data: ``y_test`` beside ``y_train``."""
    first = arrays[label.name]
    others = [
        array
        for array in arrays.values()
        if array is not first
        and plain_name(array.name) == plain_name(first.name)
        and len(array.shape) == len(first.shape)
    ]
    return [first, *others]


def _labels(arrays: list[Array], watch: Watch, done: _Progress) -> Labels:
    labels = Labels(arrays[0].name, many=math.prod(arrays[0].shape[1:]) > 1)
    for array in arrays:
        for first, block in done.blocks(array):
            add_labels(labels, block, first, watch)
    return labels


def add_labels(labels: Labels, block: Any, first: int, watch: Watch) -> None:
    """Counts a block of labels, a NumPy array whose rows are records.

    Args:
        labels: What was counted so far.
        block: The labels.
        first: The record of the first row.
        watch: What to look out for.
    """
    import numpy as np

    width = math.prod(block.shape[1:]) or 1
    flat, kind = block.reshape(-1), block.dtype.kind
    if kind not in "iufb" or labels.overflowed:
        return
    if kind == "f":
        _note_missing(flat, labels, first, width)
    known = flat[np.isfinite(flat)] if kind == "f" else flat
    values, counts = np.unique(known, return_counts=True)
    if len(values) > MANY and kind == "f":
        labels.overflowed = True
        labels.total += int(known.size)
        labels.fractional += int((known != np.round(known)).sum())
        return
    for value, count in zip(values.tolist(), counts.tolist(), strict=True):
        label = label_of(None, value)
        wanted = MAX_PLACES if watch.suspects(label) else 1
        at = _first(flat, value, wanted)
        labels.add(label, count, [Place(first + p // width, None, str(value)) for p in at])


def _first(flat: Any, value: Any, wanted: int) -> list[int]:
    """Returns where a value stands first; one place is found without looking at all."""
    import numpy as np

    if wanted == 1:
        return [int((flat == value).argmax())]
    return [int(at) for at in np.flatnonzero(flat == value)[:wanted]]


def _note_missing(flat: Any, labels: Labels, first: int, width: int) -> None:
    """Notes labels that are NaN, which stands for none, and infinite ones."""
    import numpy as np

    for places, wrong in ((labels.missing, np.isnan(flat)), (labels.infinite, np.isinf(flat))):
        bad = np.flatnonzero(wrong)
        for at in bad[:MAX_PLACES]:
            places.add(Place(first + int(at) // width, None, str(float(flat[at]))), 0)
        places.count += int(bad.size)


def _tokens(array: Array, watch: Watch, done: _Progress, *, targets: bool) -> Tokens:
    tokens = Tokens(array.name, targets=targets)
    for first, block in done.blocks(array):
        add_tokens(tokens, block, first, watch)
    return tokens


def add_tokens(tokens: Tokens, block: Any, first: int, watch: Watch) -> None:
    """Counts a block of token ids, a NumPy array whose rows are records."""
    import numpy as np

    size = watch.expected.vocabulary
    width = math.prod(block.shape[1:]) or 1
    flat = block.reshape(-1)
    if not flat.size:
        return
    low, high = int(flat.min()), int(flat.max())
    tokens.widen(low, high, int(flat.size))
    if low >= 0 and (size is None or high < size):
        return
    wrong = flat < 0
    if size is not None:
        wrong |= flat >= size
    if tokens.targets:
        wrong &= ~np.isin(flat, list(watch.ignored))
    bad = np.flatnonzero(wrong)
    for at in bad[:MAX_PLACES]:
        tokens.outside.add(Place(first + int(at) // width, None, str(int(flat[at]))), 0)
    tokens.outside.count += int(bad.size)


def _feature(array: Array, ledger: Ledger, done: _Progress) -> None:
    width = math.prod(array.shape[1:]) or 1
    whole = array.kind != "f"
    if len(array.shape) <= 2 and width <= MAX_WIDTH:
        matrix = Matrix(array.name, width)
        for first, block in done.blocks(array):
            matrix.add(block.reshape(len(block), width), first)
        ledger.columns |= matrix.columns(whole=whole)
        ledger.zero.merge(matrix.zero, 0, 0)
        return
    numbers = Numbers(array.name, whole=whole, alone=False)
    for first, block in done.blocks(array):

        def place(at: int, value: str, first: int = first) -> Place:
            return Place(first + at // width, None, value)

        numbers.add(block.reshape(-1), place)
    ledger.columns[array.name] = numbers
