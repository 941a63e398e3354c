"""Reads one line of text: which numbers stand in it, and what they are called.

There is no one grammar of log lines. What they share: a number stands after its name, and
something that is neither stands between two pairs.

A line that was read once gives a pattern in which every number is open and every other
character fixed. Lines of the same shape then need no reading: their numbers are taken out.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.check.log.quantities import (
    METRIC_ROLES,
    Metric,
    Quantity,
    metric_of,
    suffix_of,
    word_set,
)
from nanguard.check.log.series import Which

if TYPE_CHECKING:
    from collections.abc import Iterator

# Characters of a line that are read; the rest of an endless one is not.
LONGEST_LINE = 65_536
_MOST_VALUES = 200

VALUE = re.compile(
    r"(?<![\w.@])[-+]?(?:"
    r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r"|nan(?:\.0)?|inf(?:inity)?)(?![\w]|\.\w|[-/][A-Za-z])",
    re.IGNORECASE,
)
INTERESTING = re.compile(r"loss|norm|nll|xent|bce|mse|elbo|scale|acc|grad|entropy", re.IGNORECASE)
_SPLIT = re.compile(r"[^\w\s./@#-]+|\s{2,}|\s-+\s|\t")
_LABEL = re.compile(r"(?:^|[\]\s|>])([A-Za-z][\w.-]{1,40})\s*[:>|]\s*$")
_LOG_LEVELS = word_set(
    "info warning warn error debug critical root main train training trainer val eval test "
    "stdout stderr loss step epoch iter iteration logger metrics results result summary time "
    "lr"
)
_WRAPPERS = frozenset(["tensor", "array", "float", "float32", "float64", "item"])
_LINKS = re.compile(
    r"\s+(?:is|was|became|becomes|are|of|at|now|has become|(?:went|diverged|exploded) to)\s*$"
)
_RANK = re.compile(r"(?i)\b(?:local_|global_)?rank\W{0,3}(\d{1,6})\b|\[default(\d{1,6})\]")
# Losses on different data stand at different levels; they are series of their own.
_DATASET = re.compile(
    r"(?i)(?<![\w.])(?:dataset|task|domain)[\"']?\s*[=:]\s*[\"']?([a-z][\w-]{0,40})(?![\w./(])"
)
_BATCH_OF = re.compile(r"[|\[(]\s*(\d{1,12})/\s*(\d+)|^\s*(\d{1,12})/(\d+)\s*[\[━]")
# What may follow a bare NaN that is separated from its name by no more than a space.
_AFTER_BARE = re.compile(
    r"\s*(?:$|[^\w\s/'\"-]|\S+(?:\s*[=:]\s*|\s)[-+]?(?:\d|nan|inf)|\s{2,}|\s-)"
)
_NO_VALUE = re.compile(
    r"[\s\-_/]+(?:check|guard|filter|handl|detection|detector|enabled|disabled|safe|iterations"
    r"|or\b|and\b|protect|monitor|debug|threshold|counter)",
    re.IGNORECASE,
)
_CONDITION = re.compile(r"(?i)\b(?:if|when|whenever|unless|should|may|might|could|in case)\b")
_BEST = re.compile(r"(?i)\bbest\b|\binitial|\bearly.?stop|\bpatience\b|\bimproved\b|\bso far\b")
# What may stand between a name and its number.
_TAIL = " \t:=|~≈'\"([{]})>│┃→"
_PHASES = word_set("train training val valid validation eval test dev avg mean total")


@dataclass(frozen=True, slots=True)
class LoggedValue:
    """A number of a line, and what it is called."""

    metric: Metric
    number: float
    start: int
    end: int


@dataclass(slots=True)
class LogLine:
    """What one line says.

    Attributes:
        values: Its metrics.
        step: The step it names.
        epoch: The epoch it names.
        rank: The rank it names.
        label: What the numbers were measured on.
    """

    values: list[LoggedValue] = field(default_factory=list)
    step: LoggedValue | None = None
    epoch: LoggedValue | None = None
    rank: int | None = None
    label: str = ""


def read_line(text: str) -> LogLine:
    """Returns what a line says."""
    line = LogLine()
    end = 0
    batch: LoggedValue | None = None
    for count, match in enumerate(VALUE.finditer(text)):
        if count > _MOST_VALUES:
            break
        between = text[max(end, match.start() - 80) : match.start()]
        end = match.end()
        named = _metric(between)
        if named is None:
            continue
        metric, strong = named
        value = _value(text, match, metric, strong=strong)
        if value is None:
            continue
        if metric.role in METRIC_ROLES:
            if not line.values:
                line.label = _label(between, metric)
            line.values.append(value)
        elif metric.role is Quantity.BATCH:
            batch = batch or value
        else:
            _place(line, value)
    _finish(line, text, batch)
    return line


def _place(line: LogLine, value: LoggedValue) -> None:
    if not math.isfinite(value.number):
        return
    if (
        value.metric.role is Quantity.STEP
        and line.step is None
        and value.number == int(value.number)
    ):
        line.step = value
    elif value.metric.role is Quantity.EPOCH and line.epoch is None:
        line.epoch = value
    elif value.metric.role is Quantity.RANK and 0 <= value.number < 1e6:
        line.rank = int(value.number)


def _finish(line: LogLine, text: str, batch: LoggedValue | None) -> None:
    if line.step is None and (line.values or line.epoch):
        line.step = batch or _counted(text)
    if line.values and not line.label:
        line.label = dataset_of(text)
    if line.rank is None and line.values:
        found = _RANK.search(text)
        if found:
            line.rank = int(found[1] or found[2])


def dataset_of(text: str) -> str:
    """Returns the data set that a line names, as in "dataset=food101"; nothing if it names none."""
    found = _DATASET.search(text)
    return "" if found is None or metric_of(found[1]) else found[1]


def _counted(text: str) -> LoggedValue | None:
    """Returns the "120/500" of a progress bar or of a batch within an epoch."""
    for found in _BATCH_OF.finditer(text):
        group = 1 if found[1] else 3
        # A bar that is full is an epoch's summary.
        if found[group] != found[group + 1]:
            return LoggedValue(_BATCHES, float(found[group]), found.start(group), found.end(group))
    return None


_BATCHES = Metric(Quantity.BATCH, "batch", "batch")


def _metric(between: str) -> tuple[Metric, bool] | None:
    """Returns what a number is called, and whether more than a space stands between."""
    bare = between.rstrip(_TAIL)
    linked = _LINKS.sub("", bare)
    strong = linked != bare or not between[len(bare) :].isspace()
    if not linked or linked[-1] in ",;/":
        return None
    parts = [part for part in _SPLIT.split(linked) if part and not part.isspace()]
    while parts and parts[-1].strip().lower() in _WRAPPERS:
        parts.pop()
    if not parts:
        return None
    words = parts[-1].split()
    if len(parts) > 1 and len(words) == 1 and words[0].lower() in _PHASES:
        words = [*words, *parts[-2].split()]
    metric = metric_of(suffix_of(words))
    return None if metric is None else (metric, strong)


def _value(text: str, match: re.Match[str], metric: Metric, *, strong: bool) -> LoggedValue | None:
    number = number_of(match[0])
    if not math.isfinite(number):
        after = text[match.end() : match.end() + 48]
        if _NO_VALUE.match(after) or not (strong or _AFTER_BARE.match(after)):
            return None
        if _CONDITION.search(text, max(0, match.start() - 60), match.start()):
            return None
        # A search for the best begins at infinity.
        if math.isinf(number) and _BEST.search(text):
            return None
    if metric.role is Quantity.ACCURACY and text[match.end() : match.end() + 2].lstrip()[:1] == "%":
        number /= 100
    return LoggedValue(metric, number, match.start(), match.end())


def number_of(text: str) -> float:
    """Returns the number a log wrote: ``1,250``, ``nan.0`` and ``1.5E-05`` are numbers."""
    low = text.lower()
    return float((low.removesuffix(".0") if "n" in low else low).replace(",", ""))


def _label(between: str, metric: Metric) -> str:
    """Returns what stands before the first name of a line: "food101: Loss: inf" has food101."""
    head = between[: between.rfind(metric.name.split()[0])] if metric.name else ""
    found = _LABEL.search(head)
    if not found or found[1].lower() in _LOG_LEVELS or metric_of(found[1]) is not None:
        return ""
    return found[1]


_DEEPEST = 4
_MOST_FIELDS = 2000


def loads(text: str) -> Any:
    """Returns what a JSON text holds; None if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


