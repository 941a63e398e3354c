"""The page of all runs: a row for each, with a small curve, and what is kept of a run for it."""

from __future__ import annotations

import math
import re
import time
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from nanguard import __version__
from nanguard.check.log.quantities import Quantity
from nanguard.check.log.series import Log
from nanguard.errors import NanguardError
from nanguard.findings import name_of
from nanguard.record import METRICS
from nanguard.view.report.html.markup import Html, el, join, step_words, theme_button
from nanguard.view.report.verdict import acted_on, faults_in
from nanguard.view.runs import EventKind, Panel, open_run
from nanguard.view.runs.run_follower import Follower, RunChange, is_followed
from nanguard.view.runs.run_model import read_events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nanguard.check.log.series import MetricSeries
    from nanguard.view.runs import FoundRun, Run, RunEvent
    from nanguard.view.server.index import Index, ServedRun

# Buckets of a small curve; when there are more, each two become one.
MOST_BUCKETS = 128
# How much of a log is read before what was found is let go of, and others may have their turn.
_AT_ONCE = 4 << 20
# Curves of a run of which a small one is kept.
_MOST_SPARKS = 24
# Bytes at each end of a file in which a time is looked for.
_EDGE_BYTES = 1 << 14
_TIME = re.compile(rb'"time":(\d{1,11}(?:\.\d{1,9})?)')
# A run whose files have not changed for this long has ended, unless it writes more seldom.
_QUIET = 60.0
# How many pauses between two changes are remembered.
_PAUSES = 8
# A longer pause between two changes was no pace, but a run that was started again.
_LONGEST = 1800.0
_RANKS = {Quantity.LOSS: 1, Quantity.GRAD_NORM: 2}
_PANELS = {Panel.LOSS: 0, Panel.TERMS: 1, Panel.GRAD_NORM: 2}


class Spark:
    """Smallest and largest values of neighbouring points, and where they are not finite.

    When there are too many buckets, neighbours become one. A bucket without a finite point has
    the limits (inf, -inf).

    Attributes:
        points: How many points there were.
        bad: How many of them are not finite.
        last: The last value.
        lows: The smallest finite value of each bucket.
        highs: The largest finite value of each bucket.
        holes: Whether something in each bucket is not finite.
    """

    __slots__ = ("_size", "_there", "bad", "highs", "holes", "last", "lows", "points")

    def __init__(self) -> None:
        self.points = self.bad = 0
        self.last = math.nan
        self.lows, self.highs, self.holes = array("d"), array("d"), bytearray()
        self._size = 1
        self._there = 0

    def extend(self, values: array[float]) -> None:
        """Adds values."""
        at = 0
        while at < len(values):
            if self._there == 0 or self._there == self._size:
                self._open()
            # Whole buckets at a time: a run of a million steps is added in a few thousand pieces.
            part = values[at : at + self._size - self._there]
            self._add(part)
            at += len(part)
            self._there += len(part)
        if len(values):
            self.points += len(values)
            self.last = values[-1]

    def _open(self) -> None:
        if len(self.lows) >= MOST_BUCKETS:
            self.lows = array("d", map(min, self.lows[::2], self.lows[1::2]))
            self.highs = array("d", map(max, self.highs[::2], self.highs[1::2]))
            self.holes = bytearray(map(max, self.holes[::2], self.holes[1::2]))
            self._size *= 2
        self.lows.append(math.inf)
        self.highs.append(-math.inf)
        self.holes.append(0)
        self._there = 0

    def _add(self, part: Sequence[float]) -> None:
        if not math.isfinite(sum(part)):
            finite = [value for value in part if math.isfinite(value)]
            if len(finite) < len(part):
                self.bad += len(part) - len(finite)
                self.holes[-1] = 1
            part = finite
        if len(part):
            self.lows[-1] = min(self.lows[-1], min(part))
            self.highs[-1] = max(self.highs[-1], max(part))


@dataclass(slots=True)
class SparkLine:
    """One curve of a run.

    Attributes:
        name: Its name.
        rank: How little it tells: 0 for the loss.
        evaluation: Whether it was measured on held-out data.
        spark: Its buckets.
        step: Its last step; None if it has none.
    """

    name: str
    rank: int
    evaluation: bool
    spark: Spark = field(default_factory=Spark)
    step: float | None = None


