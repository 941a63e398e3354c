"""Takes the numbers out of millions of lines at once, where polars is installed."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from nanguard.sources.log.gathering import Pieces
from nanguard.sources.log.lines import SAME_LINE, Stretch
from nanguard.sources.log.text import WORTH_READING, TextReader, shaped

if TYPE_CHECKING:
    from collections.abc import Callable

    from nanguard.sources.log.gathering import Rows
    from nanguard.sources.log.shapes import Shape

# How many shapes are tried on all lines, and the share of lines that earns a shape its place.
_MOST = 8
_SHARE = 0.002
_WORTH = f"(?i){WORTH_READING.pattern}"


def bulk_reader(reader: TextReader) -> Callable[[Stretch], None] | None:
    """Returns a function that reads a stretch with polars; None where it is not installed."""
    try:
        import numpy as np
        import polars as pl
    except ImportError:
        return None
    return _Bulk(reader, pl, np).read


class _Bulk:
    """Reads what has a known shape in bulk, and leaves the rest to the reader of lines."""

    def __init__(self, reader: TextReader, pl: Any, np: Any) -> None:
        self._reader = reader
        self._pl = pl
        self._np = np
        self._hits: dict[str, int] = {}

    def read(self, stretch: Stretch) -> None:
        shapes = [shape for shape in self._reader.shapes if shape.compiled.groups]
        shapes.sort(key=lambda shape: -self._hits.get(shape.pattern, 1 << 30))
        if not shapes or not stretch.ended:
            self._reader.read(stretch)
            return
        frame, pieces = self._frame(stretch)
        rows: list[Rows] = []
        total = len(frame)
        for shape in shapes[:_MOST]:
            if self._hits.get(shape.pattern, total) < _SHARE * total or not len(frame):
                continue
            frame, found = self._take(frame, shape)
            if found is not None:
                rows.append(found)
        if self._reader.table is None:
            frame = frame.filter(self._pl.col("l").str.contains(_WORTH))
        self._reader.gather(
            rows, zip(frame["n"].to_list(), frame["l"].to_list(), strict=False), pieces
        )

    def _frame(self, stretch: Stretch) -> tuple[Any, Pieces | None]:
        """Returns the numbered lines, and which pieces make a line where some are cut."""
        pl = self._pl
        frame = pl.Series("l", [stretch.text]).str.split("\n").explode().to_frame()
        frame = frame.with_row_index("n", offset=stretch.first)
        if SAME_LINE not in stretch.text:
            return frame, None
        starts = ~frame["l"].str.starts_with(SAME_LINE)
        lines = starts.cast(pl.Int64).cum_sum().to_numpy() + (stretch.first - 1)
        numbers = array("q", self._np.maximum(lines, stretch.first).tobytes())
        frame = frame.with_columns(pl.col("l").str.strip_prefix(SAME_LINE))
        return frame, Pieces(stretch.first, numbers)

    def _take(self, frame: Any, shape: Shape) -> tuple[Any, Rows | None]:
        """Returns the lines that are left, and the rows of those that had the shape."""
        pl = self._pl
        groups = frame["l"].str.extract_groups(shape.pattern).struct.unnest()
        numbers = groups.select(pl.all().cast(pl.Float64, strict=False))
        whole = numbers.select(ok=pl.all_horizontal(pl.all().is_finite().fill_null(value=False)))[
            "ok"
        ]
        hits = int(whole.sum())
        self._hits[shape.pattern] = hits
        if not hits:
            return frame, None
        if hits == len(whole):
            return frame.clear(), self._rows(shape, frame["n"], numbers)
        left = frame.filter(~whole)
        return left, self._rows(shape, frame["n"].filter(whole), numbers.filter(whole))

    def _rows(self, shape: Shape, lines: Any, numbers: Any) -> Rows:
        np = self._np
        at = array("q", np.asarray(lines.to_numpy(), dtype=np.int64).tobytes())
        columns = [
            array("d", np.ascontiguousarray(column.to_numpy()).tobytes()) for column in numbers
        ]
        return shaped(shape, at, columns)