# Stand in a text for zero bytes, and for a byte that is not UTF-8: no text has them by itself.
ZEROS, NOT_UTF8 = "\ufdd0", "\ufdd1"
_LONE = re.compile("[\ud800-\udfff]")
HAS_ZEROS = "zero bytes stand where text was"
NOT_JSON = "the line is not whole JSON"
HALF_CHARACTER = "a key holds half of a character (a lone surrogate)"
NOT_IN_UTF8 = "a name holds bytes that are not UTF-8"


def _mark_bytes(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return NOT_UTF8 * (error.end - error.start), error.end


# How a log is decoded: damage stays visible, and the lines around it can be read.
DECODING = "nanguard-mark"
codecs.register_error(DECODING, _mark_bytes)


def marked(text: str) -> str:
    """Returns a decoded text with one mark for each row of zero bytes."""
    return _ZERO_BYTES.sub(ZEROS, text) if "\0" in text else text


def unmarked(text: str) -> str:
    """Returns a text without the marks of damage."""
    return text.replace(ZEROS, "").replace(NOT_UTF8, "\ufffd")


_ZERO_BYTES = re.compile("\0+")


def damage_of(text: str, *, records: bool, only_records: bool) -> str:
    """Returns what is wrong with a line of a text log; nothing if it can be read.

    Args:
        text: The line, with marks.
        records: Whether lines of this log are JSON.
        only_records: Whether all of them are.
    """
    if ZEROS in text:
        return HAS_ZEROS
    inner = text.strip()
    looks = inner.startswith("{") or inner.endswith("}")
    if records and inner and (only_records or (looks and not inner.startswith("{'"))):
        record = loads(inner)
        if record is None:
            return NOT_JSON
        names = [name for name, _ in _numbers(record, "", 0)] if isinstance(record, dict) else []
        if any(_LONE.search(name) for name in names):
            return HALF_CHARACTER
        return NOT_IN_UTF8 if any(NOT_UTF8 in name for name in names) else ""
    if NOT_UTF8 in text and _is_hidden(text):
        return NOT_IN_UTF8
    return ""


def _is_hidden(text: str) -> bool:
    """Returns whether bytes that are not UTF-8 make a number one without a name."""
    whole, damaged = read_line(text.replace(NOT_UTF8, "")), read_line(unmarked(text))
    return len(whole.values) > len(damaged.values) or (
        whole.values != [] and (whole.step is None) != (damaged.step is None)
    )


def line_of(record: dict[str, Any]) -> LogLine:
    """Returns what a record says."""
    line = LogLine()
    batch: LoggedValue | None = None
    for count, (name, number) in enumerate(_numbers(record, "", 0)):
        if count > _MOST_FIELDS:
            break
        # What cannot be written as UTF-8 is no name.
        metric = None if _LONE.search(name) else metric_of(name)
        if metric is None:
            continue
        value = LoggedValue(metric, number, 0, 0)
        if metric.role in METRIC_ROLES:
            line.values.append(value)
        elif not math.isfinite(number):
            continue
        elif metric.role is Quantity.STEP:
            line.step = _better(line.step, value)
        elif metric.role is Quantity.EPOCH:
            line.epoch = line.epoch or value
        elif metric.role is Quantity.RANK:
            line.rank = int(number)
        else:
            batch = batch or value
    line.step = line.step or batch
    return line


def _better(known: LoggedValue | None, new: LoggedValue) -> LoggedValue:
    """Returns the one of two steps that counts the run's steps by its name."""
    if known is None or (
        new.metric.key in ("step", "global_step") and "step" not in known.metric.key
    ):
        return new
    return known


def _numbers(value: Any, name: str, depth: int) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict) and depth < _DEEPEST:
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}/{key}" if name else str(key), depth + 1)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            yield name, float(value)
        except OverflowError:
            return
    elif isinstance(value, str) and len(value) < 40 and VALUE.fullmatch(value.strip()):
        yield name, number_of(value.strip())