@dataclass(slots=True)
class RunSummary:
    """What is known about a run.

    Attributes:
        main: The curve that tells most; None if there is none.
        axis: What its points are counted by.
        findings: How many faults the rules for logs found in it; remarks are not counted.
        errors: How many of its events are errors.
        stopped: Whether the guard stopped it.
        incidents: How many incidents it has.
        problem: What could not be read.
        changed: When its files changed last, in seconds since 1970.
        pace: How many seconds lie between two of its lines, or between two changes that were
            seen; 0 if neither is known.
        whole: Whether all of it was read.
    """

    main: SparkLine | None = None
    axis: str = "step"
    findings: int = 0
    errors: int = 0
    stopped: bool = False
    incidents: int = 0
    problem: str = ""
    changed: float = 0.0
    pace: float = 0.0
    whole: bool = False

    @property
    def points(self) -> int:
        """How many points its main curve has."""
        return 0 if self.main is None else self.main.spark.points

    @property
    def running(self) -> bool:
        """Whether its files still grow."""
        return time.time() - self.changed < max(_QUIET, 10 * self.pace)

    @property
    def bad(self) -> bool:
        """Whether it went bad and did not come back."""
        lost = self.main is not None and not math.isfinite(self.main.spark.last)
        return self.stopped or (lost and self.findings + self.errors > 0)

    @property
    def state(self) -> str:
        """``bad``, ``running``, ``ended``, or ``reading`` while it is read for the first time."""
        if not self.whole:
            return "reading"
        return "bad" if self.bad else "running" if self.running else "ended"


