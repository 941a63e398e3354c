"""``check_loader``: the rules about data, on what a PyTorch DataLoader really yields."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from nanguard.check.data.arrays import add_labels, add_tokens
from nanguard.check.data.columns import (
    Column,
    ColumnNumbers,
    ColumnRoles,
    LabelColumn,
    RowPlace,
    RowPlaces,
    Tokens,
    label_of,
    roles_of,
)
from nanguard.check.data.dataset import DataFile, DataSet, Ledger, Request, WatchedValues
from nanguard.check.data.tables import MAX_WIDTH, Matrix
from nanguard.check.rule import rules_for
from nanguard.check.scan import Expected
from nanguard.errors import UsageError

if TYPE_CHECKING:
    from nanguard.findings import Finding

MAX_DEPTH = 8
MAX_FAILURES = 20


def check_loader(
    loader: Iterable[Any], *, batches: int | None = None, measured: bool = False, **expected: Any
) -> list[Finding]:
    """Scans the batches of a loader for labels, token ids and features that break a run.

    Batches may be tensors, mappings, tuples, named tuples and dataclasses, nested in any way. The
    loader is read as in an epoch; what is random about torch on the CPU is put back afterwards.
    Findings name the indices of samples in the loader's data set; where the loader has no data set
    with indices, they count samples in the order in which they came.

    Args:
        loader: A ``torch.utils.data.DataLoader``, or anything that yields batches.
        batches: How many batches to look at; None for all of them.
        measured: Whether labels are measurements, not classes.
        expected: What the data is checked against, as in ``nanguard.check.scan.Expected``:
            ``label_key``, ``classes``, ``groups``, ``group_key``, ``vocabulary``, ``ignored``.

    Returns:
        What was found, the worst first.

    Raises:
        UsageError: There is no such expectation.
    """
    known = {one.name for one in dataclasses.fields(Expected)}
    if wrong := sorted(set(expected) - known):
        raise UsageError(
            f"check_loader has no option {', '.join(wrong)}",
            where="nanguard.check_loader",
            do=f"Use one of {', '.join(sorted(known))}.",
        )
    watch = WatchedValues(Expected(**expected), measured)
    scanner = _Scanner(watch)
    state = torch.get_rng_state()
    try:
        for batch, indices in islice(_batches(loader, scanner), batches):
            scanner.add(batch, indices)
    finally:
        torch.set_rng_state(state)
    source = DataSet((scanner.finish(),), Request((), watch.expected, measured))
    found = [finding for rule in rules_for("data") for finding in rule.check(source)]
    found.sort(key=lambda finding: -finding.severity.rank)
    return [replace(finding, path=None) for finding in found]


class _Recording:
    """A sampler that notes which samples it asked for, in order."""

    def __init__(self, sampler: Iterable[Any]) -> None:
        self.sampler = sampler
        self.asked: list[list[Any]] = []

    def __iter__(self) -> Iterator[Any]:
        for one in self.sampler:
            self.asked.append(list(one) if isinstance(one, (list, tuple)) else [one])
            yield one

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


def _batches(loader: Iterable[Any], scanner: _Scanner) -> Iterator[tuple[Any, list[Any] | None]]:
    """Yields batches, each with the indices of its samples where these are known."""
    if not isinstance(loader, DataLoader) or loader._dataset_kind != 0:
        for batch in loader:
            yield batch, None
        return
    batched = loader.batch_sampler is not None
    recording = _Recording(loader.batch_sampler or loader.sampler)
    same = DataLoader(
        loader.dataset,
        batch_size=1 if batched else None,
        batch_sampler=recording if batched else None,
        sampler=None if batched else recording,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
    )
    yield from _guarded(iter(same), recording, loader.dataset, scanner)


def _guarded(
    batches: Iterator[Any], recording: _Recording, dataset: Any, scanner: _Scanner
) -> Iterator[tuple[Any, list[Any] | None]]:
    """Yields batches; samples that cannot be read are noted, and the next batch is tried."""
    at = failures = 0
    while failures < MAX_FAILURES:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except Exception as error:  # noqa: BLE001 - a data set may raise anything; it is reported
            failures += 1
            scanner.refuse(_culprit(dataset, recording.asked[at : at + 1]), error)
        else:
            yield batch, recording.asked[at]
        at += 1


def _culprit(dataset: Any, asked: list[list[Any]]) -> Any:
    """Returns the sample of a batch that cannot be read; the first one if each of them can."""
    for index in asked[0] if asked else ():
        try:
            dataset[index]
        except Exception:  # noqa: BLE001 - the same error as before
            return index
    return asked[0][0] if asked and asked[0] else 0


@dataclass
class _Scanner:
    """Counts what is in batches.

    Attributes:
        watch: What to look out for.
        ledger: What was counted.
        indices: The index of each sample that was seen, in order.
    """

    watch: WatchedValues
    ledger: Ledger = field(default_factory=Ledger)
    indices: list[Any] = field(default_factory=list)
    roles: ColumnRoles | None = None
    _matrices: dict[str, Matrix] = field(default_factory=dict)

    def add(self, batch: Any, indices: list[Any] | None) -> None:
        """Counts a batch."""
        leaves = {
            name: array for name, leaf in _leaves(batch) if (array := _array(leaf)) is not None
        }
        if not leaves:
            return
        size = len(indices) if indices is not None else _size(leaves)
        first = len(self.indices)
        self.indices += indices if indices is not None else range(first, first + size)
        if self.roles is None:
            self.roles = _roles(batch, leaves, self.watch)
        for name, array in leaves.items():
            rows = array.reshape(-1, *array.shape[1:]) if array.ndim else array.reshape(1)
            if len(rows) != size:  # not one row for each sample
                rows = array.reshape(1, -1)
            self._leaf(name, rows, first, leaves)
        self.ledger.records = len(self.indices)

    def refuse(self, index: Any, error: Exception) -> None:
        """Notes a sample that could not be read."""
        said = str(error).strip().splitlines()
        why = f"{type(error).__name__}: {said[-1][:120] if said else ''}"
        self.ledger.unreadable.add(RowPlace(len(self.indices), None, why))
        self.indices.append(index)

    def _leaf(self, name: str, rows: Any, first: int, leaves: dict[str, Any]) -> None:
        roles = self.roles or ColumnRoles()
        if roles.label is not None and name == roles.label.name:
            if self.ledger.labels is None:
                self.ledger.labels = LabelColumn(name, many=rows.ndim > 1 and rows.shape[1] > 1)
            groups = leaves.get(roles.group) if roles.group else None
            self._labels(rows, groups, first)
        elif name in [column.name for column in roles.tokens]:
            add_tokens(self._tokens(name, targets=False), rows, first, self.watch)
        elif roles.targets is not None and name == roles.targets.name:
            add_tokens(self._tokens(name, targets=True), rows, first, self.watch)
        elif rows.dtype.kind == "f" and "mask" not in name and "bias" not in name:
            self._feature(name, rows, first)

    def _labels(self, rows: Any, groups: Any, first: int) -> None:
        labels = self.ledger.labels
        assert labels is not None  # noqa: S101 - the caller has made it
        if groups is None and rows.dtype.kind in "iufb":
            add_labels(labels, rows, first, self.watch)
            return
        for at, value in enumerate(rows.reshape(-1).tolist()):
            group = str(groups[at]) if groups is not None and at < len(groups) else None
            labels.add(label_of(group, value), 1, [RowPlace(first + at, None, str(value))])

    def _tokens(self, name: str, *, targets: bool) -> Tokens:
        return self.ledger.tokens.setdefault(name, Tokens(name, targets=targets))

    def _feature(self, name: str, rows: Any, first: int) -> None:
        width = int(np.prod(rows.shape[1:])) or 1
        matrix = self._matrices.get(name)
        if rows.ndim <= 2 and width <= MAX_WIDTH and (matrix is None or matrix.width == width):
            matrix = self._matrices.setdefault(name, Matrix(name, width))
            matrix.add(rows.reshape(len(rows), width), first)
            return
        numbers = self.ledger.columns.setdefault(name, ColumnNumbers(name, alone=False))
        numbers.add(rows.reshape(-1), lambda at, value: RowPlace(first + at // width, None, value))

    def finish(self) -> DataFile:
        """Returns what was counted, with the indices of samples in place of their order."""
        for matrix in self._matrices.values():
            self.ledger.columns |= matrix.columns(whole=False)
            self.ledger.zero.merge(matrix.zero, 0, 0)
        for places in self._places():
            places.unit = "dataset index"
            places.first = [replace(p, record=self.indices[p.record]) for p in places.first]
        for column in self.ledger.columns.values():
            if column.largest is not None:
                at = self.indices[column.largest.record]
                column.largest = replace(column.largest, record=at)
        return DataFile("loader", "loader", self.ledger, self.roles or ColumnRoles())

    def _places(self) -> Iterator[RowPlaces]:
        labels = self.ledger.labels
        if labels is not None:
            yield from (labels.missing, labels.infinite, labels.odd, *labels.seen.values())
        yield from (column.bad for column in self.ledger.columns.values())
        yield from (tokens.outside for tokens in self.ledger.tokens.values())
        yield from (self.ledger.zero, self.ledger.unreadable)


def _roles(batch: Any, leaves: dict[str, Any], watch: WatchedValues) -> ColumnRoles:
    columns: list[tuple[str, Column]] = []
    for name, array in leaves.items():
        plain = name.rpartition(".")[2]
        if plain.isdigit() or plain in [column.name for _, column in columns]:
            plain = name
        deep = array.ndim > 1 and array.shape[-1] > 1
        shape = {"i": "int", "u": "int", "f": "float", "b": "bool", "U": "text"}[array.dtype.kind]
        listed = f"{shape}s" if deep and shape in ("int", "float") else shape
        columns.append((name, Column(plain, listed, array.ndim - 1)))  # type: ignore[arg-type]
    full = {column.name: name for name, column in reversed(columns)}
    roles = roles_of([column for _, column in columns], watch.expected)
    label = roles.label
    if label is None and isinstance(batch, (tuple, list)) and len(batch) > 1:
        last, column = columns[-1]
        if leaves[last].ndim <= 2 and column.shape in ("int", "float", "bool"):
            label = column
    named = {c: replace(c, name=full[c.name]) for _, c in columns}
    return ColumnRoles(
        named[label] if label is not None else None,
        full.get(roles.group) if roles.group else None,
        tuple(named[column] for column in roles.tokens),
        named[roles.targets] if roles.targets is not None else None,
    )


def _leaves(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yields what a batch holds, each part with its name."""
    parts: Iterable[tuple[object, Any]]
    if depth > MAX_DEPTH:
        return
    if isinstance(value, Mapping):
        parts = value.items()
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = zip(value._fields, value, strict=True)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = ((one.name, getattr(value, one.name, None)) for one in dataclasses.fields(value))
    elif isinstance(value, (tuple, list)) and not _plain_values(value):
        parts = enumerate(value)
    else:
        yield name or "batch", value
        return
    for key, part in parts:
        yield from _leaves(part, f"{name}.{key}" if name else str(key), depth + 1)


def _plain_values(value: tuple[Any, ...] | list[Any]) -> bool:
    return bool(value) and all(isinstance(one, (int, float, str, bool)) for one in value)


def _array(leaf: Any) -> Any:
    """Returns a part of a batch as a NumPy array; None if it holds no numbers and no names."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout != torch.strided or leaf.is_complex() or leaf.is_quantized:
            return None
        kept = leaf.detach().cpu()
        wide = kept.dtype in (torch.bfloat16,) or (
            kept.element_size() == 1 and kept.is_floating_point()
        )
        return (kept.float() if wide else kept).numpy()
    if isinstance(leaf, np.ndarray):
        return leaf if leaf.dtype.kind in "iufbU" else None
    if isinstance(leaf, (list, tuple)) and leaf:
        array = np.asarray(leaf)
        return array if array.dtype.kind in "iufbU" else None
    if isinstance(leaf, (int, float)):
        return np.asarray([leaf])
    return None


def _size(leaves: dict[str, Any]) -> int:
    return max((len(array) for array in leaves.values() if array.ndim), default=1)