LONGEST_SHAPED = 2000
_NUMBER = re.compile(
    r"(?<![A-Za-z_0-9.])(?:(?<![0-9A-Za-z)\]])[-+])?[0-9][0-9.]*(?:[eE][-+]?[0-9]+)?"
)
_BAR = re.compile(r"([▏▎▍▌▋▊▉█#━╸╺ ]{4,}|(?<=\[)[=>.]{4,}(?=\]))")
_SPECIAL = re.compile(r"([\\.^$*+?{}\[\]|()])")
# What stands beside an open part never matches it too, so that no line takes long to refuse. The
# sign of a number stands first, that of its exponent behind the e: "1e5-1e5-1e5" has one reading.
_GOES_ON = frozenset("eE.")
_ANY_WHOLE = "[0-9.]+"
_ANY_NUMBER = "[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?"
_ANY_BAR = "[▏▎▍▌▋▊▉█#━╸╺ ]+"
_ANY_ARROW = "[=>.]+"


@dataclass(slots=True)
class Shape:
    """The shape of a line, and what its numbers are.

    Attributes:
        pattern: A regular expression for the whole line, the same for every engine.
        step: The group that holds the step, from 0; None if the shape has none.
        epoch: The group that holds the epoch.
        columns: The group that holds each metric's number.
        fixed: Metrics that are part of the shape: NaN and Inf are words.
        percent: The metrics that are written in percent.
        compiled: The pattern for lines one by one.
    """

    pattern: str
    step: int | None
    epoch: int | None
    columns: dict[Which, int]
    fixed: dict[Which, float]
    percent: frozenset[Which]
    compiled: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        self.compiled = re.compile(self.pattern)


