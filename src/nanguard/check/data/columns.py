"""What the columns of a data set are for, and what is counted in them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nanguard.check.scan import Expected

MAX_PLACES = 5


@dataclass(frozen=True, slots=True)
class RowPlace:
    """One record of a file.

    Attributes:
        record: The record, counted from 0.
        line: Its line, counted from 1; None where the file has no lines.
        value: What stands there, in short.
    """

    record: int
    line: int | None
    value: str = ""

    def shifted(self, records: int, lines: int) -> RowPlace:
        """Returns the place in a file that has records and lines before this part of it."""
        line = None if self.line is None else self.line + lines
        return RowPlace(self.record + records, line, self.value)


@dataclass(slots=True)
class RowPlaces:
    """How often something was seen, and where first.

    Attributes:
        count: How often.
        first: The first few places, in order.
        unit: What a record is called where it has no line.
    """

    count: int = 0
    first: list[RowPlace] = field(default_factory=list)
    unit: str = "record"

    def add(self, place: RowPlace, count: int = 1) -> None:
        """Notes a place that stands for a number of them."""
        self.count += count
        if len(self.first) < MAX_PLACES:
            self.first.append(place)

    def merge(self, other: RowPlaces, records: int, lines: int) -> None:
        """Takes over what was seen in the part of the file that follows."""
        self.count += other.count
        room = MAX_PLACES - len(self.first)
        if room > 0:
            self.first += [place.shifted(records, lines) for place in other.first[:room]]

    @property
    def line(self) -> int | None:
        """The first line; None where there is none."""
        return self.first[0].line if self.first else None

    def in_words(self) -> str:
        """Returns where, in words: ``at lines 3, 9 and 2 more``."""
        lines = [place.line for place in self.first]
        if any(line is None for line in lines):
            shown = list(dict.fromkeys(place.record for place in self.first))
            word = self.unit
        else:
            shown = list(dict.fromkeys(line for line in lines if line is not None))
            word = "line"
        named = ", ".join(str(at) for at in shown)
        more = self.count - len(self.first)
        plural = "s" if len(shown) > 1 or more else ""
        return f"{word}{plural} {named}" + (f" and {more} more" if more > 0 else "")


def merged(groups: list[RowPlaces]) -> RowPlaces:
    """Returns what several groups saw in one file, in the order of its records."""
    first = sorted((place for group in groups for place in group.first), key=lambda p: p.record)
    unit = next((group.unit for group in groups), "record")
    return RowPlaces(sum(group.count for group in groups), first[:MAX_PLACES], unit)


Shape = Literal["int", "float", "text", "bool", "ints", "floats", "texts", "other", "empty"]

_LABELS_WORDS = (
    "label labels label_id label_ids label_idx label_index class class_id class_idx "
    "class_index class_label cls target targets y gt_label category_id target_id fine_label "
    "coarse_label ner_tags pos_tags tag_ids ner_labels intent_id target_label true_label "
    "y_true gold_label label_int labelid classid"
)
LABELS = tuple(_LABELS_WORDS.split())
_GROUPS_WORDS = "dataset_name dataset data_set source_dataset data_source ds_name dataset_id"
GROUPS = tuple(_GROUPS_WORDS.split())
_TOKENS_WORDS = (
    "input_ids token_ids tokens ids decoder_input_ids prompt_ids prompt_input_ids "
    "response_ids chosen_input_ids rejected_input_ids input_tokens tok_ids tokenized "
    "target_ids idx input_id token_id encoded"
)
TOKENS = tuple(_TOKENS_WORDS.split())
_SPLITS_WORDS = "train training val valid validation dev test eval all full data arr"
_SPLITS = frozenset(_SPLITS_WORDS.split())
# Numbers that describe a record and are not given to a model as they are.
_ASIDE = re.compile(
    r"(?:^|_)(?:id|ids|idx|index|uid|uuid|key|fold|split|version|year|month|day|hour|minute|second|"
    r"time|timestamp|ts|date|datetime|epoch|step|seed|weight|weights|sample_weight|width|height|"
    r"channels|fps|sr|sample_rate|sampling_rate|rank|batch|group|source|camera|frame|row|line|"
    r"page|turn|offset|start|end|len|length|num|count|n|mask|bias|padding|type|token_type|"
    r"position|positions|score|prob|confidence|reward|lat|lon|price_currency|subject|user|item|"
    r"size|level|difficulty|rating|quality|bbox|box|area|iscrowd|code|zip|zipcode|phone)"
    r"(?:_|$|\d+$)|^(?:is|has|num|n)_|unnamed|(?:^|_)(?:Id|ID)$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a data set.

    Attributes:
        name: Its name.
        shape: What its values are.
        depth: How many lists its values lie in.
    """

    name: str
    shape: Shape
    depth: int = 0


