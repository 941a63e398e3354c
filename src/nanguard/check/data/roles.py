"""What the columns of a data set are for: labels, token ids, features, or none of these."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.check.scanning import Expected

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
class Roles:
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


def roles_of(columns: Sequence[Column], expected: Expected) -> Roles:
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
    return Roles(label, group, tokens, targets, features, names)


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
