"""What records hold beside their metrics: loss terms, and when each step was made."""

from __future__ import annotations

import os
import re
from array import array
from typing import TYPE_CHECKING, Any

from nanguard.check.log.names import Metric, Role
from nanguard.check.log.records import loads
from nanguard.check.log.series import Column, MetricSeries, compact
from nanguard.view.runs.model import Clock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_CHUNK = 4 << 20
_MOST_TERMS = 32
# How many lines are asked for the time.
_ASKED = 2000
_LINE = 1 << 16
_STEPS = ("step", "global_step", "_step", "iteration")
_TIMES = ("time", "timestamp", "_timestamp", "wall_time")
# Seconds since 1970, in a year with four digits; less is the time that a step took.
_MOMENT = (1e8, 1e11)
_NAMES = re.compile(
    rb'"terms":\{("(?:[^"\\]){1,80}":[^,{}]{1,40}(?:,"(?:[^"\\]){1,80}":[^,{}]{1,40})*)\}'
)
_NAME = re.compile(rb'"([^"\\]{1,80})":')


class Terms:
    """Gathers the loss terms of ``metrics.jsonl``, a piece of the file at a time.

    Attributes:
        series: What was gathered, a series for each term.
    """

    def __init__(self) -> None:
        self.series: dict[str, MetricSeries] = {}
        self._names: tuple[str, ...] = ()
        self._pattern: re.Pattern[bytes] | None = None

    def read(self, path: Path) -> list[MetricSeries]:
        """Reads a whole file.

        Raises:
            OSError: It cannot be read.
        """
        for piece in _pieces(path):
            self.feed(piece)
        return list(self.series.values())

    def feed(self, piece: bytes) -> None:
        """Takes in whole lines."""
        if b'"terms":' not in piece:
            return
        if self._pattern is None:
            self._learn(piece)
        found = self._pattern.findall(piece) if self._pattern else []
        # Lines of another shape are among them: all of them are read one by one.
        if not found or len(found) != piece.count(b'"terms":'):
            self._feed_slowly(piece)
            return
        steps, *columns = zip(*found, strict=True)
        places = compact(array("q", map(int, steps)))
        for name, column in zip(self._names, columns, strict=True):
            self._add(name, places, _floats(column))

    def _learn(self, piece: bytes) -> None:
        first = _NAMES.search(piece)
        names = _NAME.findall(first[1]) if first else []
        if not names or len(names) > _MOST_TERMS:
            return
        self._names = tuple(name.decode("utf-8", "replace") for name in names)
        terms = b",".join(b'"' + re.escape(name) + rb'":([^,{}]{1,40})' for name in names)
        self._pattern = re.compile(rb'"step":(\d{1,18}),[^{}\n]*"terms":\{' + terms + rb"\}")

    def _feed_slowly(self, piece: bytes) -> None:
        for line in piece.split(b"\n"):
            record = loads(line[:_LINE].decode("utf-8", "replace")) if b'"terms":' in line else None
            if not isinstance(record, dict) or not isinstance(record.get("terms"), dict):
                continue
            step = record.get("step")
            if not isinstance(step, int) or not 0 <= step < 2**62:
                continue
            for name, value in list(record["terms"].items())[:_MOST_TERMS]:
                number = _float(value)
                if number is not None:
                    self._add(str(name)[:80], [step], array("d", [number]))

    def _add(self, name: str, steps: Any, values: array[float]) -> None:
        series = self.series.get(name)
        if series is None:
            if len(self.series) >= _MOST_TERMS:
                return
            metric = Metric(Role.LOSS, name, f"terms_{name}", plain=False)
            series = self.series[name] = MetricSeries(metric)
            series.steps = Column()
        series.extend(values, steps, None, None)


def clock_of(path: Path) -> Clock:
    """Returns when some of the steps in a log of JSON lines were made; nothing for other logs.

    Raises:
        OSError: It cannot be read.
    """
    size = path.stat().st_size
    steps, times = array("q"), array("d")
    with path.open("rb") as file:
        for offset in _offsets(size):
            if offset is not None and offset > file.tell():
                file.seek(offset)
                file.readline(_LINE)
            line = file.readline(_LINE)
            if not line:
                break
            if not steps and not line.lstrip().startswith(b"{"):
                break
            record = loads(line.decode("utf-8", "replace"))
            moment = _moment(record) if isinstance(record, dict) else None
            # What was measured at a step after it was made has the same step, and a later time.
            if moment is not None and (not steps or moment[0] != steps[-1]):
                steps.append(moment[0])
                times.append(moment[1])
    return Clock(steps, times)


def _moment(record: dict[str, Any]) -> tuple[int, float] | None:
    """Returns the step and the time of a record; None if one of them is not there."""
    step = next((record[key] for key in _STEPS if key in record), None)
    when = _float(next((record[key] for key in _TIMES if key in record), None))
    if not isinstance(step, int) or not 0 <= step < 2**62 or when is None:
        return None
    return (step, when) if _MOMENT[0] < when < _MOMENT[1] else None


def _offsets(size: int) -> Iterator[int | None]:
    """Yields places to look at; None for the line that follows."""
    if size <= _ASKED * 200:
        yield from (None for _ in range(size))
        return
    yield None
    for part in range(1, _ASKED):
        yield size * part // _ASKED
    yield size - 600
    yield from (None for _ in range(20))


def _pieces(path: Path) -> Iterator[bytes]:
    """Yields a file in pieces of whole lines; what follows its last line end is left out."""
    with path.open("rb") as file:
        left = os.fstat(file.fileno()).st_size
        rest = b""
        while left > 0 and (chunk := file.read(min(_CHUNK, left))):
            left -= len(chunk)
            cut = chunk.rfind(b"\n") + 1
            if cut:
                yield rest + chunk[:cut]
                rest = chunk[cut:]
            elif len(rest) < _CHUNK:
                rest += chunk


def _floats(column: tuple[bytes, ...]) -> array[float]:
    try:
        return array("d", map(float, column))
    except ValueError:
        return array("d", [_told(text) for text in column])


def _told(text: bytes) -> float:
    """Returns a number, or one whose name is written in quotes."""
    try:
        return float(text.strip(b' "'))
    except ValueError:
        return float("nan")


def _float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
