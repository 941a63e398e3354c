"""What a model is given: numbers that are not finite, constant or huge, and unknown tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nanguard.check.data.columns import RowPlaces, is_aside
from nanguard.check.data.data_rule import (
    DataRule,
    are_measured,
    features_of,
    shown,
    usual_elsewhere,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from nanguard.check.data.columns import ColumnNumbers
    from nanguard.check.data.dataset import DataFile, DataSet
    from nanguard.findings import Finding

_MAX_NAMED = 5


def _poisoned(folder: Path) -> None:
    import numpy as np

    rows = np.ones((8, 2), dtype="float32")
    rows[3, 1] = np.inf
    np.savez(folder / "train.npz", X=rows, y=np.arange(8) % 2)


class NonFiniteFeature(DataRule):
    """A feature that is NaN, Inf or -Inf.

    Every number is looked at, in text as in arrays. Empty cells are no numbers and not reported;
    masks, where -Inf is meant, are left out.

    Why it breaks a run: one such number makes the loss of its batch NaN, and the gradient of that
    loss every weight. It comes once in an epoch, so the run dies late and the batch is gone.

    Repair the records that are named, or leave them out when loading: ``isfinite(x).all()``.
    """

    code = "DAT005"
    name = "non-finite-feature"
    severity = Severity.ERROR
    seen_in = "https://github.com/prs-eth/Marigold/issues/111"
    examples = (
        Passes("name,b,label\nnan,0.2,1\ninfo,0.1,0\n", "example.csv"),
        Fails("a,b,label\n0.1,0.2,1\n0.3,inf,0\n", line=3, file="example.csv"),
        Fails('{"x": [0.5, 1.5], "label": 1}\n{"x": [NaN, 0.5], "label": 0}\n', line=2),
        Fails("an array X with one Inf", made=_poisoned),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each column, of the first few."""
        for file in source.files:
            bad = [column for column in file.ledger.columns.values() if column.bad.count]
            for column in bad[:_MAX_NAMED]:
                kinds = sorted({place.value for place in column.bad.first})
                more = len(bad) - _MAX_NAMED
                rest = f"; {more} more columns" if more > 0 and column is bad[0] else ""
                yield self.finding(
                    f"{column.name} is {', '.join(kinds)}: {column.bad.count} of {column.count} "
                    f"values, {column.bad.in_words()}{rest}",
                    path=file.path,
                    line=column.bad.line,
                    where=column.name,
                    fixes=(Fix("leave these records out, or repair them"),),
                )
            yield from self._targets(source, file)

    def _targets(self, source: DataSet, file: DataFile) -> Iterator[Finding]:
        """Yields a finding about measurements to be learned that are infinite."""
        labels = file.ledger.labels
        if labels is not None and labels.infinite.count and are_measured(source, labels):
            yield self.finding(
                f"{labels.key} is infinite: {labels.infinite.count} of {labels.total} values, "
                f"{labels.infinite.in_words()}",
                path=file.path,
                line=labels.infinite.line,
                where=labels.key,
            )


_MIN_ROWS = 10
_SPARSE = 0.1
_WIDE = 32


def _with_column(dead: str) -> str:
    lines = [f"{at * 0.37 - 1:.3f},{at * at * 0.11:.3f},{dead},{at % 2}" for at in range(12)]
    return "a,b,c,label\n" + "\n".join(lines) + "\n"