class Digest:
    """Keeps the summary of one run up to date, with little memory.

    Attributes:
        summary: The summary, replaced with each reading.
    """

    def __init__(self) -> None:
        self.summary = RunSummary()
        self._followers: dict[Path, Follower] = {}
        self._lines: dict[tuple[Path, str], SparkLine] = {}
        # What rules judge, while a run goes on; and how many faults they found in each log.
        self._logs: dict[Path, Log] = {}
        self._faults: dict[Path, int] = {}
        self._let_go = False
        self._seen: dict[Path, tuple[int, int, int]] = {}
        self._pauses: deque[float] = deque(maxlen=_PAUSES)

    def read(self, found: FoundRun) -> Iterator[RunSummary]:
        """Reads what has changed; yields the summary after each large piece of it."""
        problems: list[str] = []
        if self._let_go:
            # Rules look at all of a log, and what was read of this one is not kept any more.
            self._followers, self._lines, self._let_go = {}, {}, False
        try:
            others = [path for path in found.logs if not self._follows(path)]
            if [path for path in others if self._is_new(path)]:
                self._lines = {}
                run = open_run(found)
                self._add_run(run)
                acted = acted_on(run.events)
                self._faults = {Path(log.path): len(faults_in(log, acted)) for log in run.logs}
            for path in found.logs:
                for _ in self._read_log(path, problems) if path not in others else ():
                    yield self._summary_of(found, problems, whole=False)
            self._judge(found)
        except (OSError, NanguardError) as error:
            problems.append(_words(error))
        fresh = self._summary_of(found, problems, whole=True)
        if not fresh.running and not self.waiting and self._logs:
            self._logs, self._let_go = {}, True
        yield fresh

    def _judge(self, found: FoundRun) -> None:
        acted = acted_on(read_events(found.events)[0]) if found.events and self._logs else set()
        for path, log in self._logs.items():
            self._faults[path] = len(faults_in(log, acted))

    @property
    def waiting(self) -> bool:
        """Whether a last line without an end may turn out to be whole."""
        return any(follower.waiting for follower in self._followers.values())

    def fail(self, problem: str, found: FoundRun) -> None:
        """Takes note of why a run could not be read."""
        self.summary = RunSummary(problem=problem, changed=changed_at(found), whole=True)

    def _follows(self, path: Path) -> bool:
        if path not in self._followers and is_followed(path):
            self._followers[path] = Follower(path)
        return path in self._followers

    def _read_log(self, path: Path, problems: list[str]) -> Iterator[None]:
        follower, again = self._followers[path], True
        while again:
            change = follower.read(_AT_ONCE)
            if change is RunChange.GONE:
                problems.append(f"{path.name}: the file is gone")
            elif change is RunChange.ANEW:
                self._logs.pop(path, None)
                self._lines = {key: line for key, line in self._lines.items() if key[0] != path}
            self._drain(path, follower)
            again = follower.behind
            if again:
                yield

    def _drain(self, path: Path, follower: Follower) -> None:
        new = follower.drain()
        for series in new.series:
            line = self._line(path, series)
            if line is not None:
                line.spark.extend(series.values)
                line.step = series.steps[len(series.steps) - 1] if len(series.steps) else None
        self._logs.setdefault(path, Log(str(path))).extend(new)

    def _line(self, path: Path, series: MetricSeries) -> SparkLine | None:
        key = (path, f"{series.name}/{series.rank}")
        if key not in self._lines and len(self._lines) < _MOST_SPARKS:
            plain = series.role is Quantity.LOSS and series.metric.plain
            rank = 0 if plain else _RANKS.get(series.role, 3)
            self._lines[key] = SparkLine(series.name, rank, series.metric.evaluation)
        return self._lines.get(key)

    def _add_run(self, run: Run) -> None:
        """Takes over the curves of a run that was read as a whole."""
        for curve in run.curves[:_MOST_SPARKS]:
            line = SparkLine(curve.name, _PANELS.get(curve.panel, 3), curve.evaluation)
            line.spark.extend(curve.values[: len(curve)])
            line.step = curve.xs[len(curve) - 1] if len(curve) else None
            self._lines[Path(run.path), curve.name] = line

    def _is_new(self, path: Path) -> bool:
        now = path.stat()
        mark = (now.st_ino, now.st_size, now.st_mtime_ns)
        new = self._seen.get(path) != mark
        self._seen[path] = mark
        return new

    def _summary_of(self, found: FoundRun, problems: list[str], *, whole: bool) -> RunSummary:
        old = self.summary
        fresh = RunSummary(incidents=len(found.incidents), problem="; ".join(problems), whole=whole)
        known = [line for line in self._lines.values() if line.spark.points]
        fresh.main = min(
            known, key=lambda one: (one.rank, one.evaluation, -one.spark.points), default=None
        )
        fresh.findings = sum(self._faults.values())
        fresh.changed = changed_at(found)
        fresh.errors, fresh.stopped = old.errors, old.stopped
        if 0 < old.changed < fresh.changed:
            self._pauses.append(min(_LONGEST, fresh.changed - old.changed))
        fresh.pace = median(self._pauses) if self._pauses else old.pace
        if whole:
            self._add_events(found, fresh)
        self.summary = fresh
        return fresh

    def _add_events(self, found: FoundRun, fresh: RunSummary) -> None:
        try:
            if found.events and self._is_new(found.events):
                events: list[RunEvent] = read_events(found.events)[0]
                fresh.errors = sum(event.severity == "error" for event in events)
                fresh.stopped = any(event.kind is EventKind.STOP for event in events)
            metrics = next((path for path in found.logs if path.name == METRICS), None)
            if metrics is not None and not fresh.pace:
                fresh.pace = _seconds(metrics) / max(1, fresh.points)
        except OSError as error:
            fresh.problem = fresh.problem or _words(error)