def shape_of(text: str, line: LogLine) -> Shape | None:
    """Returns the shape of a line that was read; None if it has none."""
    if not line.values or len(text) > LONGEST_SHAPED:
        return None
    wanted = {v.start: v for v in (*line.values, line.step, line.epoch) if v is not None}
    order: list[LoggedValue] = []
    out: list[str] = []
    at = 0
    for start, end in _spans(text, wanted):
        # "7e-7e-7" can be read as numbers in many ways.
        if text[end : end + 1] in _GOES_ON:
            return None
        out.append(_fixed(text[at:start]))
        value = wanted.get(start)
        if value is None:
            plain = text[start:end].strip("0123456789.") == ""
            out.append(_ANY_WHOLE if plain else _ANY_NUMBER)
        else:
            if value.end != end:
                return None
            order.append(value)
            out.append(f"({_ANY_NUMBER})")
        at = end
    out.append(_fixed(text[at:]))
    opened = [v for v in wanted.values() if math.isfinite(v.number)]
    if len(order) != len(opened) or len({v.start for v in opened}) != len(opened):
        return None
    if any(math.isfinite(v.number) and v not in order for v in line.values):
        return None  # two of them are read from one place
    return _shape("^" + "".join(out) + "$", order, line, text)


def _shape(pattern: str, order: list[LoggedValue], line: LogLine, text: str) -> Shape:
    columns: dict[Which, int] = {}
    fixed: dict[Which, float] = {}
    percent: set[Which] = set()
    for value in line.values:
        which = Which(value.metric, line.label, line.rank)
        if not math.isfinite(value.number):
            fixed.setdefault(which, value.number)
            continue
        columns.setdefault(which, order.index(value))
        written = float(text[value.start : value.end])
        if written and not math.isclose(value.number, written):
            percent.add(which)
    return Shape(
        pattern,
        order.index(line.step) if line.step in order else None,
        order.index(line.epoch) if line.epoch in order else None,
        columns,
        fixed,
        frozenset(percent),
    )


