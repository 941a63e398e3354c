"""Features that lie side by side in rows: every column's numbers, in one pass over the rows."""

from __future__ import annotations

from typing import Any

from nanguard.check.data.numbers import SAMPLED, Numbers
from nanguard.check.data.places import MAX_PLACES, Place, Places

MAX_WIDTH = 4096  # wider rows are images or sequences, whose columns mean nothing by themselves
MIN_ZERO_WIDTH = 4


class Matrix:
    """The columns of rows of numbers.

    Args:
        name: The name of the array.
        width: How many columns there are.
    """

    def __init__(self, name: str, width: int) -> None:
        import numpy as np

        self.name = name
        self.width = width
        self.rows = 0
        self.low = np.full(width, np.inf)
        self.high = np.full(width, -np.inf)
        self.logs = np.zeros(width)
        self.squares = np.zeros(width)
        self.sampled = 0
        self.zeros = np.zeros(width, dtype="int64")
        self.bad: dict[int, Places] = {}
        self.zero = Places()
        self._largest: dict[int, Place] = {}

    def add(self, rows: Any, first: int = 0) -> None:
        """Notes rows, a NumPy array of two dimensions.

        Args:
            rows: The rows.
            first: The record of the first one.
        """
        import numpy as np

        if not rows.size:
            return
        low, high = rows.min(axis=0).astype("float64"), rows.max(axis=0).astype("float64")
        for column in np.flatnonzero(~(np.isfinite(low) & np.isfinite(high))):
            low[column], high[column] = self._bad(rows[:, column], int(column), first)
        self._note_largest(rows, low, high, first)
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        self.rows += len(rows)
        self._sample(rows[:: max(1, len(rows) // SAMPLED)])
        self._zero_rows(rows, first)

    def _bad(self, values: Any, column: int, first: int) -> tuple[float, float]:
        import numpy as np

        fine = np.isfinite(values)
        wrong = np.flatnonzero(~fine)
        places = self.bad.setdefault(column, Places())
        for at in wrong[:MAX_PLACES]:
            places.add(Place(first + int(at), None, str(float(values[at]))), 0)
        places.count += int(wrong.size)
        kept = values[fine]
        return (float(kept.min()), float(kept.max())) if kept.size else (np.inf, -np.inf)

    def _note_largest(self, rows: Any, low: Any, high: Any, first: int) -> None:
        """Notes where a column grew beyond what it was by far, which is rare."""
        import numpy as np

        now = np.maximum(np.abs(low), np.abs(high))
        before = np.maximum(np.abs(self.low), np.abs(self.high))
        before[~np.isfinite(before)] = 0.0
        for column in np.flatnonzero(np.isfinite(now) & (now > 1e4) & (now > before)):
            sizes = np.abs(np.where(np.isfinite(rows[:, column]), rows[:, column], 0))
            at = int(sizes.argmax())
            self._largest[int(column)] = Place(first + at, None, f"{float(rows[at, column]):.4g}")

    def _sample(self, rows: Any) -> None:
        import numpy as np

        sizes = np.abs(rows.astype("float64"))
        usable = np.isfinite(sizes) & (sizes > 0)
        logs = np.log2(np.where(usable, sizes, 1.0))
        self.logs += logs.sum(axis=0)
        self.squares += (logs * logs).sum(axis=0)
        self.sampled += len(rows)
        self.zeros += (~usable).sum(axis=0)

    def _zero_rows(self, rows: Any, first: int) -> None:
        import numpy as np

        if self.width < MIN_ZERO_WIDTH:
            return
        maybe = np.flatnonzero(rows[:, 0] == 0)
        for at in maybe[~rows[maybe].any(axis=1)] if maybe.size else ():
            self.zero.add(Place(first + int(at), None))

    def columns(self, *, whole: bool) -> dict[str, Numbers]:
        """Returns each column as it would be if it stood alone."""
        out = {}
        for at in range(self.width):
            name = self.name if self.width == 1 else f"{self.name}[{at}]"
            out[name] = Numbers(
                name,
                count=self.rows,
                bad=self.bad.get(at, Places()),
                low=float(self.low[at]),
                high=float(self.high[at]),
                largest=self._largest.get(at),
                zeros=int(self.zeros[at]),
                sampled=self.sampled,
                logs=float(self.logs[at]),
                squares=float(self.squares[at]),
                whole=whole,
            )
        return out
