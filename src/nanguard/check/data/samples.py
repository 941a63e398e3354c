"""What the columns of records are, told from a few of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanguard.check.data.roles import Column, Shape

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MAX_COLUMNS = 4096
_WIDER: dict[Shape, Shape] = {"int": "float", "ints": "floats"}
_LISTED: dict[Shape, Shape] = {"int": "ints", "float": "floats", "bool": "ints", "text": "texts"}


def columns_of(records: Iterable[Mapping[str, Any]]) -> list[Column]:
    """Returns the columns that records have, in the order in which they are first seen."""
    votes: dict[str, dict[tuple[Shape, int], int]] = {}
    for record in records:
        for name, value in record.items():
            if name not in votes and len(votes) >= MAX_COLUMNS:
                continue
            shape = shape_of(value)
            counts = votes.setdefault(name, {})
            counts[shape] = counts.get(shape, 0) + 1
    return [Column(name, *_winner(counts)) for name, counts in votes.items()]


def speakable(record: Any) -> Any:
    """Returns a record whose names and texts can be written down: half a character cannot be."""
    if not isinstance(record, dict):
        return record
    return {
        _written(name): _written(value) if isinstance(value, str) else value
        for name, value in record.items()
    }


def _written(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def shape_of(value: Any, depth: int = 0) -> tuple[Shape, int]:
    """Returns what a value is, and in how many lists it lies."""
    if value is None:
        return "empty", depth
    if isinstance(value, bool):
        return "bool", depth
    if isinstance(value, int):
        return "int", depth
    if isinstance(value, float):
        return "float", depth
    if isinstance(value, str):
        return "text", depth
    if isinstance(value, list) and depth < 3:
        return _shape_of_list(value, depth)
    return "other", depth


def _shape_of_list(values: list[Any], depth: int) -> tuple[Shape, int]:
    inner = {shape_of(value, depth + 1) for value in values[:64]}
    inner = {one for one in inner if one[0] != "empty"}
    if not inner:
        return "empty", depth + 1
    depths = {one[1] for one in inner}
    shapes = {one[0] for one in inner}
    if len(depths) > 1:
        return "other", depth
    deep = depths.pop()
    if shapes <= {"int", "bool", "ints"}:
        return "ints", deep
    if shapes <= {"int", "float", "ints", "floats"}:
        return "floats", deep
    if len(shapes) == 1:
        return _LISTED.get(next(iter(shapes)), "other"), deep
    return "other", deep


def _winner(counts: dict[tuple[Shape, int], int]) -> tuple[Shape, int]:
    """Returns what most values of a column are; some fractions make all of them fractions."""
    kept = {one: count for one, count in counts.items() if one[0] != "empty"}
    if not kept:
        return "empty", 0
    shape, depth = max(kept, key=lambda one: kept[one])
    total = sum(kept.values())
    wide = _WIDER.get(shape)
    if wide is not None and kept.get((wide, depth), 0) * 20 > total:
        return wide, depth
    return shape, depth