def _spans(text: str, wanted: dict[int, LoggedValue]) -> list[tuple[int, int]]:
    return [
        match.span()
        for match in _NUMBER.finditer(text)
        if match.start() not in wanted or math.isfinite(wanted[match.start()].number)
    ]


def _fixed(text: str) -> str:
    """Returns a pattern for what stands between numbers; widths and progress bars are open."""
    out: list[str] = []
    for number, part in enumerate(_BAR.split(text)):
        if number % 2:
            out.append(_ANY_BAR if part.strip("=>.") else _ANY_ARROW)
        else:
            out.append(_words(part))
    return "".join(out)


def _words(text: str) -> str:
    escaped = _SPECIAL.sub(r"\\\1", text)
    spaced = re.sub(r" {2,}", " +", escaped)
    if text.startswith(" ") and not spaced.startswith(" +"):
        spaced = " +" + spaced[1:]
    if text.endswith(" ") and len(text) > 1 and not spaced.endswith(" +"):
        spaced = spaced[:-1] + " +"
    return spaced


_LONGEST_ROW = 1000
_RULED = re.compile(r"[|│┃]")
_SPACED = re.compile(r"\s{2,}|\t")
_NUMBERISH = re.compile(r"(?i)^(?:[-+]?[\d.,:/%eE+-]+[%a-zA-Z]{0,3}|nan|inf|-inf|none|n/a|-|)$")
_PROGRESS = re.compile(r"(?::|(?<!\s))\s+\d+%[|━].*$")
_RULE = re.compile(r"^[\s|+│┃─━┼╇╈═╪:=-]*$")


@dataclass(slots=True)
class TextTable:
    """The columns of a table whose head was seen."""

    columns: list[Metric | None]
    ruled: bool

    def row(self, text: str) -> LogLine | None:
        """Returns what a row says; None if the line is no row of this table."""
        if len(text) > _LONGEST_ROW:
            return None
        cells = _cells(_PROGRESS.sub("", text), ruled=self.ruled)
        if len(cells) != len(self.columns) or not all(_NUMBERISH.match(c.strip()) for c in cells):
            return None
        line = LogLine()
        for metric, cell in zip(self.columns, cells, strict=False):
            found = VALUE.match(cell.strip()) if metric else None
            if metric is None or found is None:
                continue
            value = LoggedValue(metric, number_of(found[0]), 0, 0)
            if metric.role in METRIC_ROLES:
                line.values.append(value)
            elif metric.role is Quantity.EPOCH:
                line.epoch = value
            elif metric.role in (Quantity.STEP, Quantity.BATCH) and line.step is None:
                line.step = value
        return line

    def goes_on(self, text: str) -> bool:
        """Returns whether a line that is no row may stand inside the table."""
        return len(text) <= _LONGEST_ROW and (bool(_RULE.match(text)) or "%|" in text)


def table_of(text: str) -> TextTable | None:
    """Returns the table a line is the head of; None if it is no head."""
    if len(text) > _LONGEST_ROW or VALUE.search(text):
        return None
    ruled = bool(_RULED.search(text))
    cells = _cells(text, ruled=ruled)
    if len(cells) < 2 or any(len(cell) > 40 for cell in cells):
        return None
    columns = [metric_of(cell) if cell else None for cell in cells]
    roles = [metric.role for metric in columns if metric]
    wanted = [role for role in roles if role in METRIC_ROLES]
    placed = Quantity.STEP in roles or Quantity.EPOCH in roles or len(wanted) > 1
    return TextTable(columns, ruled) if wanted and placed else None


def _cells(text: str, *, ruled: bool) -> list[str]:
    if ruled:
        return [cell.strip() for cell in _RULED.split(text.strip().strip("|│┃"))]
    text = text.strip()
    cells = _SPACED.split(text)
    return cells if len(cells) > 1 else text.split()
