"""Reads one line of text: which numbers stand in it, and what they are called.

There is no one grammar of log lines. What they share: a number stands after its name, and
something that is neither stands between two pairs.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

from nanguard.check.log.names import METRICS, Metric, Role, metric_of, suffix_of, word_set

# Characters of a line that are read; the rest of an endless one is not.
LONGEST = 65_536
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
_LEVELS = word_set(
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
_BATCH = re.compile(r"[|\[(]\s*(\d{1,12})/\s*(\d+)|^\s*(\d{1,12})/(\d+)\s*[\[━]")
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
class Value:
    """A number of a line, and what it is called."""

    metric: Metric
    number: float
    start: int
    end: int


@dataclass(slots=True)
class Line:
    """What one line says.

    Attributes:
        values: Its metrics.
        step: The step it names.
        epoch: The epoch it names.
        rank: The rank it names.
        label: What the numbers were measured on.
    """

    values: list[Value] = field(default_factory=list)
    step: Value | None = None
    epoch: Value | None = None
    rank: int | None = None
    label: str = ""


def read_line(text: str) -> Line:
    """Returns what a line says."""
    line = Line()
    end = 0
    batch: Value | None = None
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
        if metric.role in METRICS:
            if not line.values:
                line.label = _label(between, metric)
            line.values.append(value)
        elif metric.role is Role.BATCH:
            batch = batch or value
        else:
            _place(line, value)
    _finish(line, text, batch)
    return line


def _place(line: Line, value: Value) -> None:
    if not math.isfinite(value.number):
        return
    if value.metric.role is Role.STEP and line.step is None and value.number == int(value.number):
        line.step = value
    elif value.metric.role is Role.EPOCH and line.epoch is None:
        line.epoch = value
    elif value.metric.role is Role.RANK and 0 <= value.number < 1e6:
        line.rank = int(value.number)


def _finish(line: Line, text: str, batch: Value | None) -> None:
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


def _counted(text: str) -> Value | None:
    """Returns the "120/500" of a progress bar or of a batch within an epoch."""
    for found in _BATCH.finditer(text):
        group = 1 if found[1] else 3
        # A bar that is full is an epoch's summary.
        if found[group] != found[group + 1]:
            return Value(_BATCHES, float(found[group]), found.start(group), found.end(group))
    return None


_BATCHES = Metric(Role.BATCH, "batch", "batch")


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


def _value(text: str, match: re.Match[str], metric: Metric, *, strong: bool) -> Value | None:
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
    if metric.role is Role.ACCURACY and text[match.end() : match.end() + 2].lstrip()[:1] == "%":
        number /= 100
    return Value(metric, number, match.start(), match.end())


def number_of(text: str) -> float:
    """Returns the number a log wrote: ``1,250``, ``nan.0`` and ``1.5E-05`` are numbers."""
    low = text.lower()
    return float((low.removesuffix(".0") if "n" in low else low).replace(",", ""))


def _label(between: str, metric: Metric) -> str:
    """Returns what stands before the first name of a line: "food101: Loss: inf" has food101."""
    head = between[: between.rfind(metric.name.split()[0])] if metric.name else ""
    found = _LABEL.search(head)
    if not found or found[1].lower() in _LEVELS or metric_of(found[1]) is not None:
        return ""
    return found[1]