@dataclass(frozen=True, slots=True)
class ColumnRoles:
    """What the columns of a file are for.

    Attributes:
        label: The labels; None if there are none.
        group: The column that names the data set of a record; None if it is not needed.
        tokens: Token ids.
        targets: The tokens that are to be predicted; None if there are none.
        features: Numbers that a model is given.
        names: Every column, in order.
    """

    label: Column | None = None
    group: str | None = None
    tokens: tuple[Column, ...] = ()
    targets: Column | None = None
    features: tuple[Column, ...] = ()
    names: tuple[str, ...] = ()

    @property
    def read(self) -> tuple[str, ...]:
        """The columns that have to be read."""
        columns = [*self.tokens, *self.features]
        columns += [column for column in (self.label, self.targets) if column is not None]
        names = [column.name for column in columns] + ([self.group] if self.group else [])
        return tuple(dict.fromkeys(names))


def plain_name(name: str) -> str:
    """Returns a name in lower case without the part of the data it is of: ``y_train`` is ``y``."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    words = [word for word in re.split(r"[^A-Za-z0-9]+", spaced.lower()) if word]
    kept = [word for word in words if word not in _SPLITS] or words
    return "_".join(kept)


def is_aside(name: str) -> bool:
    """Returns whether a column describes a record rather than being given to a model."""
    return _ASIDE.search(name) is not None


def roles_of(columns: Sequence[Column], expected: Expected) -> ColumnRoles:
    """Returns what columns are for, by their names and by what they hold."""
    tokens = tuple(c for c in columns if plain_name(c.name) in TOKENS and c.shape == "ints")
    label = _label(columns, expected)
    if expected.vocabulary is not None and not tokens:
        listed = [c for c in columns if c.shape == "ints" and c is not label]
        listed = [c for c in listed if not is_aside(c.name)]
        tokens = tuple(listed) if len(listed) == 1 else ()
    targets = None
    if label is not None and tokens and label.shape == "ints" and expected.label_key is None:
        label, targets = None, label
    taken = {column.name for column in tokens} | {c.name for c in (label, targets) if c}
    features = tuple(c for c in columns if c.name not in taken and _is_feature(c))
    group = _group(columns, expected)
    names = tuple(column.name for column in columns)
    return ColumnRoles(label, group, tokens, targets, features, names)


def _label(columns: Sequence[Column], expected: Expected) -> Column | None:
    if expected.label_key is not None:
        return next((c for c in columns if c.name == expected.label_key), None)
    by_name = {plain_name(column.name): column for column in reversed(columns)}
    for name in LABELS:
        column = by_name.get(name)
        if (
            column is not None
            and column.shape != "other"
            and (column.depth < 2 or column.shape == "ints")
        ):
            return column
    masks = [by_name[name] for name in ("mask", "masks", "segmentation") if name in by_name]
    return next((mask for mask in masks if mask.shape == "ints" and mask.depth > 1), None)


def _group(columns: Sequence[Column], expected: Expected) -> str | None:
    if not expected.groups:
        return None
    if expected.group_key is not None:
        return expected.group_key
    texts = {column.name for column in columns if column.shape in ("text", "empty")}
    return next((name for name in GROUPS if name in texts), None)


def _is_feature(column: Column) -> bool:
    if column.shape in ("float", "floats"):
        return plain_name(column.name) not in ("mask", "attention_mask", "bias", "attention_bias")
    return column.shape == "int" and not is_aside(column.name)


SAMPLED = 4096  # rows of a block that say how large numbers usually are


@dataclass(slots=True)
class ColumnNumbers:
    """What the numbers of one column are.

    Attributes:
        name: The column.
        count: How many there are.
        bad: Those that are not finite.
        low: The smallest that is finite.
        high: The largest that is finite.
        largest: Where the one with the largest magnitude stands.
        zeros: How many of the sampled ones are zero.
        sampled: How many were looked at for their size.
        logs: The sum of the binary logarithms of those of them that are not zero.
        squares: The sum of the squares of these logarithms.
        whole: Whether the column holds whole numbers by its type.
        alone: Whether each record has one number here, not a list of them.
    """

    name: str
    count: int = 0
    bad: RowPlaces = field(default_factory=RowPlaces)
    low: float = math.inf
    high: float = -math.inf
    largest: RowPlace | None = None
    zeros: int = 0
    sampled: int = 0
    logs: float = 0.0
    squares: float = 0.0
    whole: bool = False
    alone: bool = True

    @property
    def magnitude(self) -> float:
        """The largest magnitude of a finite number; 0 if there is none."""
        return max(abs(self.low), abs(self.high)) if self.low <= self.high else 0.0

    @property
    def usual(self) -> float:
        """The geometric mean of the magnitudes that are not zero; 0 if all are."""
        others = self.sampled - self.zeros
        return 2.0 ** (self.logs / others) if others else 0.0

    @property
    def apart(self) -> float:
        """How many deviations the largest magnitude is from the others, as logarithms."""
        others = self.sampled - self.zeros
        if others < 3 or not self.magnitude:
            return 0.0
        top = math.log2(self.magnitude)
        logs, squares = self.logs, self.squares
        if self.sampled >= self.count:  # then the largest is among them, and is left out
            logs, squares, others = logs - top, squares - top * top, others - 1
        mean = logs / others
        return (top - mean) / math.sqrt(max(squares / others - mean * mean, 0.25))

    @property
    def constant(self) -> bool:
        """Whether all numbers are the same."""
        return self.count > 1 and not self.bad.count and self.low == self.high

    def add(self, values: Any, place: Callable[[int, str], RowPlace]) -> None:
        """Notes a block of numbers.

        Args:
            values: The numbers, a NumPy array of one dimension.
            place: Returns the place of a number by its position in the block, with its value.
        """
        import numpy as np

        if not values.size:
            return
        self.count += int(values.size)
        low, high = float(values.min()), float(values.max())
        if not (math.isfinite(low) and math.isfinite(high)):
            values = self._sorted_out(values, place)
            if not values.size:
                return
            low, high = float(np.nanmin(values)), float(np.nanmax(values))
        if max(abs(low), abs(high)) > self.magnitude or self.largest is None:
            at = int(np.nanargmax(values) if abs(high) >= abs(low) else np.nanargmin(values))
            self.largest = place(at, f"{float(values[at]):.4g}")
        self.low, self.high = min(self.low, low), max(self.high, high)
        self._sample(values[:: max(1, values.size // SAMPLED)])

    def _sorted_out(self, values: Any, place: Callable[[int, str], RowPlace]) -> Any:
        """Notes the numbers that are not finite, and returns the block with NaN for each."""
        import numpy as np

        wrong = np.flatnonzero(~np.isfinite(values))
        self.bad.count += int(wrong.size)
        for at in wrong[: max(0, MAX_PLACES - len(self.bad.first))]:
            self.bad.first.append(place(int(at), str(float(values[at]))))
        if wrong.size == values.size:
            return values[:0]
        kept = values.astype("float64")
        kept[wrong] = np.nan
        return kept

    def _sample(self, values: Any) -> None:
        import numpy as np

        sizes = np.abs(values.astype("float64"))
        sizes = sizes[np.isfinite(sizes)]
        other = sizes[sizes > 0]
        self.sampled += int(sizes.size)
        self.zeros += int(sizes.size - other.size)
        logs = np.log2(other)
        self.logs += float(logs.sum())
        self.squares += float((logs * logs).sum())

    def merge(self, other: ColumnNumbers, records: int, lines: int) -> None:
        """Takes over what was seen in the part of the file that follows."""
        if other.largest is not None and (self.largest is None or other.magnitude > self.magnitude):
            self.largest = other.largest.shifted(records, lines)
        self.count += other.count
        self.bad.merge(other.bad, records, lines)
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.zeros += other.zeros
        self.sampled += other.sampled
        self.logs += other.logs
        self.squares += other.squares
        self.whole &= other.whole
        self.alone &= other.alone


Kind = Literal["int", "float", "text", "bool"]
Value = int | float | str | bool
MAX_DISTINCT = 50_000


class Label(NamedTuple):
    """One value that labels have.

    Attributes:
        group: The data set that its records name; None if they name none.
        kind: How it is written.
        value: The value.
    """

    group: str | None
    kind: Kind
    value: Value


def label_of(group: str | None, value: Value) -> Label:
    """Returns the label that a value is."""
    if isinstance(value, bool):
        return Label(group, "bool", value)
    if isinstance(value, int):
        return Label(group, "int", value)
    if isinstance(value, float):
        return Label(group, "float", value)
    return Label(group, "text", value[:200])


@dataclass(slots=True)
class LabelColumn:
    """What the labels of a file, or of a part of it, are.

    Attributes:
        key: The column, key or array they stand in.
        many: Whether a record has several of them.
        seen: Every value with its places.
        missing: Records without a label.
        infinite: Labels that are infinite.
        odd: Labels that are neither a number nor a text, such as a mapping.
        total: How many labels there are, those that are missing left out.
        overflowed: Whether there are too many values to keep apart, as measurements have.
        fractional: How many labels are no whole numbers.
    """

    key: str
    many: bool = False
    seen: dict[Label, RowPlaces] = field(default_factory=dict)
    missing: RowPlaces = field(default_factory=RowPlaces)
    infinite: RowPlaces = field(default_factory=RowPlaces)
    odd: RowPlaces = field(default_factory=RowPlaces)
    total: int = 0
    overflowed: bool = False
    fractional: int = 0

    def add(self, label: Label, count: int, places: list[RowPlace]) -> None:
        """Notes a value that was seen a number of times."""
        self.total += count
        if label.kind == "float" and not float(label.value).is_integer():
            self.fractional += count
        known = self.seen.get(label)
        if known is None:
            if len(self.seen) >= MAX_DISTINCT:
                self.overflowed = True
                return
            known = self.seen[label] = RowPlaces()
        known.count += count
        known.first += places[: max(0, MAX_PLACES - len(known.first))]

    def merge(self, other: LabelColumn, records: int, lines: int) -> None:
        """Takes over what was seen in the part of the file that follows."""
        self.many |= other.many
        self.overflowed |= other.overflowed
        self.total += other.total
        self.fractional += other.fractional
        for mine, its in (
            (self.missing, other.missing),
            (self.infinite, other.infinite),
            (self.odd, other.odd),
        ):
            mine.merge(its, records, lines)
        for label, places in other.seen.items():
            known = self.seen.get(label)
            if known is None:
                if len(self.seen) >= MAX_DISTINCT:
                    self.overflowed = True
                    continue
                known = self.seen[label] = RowPlaces()
            known.merge(places, records, lines)

    def numbers(self, group: str | None = None, *, every: bool = False) -> dict[int, int]:
        """Returns how often each whole number was seen, of one data set or of all."""
        out: dict[int, int] = {}
        for label, places in self.seen.items():
            if (every or label.group == group) and (whole := whole_number(label)) is not None:
                out[whole] = out.get(whole, 0) + places.count
        return out


def whole_number(label: Label) -> int | None:
    """Returns a label as a whole number, also where it is written as ``3.0`` or as text."""
    if label.kind in ("int", "bool"):
        return int(label.value)
    if label.kind == "float" and float(label.value).is_integer():
        return int(label.value)
    return None


@dataclass(slots=True)
class Tokens:
    """What the token ids of one column are.

    Attributes:
        name: The column.
        count: How many there are.
        low: The smallest; None if there is none.
        high: The largest; None if there is none.
        outside: Those below zero, or beyond the vocabulary where its size is known.
        targets: Whether they are what a model has to predict, where some may be ignored.
    """

    name: str
    count: int = 0
    low: int | None = None
    high: int | None = None
    outside: RowPlaces = field(default_factory=RowPlaces)
    targets: bool = False

    def widen(self, low: int, high: int, count: int) -> None:
        """Notes the range of a number of ids."""
        self.low = low if self.low is None else min(self.low, low)
        self.high = high if self.high is None else max(self.high, high)
        self.count += count

    def merge(self, other: Tokens, records: int, lines: int) -> None:
        """Takes over what was seen in the part of the file that follows."""
        if other.low is not None and other.high is not None:
            self.widen(other.low, other.high, other.count)
        self.outside.merge(other.outside, records, lines)
