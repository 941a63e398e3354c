"""DAT008: a token id that no row of the embedding stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.data.data_rule import DataRule
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.data.dataset import DataSet
    from nanguard.findings import Finding

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