class ConstantFeature(DataRule):
    """A feature that never changes, such as a dead sensor.

    Columns that describe records (a fold, a width, a year) are no features. Images and sparse
    counts, where some pixels or words never occur, are not concerned.

    Why it breaks a run: its standard deviation is 0, and dividing by it (``(x - mean) / std``,
    batch normalisation without eps, correlation) gives NaN for every record at once.

    Leave the column out, or add an eps to the deviation it is divided by.
    """

    code = "DAT006"
    name = "constant-feature"
    severity = Severity.INFO
    seen_in = "https://github.com/fastai/fastai/issues/889"
    examples = (
        Passes(_with_column("0.5").replace("0.5,1\n", "0.7,1\n", 1), "example.csv"),
        Passes(_with_column("2024").replace("a,b,c,", "a,b,year,"), "example.csv"),
        Fails(_with_column("0.25"), file="example.csv"),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each column, of the first few."""
        for file in source.files:
            columns = features_of(file)
            varying = [column for column in columns if not column.constant and column.count]
            found = [c for c in columns if self._dead(c, varying, file)]
            if _mostly_zero(varying) and len(columns) >= _WIDE:
                found = [column for column in found if column.low != 0]
            if len(found) * 2 > len(columns):  # then columns are something else than features
                continue
            for column in found[:_MAX_NAMED]:
                more = len(found) - _MAX_NAMED
                rest = f"; so are {more} more columns" if more > 0 and column is found[0] else ""
                yield self.finding(
                    f"{column.name} is {shown(column.low)} in all {column.count} records{rest}",
                    path=file.path,
                    line=None,
                    where=column.name,
                    fixes=(Fix("leave the column out"),),
                )

    def _dead(self, column: ColumnNumbers, varying: list[ColumnNumbers], file: DataFile) -> bool:
        base = column.name.partition("[")[0]
        listed = "[" in column.name
        if not column.constant or column.count < _MIN_ROWS or is_aside(base):
            return False
        if listed and base in file.ledger.columns:  # other records were read one by one
            return False
        if column.whole and not any(_stem(c.name) == _stem(column.name) for c in varying):
            return False
        if listed and all(c.whole or _pixels(c) for c in varying):
            return False
        return sum(not c.whole for c in varying) >= (1 if listed else 2)


def _stem(name: str) -> str:
    """Returns what columns of one kind have in common: ``s`` of ``s3``, ``arm`` of ``arm_x``."""
    return re.sub(r"\d+", "", name.split("_")[0]) if len(name) > 1 else ""


def _pixels(column: ColumnNumbers) -> bool:
    """Returns whether a column may be one pixel of images."""
    return column.low >= 0 and column.high in (255.0, 16.0)


def _mostly_zero(columns: list[ColumnNumbers]) -> bool:
    """Returns whether zero is what the features of most records are."""
    shares = sorted(c.zeros / c.sampled for c in columns if c.sampled)
    return bool(shares) and shares[len(shares) // 2] >= _SPARSE


_APART = 1e6  # times what is usual
_LARGE_FRACTION = 1e6
_DEVIATIONS_APART = 8.0  # deviations, as logarithms, at which a tenth of both is enough
_LARGE_WHOLE = 1e12  # counts and sums of money have long tails
_HUGE_COLUMN = 1e8  # a whole column of this size, beside others of ordinary size
_SQUARES_OVERFLOW = 1e18  # in single precision
_TINY = 1e-30
# Moments in seconds, milliseconds and nanoseconds since 1970, and dates such as 20240131.
_MOMENTS = ((5e8, 5e9), (5e11, 5e12), (5e14, 5e15), (5e17, 5e18), (19e6, 21.1e6))


def _with_value(odd: str) -> str:
    lines = [f"{at * 0.37 - 1:.3f},{at * at * 0.11:.3f},{at % 2}" for at in range(12)]
    return "a,b,label\n" + "\n".join([*lines, f"0.5,{odd},1"]) + "\n"


class ExtremeFeatureScale(DataRule):
    """A feature with numbers a million times as large as is usual for it, or for its neighbours.

    Judged by the largest number of a column against the geometric mean of the others. Times, dates,
    ids and long-tailed counts are not concerned.

    Why it breaks a run: squares of such numbers overflow in single precision, all of them in half
    precision; a mean over the column is that one number; a layer without normalisation answers with
    an activation and a gradient of the same size.

    Repair the record that is named, scale the column, or take its logarithm.
    """

    code = "DAT007"
    name = "extreme-feature-scale"
    severity = Severity.WARNING
    seen_in = "https://github.com/zhouhaoyi/Informer2020/issues/251"
    examples = (
        Passes(_with_value("1500.0"), "example.csv"),
        Passes(_with_value("1.7e9").replace("a,b,", "a,timestamp,"), "example.csv"),
        Fails(_with_value("3.1e30"), file="example.csv"),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each column, of the first few."""
        for file in source.files:
            columns = features_of(file)
            every = list(file.ledger.columns.values())
            found = [(c, why) for c in every if (why := self._why(c, columns)) is not None]
            for column, why in found[:_MAX_NAMED]:
                place = RowPlaces(1, [column.largest] if column.largest is not None else [])
                at = f", {place.in_words()}" if column.largest is not None else ""
                yield self.at(file, place, f"{column.name}: {why}{at}", where=column.name)

    def _why(self, column: ColumnNumbers, columns: list[ColumnNumbers]) -> str | None:
        largest, usual = column.magnitude, column.usual
        if column.count < _MIN_ROWS or not usual:
            return None
        aside = is_aside(column.name.partition("[")[0])
        if aside and (column.whole or largest < _SQUARES_OVERFLOW):
            return None
        if _stands_out(column):
            return f"the largest value is {shown(largest)}, others are about {shown(usual)}"
        if column.whole or _is_moment(column):
            return None
        if largest >= _SQUARES_OVERFLOW:
            return f"values are as large as {shown(largest)}; their squares overflow"
        others = usual_elsewhere(column, columns)
        if others is None or not column.alone:
            return None
        if usual >= _HUGE_COLUMN and usual >= _APART * others:
            return f"values are about {shown(usual)}, those of other columns {shown(others)}"
        if largest < _TINY and others > _TINY / 1e-12:
            return f"no value is larger than {shown(largest)}; squares are 0 in single precision"
        return None


def _stands_out(column: ColumnNumbers) -> bool:
    """Returns whether the largest number is beyond what others of its column let expect."""
    largest, usual = column.magnitude, column.usual
    if column.whole:
        return largest >= _LARGE_WHOLE and largest >= _APART * usual
    if column.apart >= _DEVIATIONS_APART:
        return largest >= _LARGE_FRACTION / 10 and largest >= _APART / 10 * usual
    return largest >= _LARGE_FRACTION and largest >= _APART * usual and not _is_moment(column)


def _is_moment(column: ColumnNumbers) -> bool:
    return any(low <= column.low and column.high <= high for low, high in _MOMENTS)


_CONFIG = (
    "model: {vocab_size: 100}\ndata: {train_file: example.jsonl}\n"
    "training: {lr: 1.0e-4, max_steps: 100, batch_size: 8}\n"
)


class TokenIdOutOfVocabulary(DataRule):
    """A token id below zero, or not below the size of the vocabulary.

    The size comes from ``--vocab``, from a configuration that points to the data, or from a
    tokenizer beside it. Ids that are to be predicted may be -100, or another declared value.

    Why it breaks a run: the embedding has no such row. On CUDA that is a device-side assert, long
    after the kernel that caused it; elsewhere it is an error in the middle of an epoch, or the row
    of another token.

    Tokenise again with the model's own tokenizer, or make the embedding as large as the tokenizer.
    """

    code = "DAT008"
    name = "token-id-out-of-vocabulary"
    severity = Severity.ERROR
    seen_in = "https://github.com/boathit/t2vec/issues/17"
    examples = (
        Passes('{"input_ids": [5, 900]}\n{"input_ids": [7]}\n'),
        Passes('{"input_ids": [5, 99], "labels": [-100, 99]}\n', beside={"config.yaml": _CONFIG}),
        Fails(
            '{"input_ids": [5, 99]}\n{"input_ids": [5, 100]}\n',
            line=2,
            beside={"config.yaml": _CONFIG},
        ),
        Fails('{"input_ids": [5, 99]}\n{"input_ids": [5, -1]}\n', line=2),
    )

    def check(self, source: DataSet) -> Iterator[Finding]:
        """Yields one finding for each column of token ids."""
        size = source.request.expected.vocabulary
        limit = f"there are {size} tokens, 0 to {size - 1}" if size else "no token is negative"
        for file in source.files:
            for tokens in file.ledger.tokens.values():
                outside = tokens.outside
                if not outside.count or (tokens.targets and size is None and not tokens.low):
                    continue
                values = list(dict.fromkeys(place.value for place in outside.first))
                yield self.finding(
                    f"{tokens.name} holds {', '.join(values)}, but {limit}: {outside.count} of "
                    f"{tokens.count} ids, {outside.in_words()}",
                    path=file.path,
                    line=outside.line,
                    where=tokens.name,
                    fixes=(Fix("tokenise again with the model's own tokenizer"),),
                )
