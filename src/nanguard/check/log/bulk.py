"""Takes the numbers out of millions of lines at once, where polars is installed."""

from __future__ import annotations

from array import array
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from nanguard.check.log.gathering import Pieces
from nanguard.check.log.lines import SAME_LINE, Stretch
from nanguard.check.log.text import WORTH_READING, TextReader, shaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nanguard.check.log.gathering import Rows
    from nanguard.check.log.shapes import Shape

# How many shapes are tried on all lines, and the share of lines that earns a shape its place.
_MOST = 8
_SHARE = 0.002
# How much of a log is read line by line before all of it is.
_LEARN = 1 << 14
_MOST_STEP = 2**62
_WORTH = f"(?i){WORTH_READING.pattern}"


def bulk_reader(reader: TextReader) -> Bulk | None:
    """Returns a reader that works with polars; None where it is not installed."""
    try:
        import numpy as np
        import polars as pl
    except ImportError:
        return None
    return Bulk(reader, pl, np)


class Bulk:
    """Reads what has a known shape in bulk, and leaves the rest to the reader of lines."""

    def __init__(self, reader: TextReader, pl: Any, np: Any) -> None:
        self._reader = reader
        self._pl = pl
        self._np = np
        self._hits: dict[str, int] = {}

    def read_all(self, stretches: Iterable[Stretch], threads: int) -> None:
        """Reads stretches in order, the next ones beside the one that is gathered."""
        waiting: deque[Any] = deque()
        with ThreadPoolExecutor(max_workers=max(1, threads)) as pool:
            for stretch in stretches:
                if not self._reader.shapes:
                    stretch = self._first_lines(stretch)
                waiting.append((stretch, pool.submit(self._take_all, stretch, self._chosen())))
                if len(waiting) > threads:
                    self._gather(*waiting.popleft())
            while waiting:
                self._gather(*waiting.popleft())

    def _gather(self, stretch: Stretch, work: Any) -> None:
        taken = work.result()
        if taken is None:
            self._reader.read(stretch)
            return
        rows, left, pieces = taken
        if self._reader.table is None:
            left = left.filter(self._pl.col("l").str.contains(_WORTH))
        numbered = zip(left["n"].to_list(), left["l"].to_list(), strict=True)
        self._reader.gather(rows, numbered, pieces)

    def _chosen(self) -> list[Shape]:
        """Returns the shapes that are tried on all lines, the most frequent first."""
        shapes = [shape for shape in self._reader.shapes if shape.compiled.groups]
        shapes.sort(key=lambda shape: -self._hits.get(shape.pattern, 1 << 30))
        return shapes[:_MOST]

    def _first_lines(self, stretch: Stretch) -> Stretch:
        """Reads some lines one by one, to learn shapes from; returns the rest."""
        end = stretch.text.find("\n", _LEARN)
        while end >= 0 and stretch.text.startswith(SAME_LINE, end + 1):
            end = stretch.text.find("\n", end + 1)
        if end < 0:
            return stretch
        head = stretch.text[:end]
        self._reader.read(Stretch(stretch.first, head))
        first = stretch.first + head.count("\n") + 1 - head.count("\n" + SAME_LINE)
        return Stretch(first, stretch.text[end + 1 :], stretch.ended)

    def _take_all(
        self, stretch: Stretch, shapes: list[Shape]
    ) -> tuple[list[Rows], Any, Pieces | None] | None:
        """Returns the rows of known shapes and the lines that are left; None if none is known."""
        if not shapes or not stretch.ended:
            return None
        frame, pieces = self._frame(stretch)
        rows: list[Rows] = []
        total = len(frame)
        for shape in shapes:
            if self._hits.get(shape.pattern, total) < _SHARE * total or not len(frame):
                continue
            frame, found = self._take(frame, shape)
            if found is not None:
                rows.append(found)
        return rows, frame, pieces

    def _frame(self, stretch: Stretch) -> tuple[Any, Pieces | None]:
        """Returns the numbered lines, and which pieces make a line where some are cut."""
        pl = self._pl
        frame = pl.Series("l", [stretch.text]).str.split("\n").explode().to_frame()
        frame = frame.with_row_index("n", offset=stretch.first)
        if SAME_LINE not in stretch.text:
            return frame, None
        starts = ~frame["l"].str.starts_with(SAME_LINE)
        before = stretch.first - int(starts[0])
        numbers = array("q", (starts.cast(pl.Int64).cum_sum() + before).to_numpy().tobytes())
        frame = frame.with_columns(pl.col("l").str.strip_prefix(SAME_LINE))
        return frame, Pieces(stretch.first, numbers)

    def _take(self, frame: Any, shape: Shape) -> tuple[Any, Rows | None]:
        """Returns the lines that are left, and the rows of those that had the shape."""
        pl = self._pl
        try:
            groups = frame["l"].str.extract_groups(shape.pattern).struct.unnest()
        except pl.exceptions.PolarsError:  # a pattern too large for its engine
            self._hits[shape.pattern] = 0
            return frame, None
        numbers = groups.select(pl.all().cast(pl.Float64, strict=False))
        finite = pl.all_horizontal(pl.all().is_finite().fill_null(value=False))
        whole = numbers.select(ok=finite)["ok"]
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
        taken = [np.ascontiguousarray(column.to_numpy()) for column in numbers]
        steps = None
        if shape.step is not None:
            steps = self._whole(np.clip(taken[shape.step], -_MOST_STEP, _MOST_STEP))
        columns = [self._column(column) for column in taken]
        return shaped(shape, self._whole(lines.to_numpy()), columns, steps)

    def _column(self, values: Any) -> array[float]:
        """Returns finite numbers in single precision, where that holds them."""
        np = self._np
        with np.errstate(over="ignore"):
            narrow = values.astype(np.float32)
        if np.isfinite(narrow).all():
            return array("f", narrow.tobytes())
        return array("d", values.tobytes())

    def _whole(self, values: Any) -> Sequence[int]:
        """Returns whole numbers, as a range where they are regular."""
        np = self._np
        whole = values.astype(np.int64)
        stride = int(whole[1] - whole[0]) if len(whole) > 1 else 1
        if stride and (np.diff(whole) == stride).all():
            return range(int(whole[0]), int(whole[-1]) + (1 if stride > 0 else -1), stride)
        return array("q", whole.tobytes())
