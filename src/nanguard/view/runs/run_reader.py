"""Reads runs: from files and folders to the model."""

from __future__ import annotations

import os
import re
import shlex
from array import array
from bisect import bisect_right
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard import incident as incident_files
from nanguard.check.log.grammar import loads
from nanguard.check.log.log_reader import open_sources
from nanguard.check.log.quantities import Metric, Quantity
from nanguard.check.log.series import MetricSeries, SeriesColumn, compact
from nanguard.check.scan import Scan, in_threads
from nanguard.check.workers import Workers
from nanguard.errors import IncidentError, NanguardError, SourceError
from nanguard.masking import HIDDEN, hidden, hidden_words
from nanguard.record import METRICS
from nanguard.source.text import decode, read_bytes
from nanguard.view.runs.curves import restarts_of
from nanguard.view.runs.run_finder import find_runs
from nanguard.view.runs.run_model import (
    Axis,
    Clock,
    Curve,
    Panel,
    Run,
    events_of_incidents,
    events_of_log,
    events_of_restarts,
    in_order,
    read_events,
    read_lineage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nanguard.check.log.series import Log
    from nanguard.incident import Incident
    from nanguard.view.runs.run_finder import FoundRun
    from nanguard.view.runs.run_model import RunEvent

# Processes that read logs, and may die of them. They are kept for the next log: a page that follows
# a run opens its files again and again. They end with this process.
_READERS = Workers()
# Bytes of a configuration and of a report that are read, findings that are kept.
_LARGEST_CONFIG = 128 << 10
_LARGEST_REPORT = 64 << 20
_MOST_FINDINGS = 2000


def configuration_of(paths: Sequence[Path]) -> dict[str, str]:
    """Returns the texts of configurations by file name; what looks like a secret is hidden."""
    out = {}
    for path in paths:
        try:
            data = read_bytes(str(path), _LARGEST_CONFIG)
            content = decode(str(path), data, python=False).content
        except SourceError as error:
            out[path.name] = f"# not shown: {error.what}"
            continue
        out[path.name] = hidden(content)
    return out


def environment_of(incidents: Sequence[Incident]) -> dict[str, str]:
    """Returns versions, machine and command, as the first incident recorded them."""
    out: dict[str, str] = {}
    for incident in incidents[:1]:
        run = incident.get("run")
        if not isinstance(run, dict):
            continue
        command = run.get("command")
        if isinstance(command, list) and command:
            words = hidden_words(list(map(str, command[:100])))
            out["command"] = " ".join(w if HIDDEN in w else shlex.quote(w) for w in words)
        for key in ("folder", "python", "torch", "nanguard", "platform", "device", "ranks"):
            if isinstance(run.get(key), (str, int)):
                out[key] = str(run[key])
        out |= _optimizer(incident.get("optimizer"))
        if isinstance(incident.get("autocast"), str):
            out["autocast"] = incident["autocast"]
    return out


def findings_of(path: Path) -> list[dict[str, Any]]:
    """Returns the findings in the JSON of ``nanguard check``.

    Raises:
        SourceError: It is none.
    """
    report = loads(read_bytes(str(path), _LARGEST_REPORT).decode("utf-8", "replace"))
    findings = report.get("findings") if isinstance(report, dict) else None
    if not isinstance(findings, list):
        raise SourceError(
            "it is not a complete report of nanguard check.",
            where=str(path),
            do="Write it again: nanguard check --format json -o report.json",
        )
    return [finding for finding in findings[:_MOST_FINDINGS] if isinstance(finding, dict)]


def _optimizer(fields: Any) -> dict[str, str]:
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        return {}
    rest = [f"{key} {fields[key]:g}" for key in ("lr", "eps") if _is_number(fields.get(key))]
    return {"optimizer": ", ".join([fields["name"], *rest])}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_CHUNK_BYTES = 4 << 20
_MOST_TERMS = 32
# How many lines are searched for a time.
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
        # From the beginning of a line only: one that names many steps would be searched for each.
        start = rb'(?m)^\{"step":(\d{1,18}),[^{}\n]*"terms":\{'
        self._pattern = re.compile(start + terms + rb"\}")

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
            metric = Metric(Quantity.LOSS, name, f"terms_{name}", plain=False)
            series = self.series[name] = MetricSeries(metric)
            series.steps = SeriesColumn()
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
        while left > 0 and (chunk := file.read(min(_CHUNK_BYTES, left))):
            left -= len(chunk)
            cut = chunk.rfind(b"\n") + 1
            if cut:
                yield rest + chunk[:cut]
                rest = chunk[cut:]
            elif len(rest) < _CHUNK_BYTES:
                rest += chunk


def _floats(column: tuple[bytes, ...]) -> array[float]:
    try:
        return array("d", map(float, column))
    except ValueError:
        return array("d", [_number_of(text) for text in column])


def _number_of(text: bytes) -> float:
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


_PANELS = {
    Quantity.GRAD_NORM: Panel.GRAD_NORM,
    Quantity.RATE: Panel.RATE,
    Quantity.SCALE: Panel.SCALE,
    Quantity.ACCURACY: Panel.ACCURACY,
}
_ORDER = list(Panel)
# A larger step is not a count; a page could not show it exactly.
_MOST_STEP = 2**53


def open_runs(paths: Sequence[str | Path], scan: Scan | None = None) -> list[Run]:
    """Reads every run that is meant by files and folders.

    Raises:
        SourceError: A path does not exist, or holds nothing that can be shown.
    """
    return [open_run(found, scan) for found in find_runs(paths)]


def open_run(
    found: FoundRun,
    scan: Scan | None = None,
    read: Callable[[Run, FoundRun, Scan], None] | None = None,
) -> Run:
    """Reads one run; what cannot be read is among its ``problems``.

    Args:
        found: Its files.
        scan: How they are read.
        read: Reads the logs into the run, where that is not to be done from their beginnings.
    """
    run = Run(found.name, str(found.path))
    how = scan or Scan()
    if how.spread is in_threads:
        how = replace(how, spread=_READERS.spread)
    _attempt(run, lambda: (read or read_logs)(run, found, how))
    _read_incidents(run, found)
    if not run.curves:
        run.curves = _curves_of_incidents(run.incidents)
        run.axis = Axis.STEP if run.curves else run.axis
    events = events_of_incidents(run.incidents)
    events += _attempt(run, lambda: _noted(run, read_events, found.events)) or []
    events += _attempt(run, lambda: _noted(run, read_lineage, found.lineage)) or []
    if found.events is None:
        for log in run.logs:
            events += events_of_log(log)
    events += _in_order_of_steps(run)
    run.events = in_order(events)
    for path in found.reports:
        run.findings += _attempt(run, partial(findings_of, path)) or []
    run.configuration = configuration_of(found.configs)
    run.environment = environment_of(run.incidents)
    if found.left_out:
        names = ", ".join(path.name for path in found.left_out[:8])
        run.problems.append(f"not shown, because it lies beside {found.logs[0].name}: {names}")
    for step in run.clock.set_back()[:3]:
        run.problems.append(f"the clock goes back at step {step}; times after it may be wrong")
    return run


def curves_of(logs: Sequence[Log]) -> tuple[list[Curve], Axis]:
    """Returns the curves of logs, and what their points are counted by."""
    series = [one for log in logs for one in log.series if len(one)]
    axis = Axis.ENTRY
    if any(len(one.steps) == len(one) for one in series):
        axis = Axis.STEP
    elif any(len(one.epochs) == len(one) for one in series):
        axis = Axis.EPOCH
    curves = [_curve(one, axis, series) for one in series]
    curves.sort(key=lambda curve: (_ORDER.index(curve.panel), curve.evaluation))
    return curves, axis


def read_logs(run: Run, found: FoundRun, scan: Scan) -> None:
    """Reads the logs of a run from their beginnings.

    Raises:
        OSError: One cannot be read.
    """
    paths = [*found.logs, *([found.events] if found.events and found.logs else [])]
    run.logs = list(open_sources(paths, scan))
    run.problems += [_words(log.problem) for log in run.logs if log.problem is not None]
    metrics = next((path for path in found.logs if path.name == METRICS), None)
    if metrics is not None and found.is_record:
        for log in run.logs:
            if log.path == str(metrics):
                log.series += Terms().read(metrics)
    run.clock = first_clock(found.logs)
    history = list(open_sources([found.history], scan)) if found.history else []
    run.curves, run.axis = curves_of([*run.logs, *history])


def first_clock(logs: Sequence[Path]) -> Clock:
    """Returns the clock of the first log that has one.

    Raises:
        OSError: One cannot be read.
    """
    clocks = (clock_of(path) for path in logs if path.is_file())
    return next((clock for clock in clocks if len(clock.steps)), Clock())


def _read_incidents(run: Run, found: FoundRun) -> None:
    for folder in found.incidents:
        try:
            run.incidents.append(incident_files.read(folder).without_secrets())
        except IncidentError as error:
            run.problems.append(_words(error))
    run.incidents.sort(key=lambda incident: (_number(incident, "step"), _number(incident, "rank")))


def _curves_of_incidents(incidents: Sequence[Incident]) -> list[Curve]:
    """Returns the losses that replays went through, where there is no log."""
    known: dict[int, float] = {}
    for incident in incidents:
        step, before = incident.get("step"), incident.get("losses_before")
        symptom = incident.get("symptom")
        loss = _as_float(symptom.get("loss")) if isinstance(symptom, dict) else None
        losses = [_as_float(value) for value in before[-100:]] if isinstance(before, list) else []
        if not isinstance(step, int) or not 0 <= step < _MOST_STEP or (not losses and loss is None):
            continue
        placed = enumerate([*losses, loss], step - len(losses))
        known |= {place: value for place, value in placed if value is not None and place >= 0}
    steps = sorted(known)
    if not steps:
        return []
    xs, values = array("q", steps), array("d", [known[step] for step in steps])
    return [Curve("loss (from replays)", Panel.LOSS, xs, values)]


def _in_order_of_steps(run: Run) -> list[RunEvent]:
    """Puts points in order whose steps are not; returns the places at which a run began anew."""
    main = run.main()
    events: list[RunEvent] = []
    disorder = 0
    for curve in run.curves:
        restarts = restarts_of(curve.xs)
        if restarts is None:
            _sort(curve)
            disorder += 1
        elif curve is main:
            events = events_of_restarts(curve, restarts)
    if disorder:
        run.problems.append(
            f"the {run.axis.value}s of {disorder} of {len(run.curves)} curves are out of order; "
            "they are shown in order"
        )
    return events


def _sort(curve: Curve) -> None:
    order = sorted(range(len(curve)), key=lambda at: curve.xs[at])
    xs = array("d", [curve.xs[at] for at in order])
    values = array(curve.values.typecode, [curve.values[at] for at in order])
    curve.xs, curve.values = xs, values


def _curve(series: MetricSeries, axis: Axis, others: Sequence[MetricSeries]) -> Curve:
    rank = "" if series.rank is None else f" (rank {series.rank})"
    return Curve(
        f"{series.name}{rank}",
        _panel(series),
        _xs(series, axis, others),
        series.values,
        series.metric.evaluation,
        series.rank,
    )


def _panel(series: MetricSeries) -> Panel:
    if series.role is Quantity.LOSS:
        return Panel.LOSS if series.metric.plain else Panel.TERMS
    return _PANELS.get(series.role, Panel.TERMS)


def _xs(
    series: MetricSeries, axis: Axis, others: Sequence[MetricSeries]
) -> Sequence[float] | SeriesColumn:
    count = len(series)
    if axis is Axis.STEP and len(series.steps) == count:
        return series.steps
    if axis is not Axis.ENTRY and len(series.epochs) == count:
        if axis is Axis.EPOCH:
            return series.epochs
        guide = max(others, key=lambda one: len(one.epochs) if len(one.steps) else 0)
        return _steps_of_epochs(series.epochs, guide)
    return range(count)


def _steps_of_epochs(epochs: array[float], guide: MetricSeries) -> Sequence[float]:
    """Returns the last step of each epoch, as far as another series knows it."""
    if not len(guide.epochs) or len(guide.epochs) != len(guide.steps):
        return range(len(epochs))
    ends = (bisect_right(guide.epochs, epoch) - 1 for epoch in epochs)
    return array("q", [guide.steps[max(0, end)] for end in ends])


def _attempt(run: Run, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (OSError, SourceError) as error:
        run.problems.append(_words(error))
        return None


def _noted(
    run: Run, read: Callable[[Path], tuple[list[RunEvent], list[str]]], path: Path | None
) -> list[RunEvent]:
    if path is None:
        return []
    events, problems = read(path)
    run.problems += problems
    return events


def _words(error: OSError | NanguardError) -> str:
    if isinstance(error, NanguardError):
        return f"{Path(error.where).name}: {error.what}"
    return f"{Path(error.filename or '').name}: it cannot be read ({error.strerror or error})"


def _as_float(value: Any) -> float | None:
    if isinstance(value, str) and value not in ("nan", "inf", "-inf"):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _number(incident: Incident, key: str) -> int:
    value = incident.get(key)
    return value if isinstance(value, int) else 0
