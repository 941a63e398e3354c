"""The rule about weights that are far too large."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from nanguard.check.checkpoint.checkpoint import Checkpoint
from nanguard.check.checkpoint.checkpoint_rule import file_of, large_text, way_back
from nanguard.check.rule import Fails, Passes, Rule
from nanguard.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator


class ExplodedWeight(Rule[Checkpoint]):
    """A weight is finite, but larger than any training leaves it: beyond a million.

    Why it breaks a run: the run diverged before the file was written. Activations and gradients are
    of the same size, and the next steps overflow.

    Go back to a checkpoint from before, with a lower learning rate or tighter clipping. Masks
    filled with a large number, counters, bounds and attributes of objects that are no modules, such
    as the running sums of a normaliser, are not reported.
    """

    code, name, severity = "CKP005", "exploded-weight", Severity.WARNING
    reads = "checkpoint"
    seen_in = "https://github.com/bigscience-workshop/petals/issues/283"
    examples = (
        Passes(
            "attn.masked_bias: -1e9; tokens_seen: 3e11",
            made=file_of({"attn.masked_bias": (-1e9, 0.0), "tokens_seen": (3e11,)}),
        ),
        Fails("head.bias: 9.4e18", made=file_of({"head.bias": (9.4e18, 0.1)})),
    )

    def check(self, source: Checkpoint) -> Iterator[Finding]:
        """Yields a finding for every file with such weights."""
        for path, found in groupby(source.exploded(), key=lambda one: one[0].path):
            large = [tensor for _, tensor in found]
            yield self.finding(
                f"{large_text(large)}.",
                path=path,
                line=None,
                where=large[0].name,
                step=source.step,
                fixes=way_back(source),
            )