def changed_at(found: FoundRun) -> float:
    """Returns when the files of a run changed last; 0 if none is there."""
    times = []
    for path in found.files():
        try:
            times.append(path.stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def _seconds(metrics: Path) -> float:
    """Returns the time from the first to the last line of the guard's metrics."""
    with metrics.open("rb") as file:
        first = _TIME.findall(file.read(_EDGE_BYTES))
        file.seek(max(0, metrics.stat().st_size - _EDGE_BYTES))
        last = _TIME.findall(file.read(_EDGE_BYTES))
    return max(0.0, float(last[-1]) - float(first[0])) if first and last else 0.0


def _words(error: OSError | NanguardError) -> str:
    if isinstance(error, NanguardError):
        return f"{Path(error.where).name}: {error.what}"
    return f"{Path(error.filename or '').name}: it cannot be read ({error.strerror or error})"


_WORDS = {"bad": "Bad", "running": "Running", "ended": "Ended", "reading": "Being read"}
_STYLES = {"bad": "bad", "running": "live", "ended": "", "reading": ""}
_NONE = "\N{EN DASH}"
_COLUMNS = ("Run", "Loss", "State", "Last step", "Last loss", "Alarms", "Changed")


def overview(index: Index) -> Html:
    """Returns what is seen of the page of all runs."""
    entries = index.newest_first()
    head = el("tr", *(el("th", name, scope="col") for name in _COLUMNS))
    body = el("tbody", [row(entry, index) for entry in entries], id="runs")
    return join(
        (
            el("a", "To the runs", href="#runs", cls="skip"),
            el(
                "header",
                el(
                    "div",
                    el("h1", index.folder.root.name or str(index.folder.root)),
                    el("p", str(index.folder.root), cls="under mono"),
                ),
                theme_button(),
                cls="top",
            ),
            el(
                "main",
                _tools(),
                el("p", status(index), id="status", role="status", cls="none"),
                el("table", el("thead", head), body, cls="runs", hidden=not entries),
                el("p", _nothing(index), id="nothing", cls="nothing", hidden=bool(entries)),
                el("ul", [el("li", said) for said in problems(index)], id="problems", cls="none"),
            ),
            el("footer", f"nanguard {__version__}. Read-only: nothing here changes a run."),
        )
    )


def row(entry: ServedRun, index: Index) -> Html:
    """Returns the row of a run; it is made once for each version."""
    version = entry.version
    if entry.html[0] != version:
        entry.html = (version, _row(entry, index))
    return Html(entry.html[1])


def _row(entry: ServedRun, index: Index) -> Html:
    summary, found = entry.summary, entry.found
    place = found.path.relative_to(index.folder.root)
    where = f"/run/{entry.key}"
    name = el("a", found.name, href=where)
    said = el("p", str(place), cls="place") if str(place) not in (".", found.name) else None
    problem = el("p", summary.problem, cls="problem") if summary.problem else None
    main = summary.main
    step = _NONE if main is None else step_words(main.step) if main.step is not None else _NONE
    bad = main is not None and not math.isfinite(main.spark.last)
    loss = _NONE if main is None else name_of(float(f"{main.spark.last:.5g}"))
    return el(
        "tr",
        el("th", name, said, problem, scope="row"),
        el("td", picture(main.spark, main.name) if main else el("span", "no curve", cls="none")),
        el("td", _badges(summary)),
        el("td", step, cls="number", data_label="step"),
        el(
            "td",
            loss,
            cls="number bad" if bad else "number",
            data_label=main.name if main else "loss",
        ),
        el("td", _alarms(summary, where)),
        el("td", el("time", data_time=f"{summary.changed:.0f}"), cls="when"),
        id=f"run-{entry.key}",
        data_state=summary.state,
        data_live="yes" if summary.running else None,
        data_find=f"{found.name} {place}".lower(),
    )


def status(index: Index) -> str:
    """Returns how many runs there are, and whether they were read."""
    if not index.searched:
        return "The folder is being searched."
    entries = index.entries.values()
    count = len(entries)
    waiting = sum(not entry.summary.whole for entry in entries)
    running = sum(entry.summary.state == "running" for entry in entries)
    bad = sum(entry.summary.state == "bad" for entry in entries)
    said = f"{count} run{'' if count == 1 else 's'}: {running} running, {bad} bad"
    return f"{said}; {waiting} still to be read." if waiting else f"{said}."


def problems(index: Index) -> list[str]:
    """Returns what could not be looked at."""
    said = index.folder.problems[:10]
    if index.folder.left_out:
        said.append(f"There are more than {len(index.entries)} runs; the others are not shown.")
    return said


def _nothing(index: Index) -> str:
    if not index.folder.root.is_dir():
        return "The folder is gone. When it is there again, its runs appear here."
    if not index.searched:
        return "The folder is being searched."
    return (
        "There is no run here yet. Logs, run folders of the guard, incidents and reports of "
        "nanguard check appear as soon as they are written."
    )


def _tools() -> Html:
    chips = [
        el("button", word, type="button", data_show=state, aria_pressed=str(not state).lower())
        for state, word in (("", "All"), ("running", "Running"), ("bad", "Bad"))
    ]
    label = "Filter by name"
    box = el("input", type="search", id="filter", placeholder=label, aria_label=label)
    return el("div", box, el("div", chips, role="group", aria_label="State"), cls="tools")


def _badges(summary: RunSummary) -> list[Html]:
    state = summary.state
    badges = [el("span", _WORDS[state], cls=f"badge {_STYLES[state]}".rstrip())]
    if state == "bad" and summary.running:
        badges.append(el("span", "Running", cls="badge live"))
    return badges


def _alarms(summary: RunSummary, where: str) -> list[Html] | Html:
    parts = []
    bad = summary.main.spark.bad if summary.main else 0
    if summary.incidents:
        anchor = f"{where}#{'incident-0-0' if summary.incidents == 1 else 'incidents'}"
        parts.append(el("a", _count(summary.incidents, "incident"), href=anchor))
    if summary.stopped:
        parts.append(el("a", "stopped", href=f"{where}#timeline"))
    if summary.errors:
        parts.append(el("a", _count(summary.errors, "event"), href=f"{where}#timeline"))
    if summary.findings:
        parts.append(el("a", _count(summary.findings, "finding"), href=f"{where}#findings"))
    if bad:
        parts.append(el("a", f"{few(bad)} not finite", href=f"{where}#curves"))
    if not parts:
        return el("span", "no alarm", cls="none")
    return el("ul", [el("li", part) for part in parts], cls="alarms")


def _count(number: int, word: str) -> str:
    return f"{few(number)} {word}{'' if number == 1 else 's'}"


_WIDE, _HIGH = 180, 36
_EDGE = 2.0
_THIN = 1.0
# From this ratio on a curve is drawn on a logarithmic scale.
_FAR = 1000.0


def few(number: int) -> str:
    """Returns a number as it is shown: 12 345."""
    return f"{number:,}".replace(",", "\u202f")


def picture(spark: Spark, name: str) -> Html:
    """Returns a curve as a band from the smallest to the largest value of each bucket.

    Buckets in which something is not finite are marked, and the line is not joined over them.
    """
    finite = [at for at, low in enumerate(spark.lows) if low <= spark.highs[at]]
    low = min((spark.lows[at] for at in finite), default=0.0)
    high = max((spark.highs[at] for at in finite), default=1.0)
    said = f"{name}: {_short(low)} to {_short(high)}" if finite else f"{name}: nothing finite"
    if spark.bad:
        said += f", {few(spark.bad)} not finite"
    step = _WIDE / max(1, len(spark.lows))
    place = _scale(low, high)
    holes = "".join(
        f"M{(at + 0.5) * step:.1f} 0V{_HIGH}" for at, hole in enumerate(spark.holes) if hole
    )
    band = "".join(
        f"M{(at + 0.5) * step:.1f} {place(spark.highs[at]):.1f}V{place(spark.lows[at]):.1f}"
        for at in finite
        # A band that is narrower than the line would not be seen.
        if place(spark.lows[at]) - place(spark.highs[at]) > _THIN
    )
    parts = (
        el("title", said),
        _path(holes, "holes", max(2.0, step)),
        _path(band, "band", step + 0.2),
        _path(_line(spark, finite, place, step), "line", 1.4),
    )
    return Html(
        f'<svg class="spark" role="img" viewBox="0 0 {_WIDE} {_HIGH}"'
        f' preserveAspectRatio="none">{join(parts)}</svg>'
    )


def _path(way: str, cls: str, width: float) -> Html:
    # Made of our own numbers only: an element's attributes would be cut where they are long.
    return Html(f'<path class="{cls}" d="{way}" stroke-width="{width:.1f}"/>' if way else "")


def _line(spark: Spark, finite: Sequence[int], place: Callable[[float], float], step: float) -> str:
    out, before = [], -2
    for at in finite:
        joined = at == before + 1 and not spark.holes[at] and not spark.holes[before]
        y = (place(spark.lows[at]) + place(spark.highs[at])) / 2
        out.append(f"{'L' if joined else 'M'}{(at + 0.5) * step:.1f} {y:.1f}")
        if not joined:
            out.append("h0.1")
        before = at
    return "".join(out)


def _scale(low: float, high: float) -> Callable[[float], float]:
    log = low > 0 and high / low > _FAR

    def turned(value: float) -> float:
        return math.log(value) if log else value

    bottom = turned(low)
    # Halves, as the difference of two large numbers may be too large for a float.
    wide = turned(high) / 2 - bottom / 2 or 1.0

    def place(value: float) -> float:
        share = (turned(value) / 2 - bottom / 2) / wide if high > low else 0.5
        return _HIGH - _EDGE - share * (_HIGH - 2 * _EDGE)

    return place


def _short(value: float) -> str:
    return name_of(float(f"{value:.4g}"))
