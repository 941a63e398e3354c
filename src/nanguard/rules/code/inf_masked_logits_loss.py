"""Class logits masked with -inf in front of a cross-entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nanguard.findings import Finding, Fix, Severity
from nanguard.rules.code_rule import CodeRule
from nanguard.rules.masks import fills_with_minus_inf, finite_fill, mask_of
from nanguard.rules.rule import Fails, Passes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.sources.python.code import Code
    from nanguard.sources.python.values import Value


class InfMaskedLogitsLoss(CodeRule):
    """Class logits set to -inf before a cross-entropy.

    *Why it breaks a run*: as soon as one sample's own class is among the masked ones (a wrong
    label map, a data set with classes of another), its loss is -log(0) = inf, and the mean over
    the batch too, while accuracy goes on looking plausible.

    Mask with a finite number (-1e4 in half precision, -1e9 in float32), and check that the target
    is never masked.
    """

    code = "SRC016"
    name = "inf-masked-logits-loss"
    severity = Severity.WARNING
    seen_in = "https://github.com/google-deepmind/optax/issues/896"
    examples: ClassVar = (
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef loss(logits, y, dead):\n"
            '    logits = logits.masked_fill(dead, float("-inf"))\n'
            "    return F.cross_entropy(logits, y)\n",
            line=6,
            fixed="import torch\nimport torch.nn.functional as F\n\n\ndef loss(logits, y, dead):\n"
            "    logits = logits.masked_fill(dead, -1e4)\n"
            "    return F.cross_entropy(logits, y)\n",
        ),
        Fails(
            "import torch\nfrom torch import nn\n\ncriterion = nn.CrossEntropyLoss()\n\n\n"
            "def loss(logits, y, ok):\n    logits[~ok] = -torch.inf\n"
            "    return criterion(logits, y)\n",
            line=8,
        ),
        Passes(
            "import torch\nimport torch.nn.functional as F\n\n\ndef loss(logits, y, dead):\n"
            "    return F.cross_entropy(logits.masked_fill(dead, -1e4), y)\n"
        ),
        Passes(
            "import torch\nimport torch.nn.functional as F\n\n\ndef info_nce(sim):\n"
            "    n = sim.size(0)\n    own = torch.eye(n, dtype=torch.bool)\n"
            '    sim = sim.masked_fill(own, float("-inf"))\n'
            "    return F.cross_entropy(sim, torch.arange(n).roll(n // 2))\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        seen: set[int] = set()
        for loss in code.of("cross_entropy", "nll_loss"):
            logits = loss.arg(0, "input")
            if logits is None:
                continue
            for masking in fills_with_minus_inf(logits):
                if id(masking.node) in seen or _spares_the_target(masking, loss):
                    continue
                seen.add(id(masking.node))
                yield self.at(
                    code,
                    masking.node,
                    "a target that is masked with -inf has an infinite loss",
                    fixes=(
                        Fix("mask with a finite number", edits=finite_fill(code, masking, "-1e4")),
                    ),
                )


def _spares_the_target(masking: Value, loss: Value) -> bool:
    """Returns whether the mask was made so that targets stay in."""
    mask = mask_of(masking)
    if mask is None:
        return True
    targets = loss.arg(1, "target")
    names = {part.name for part in targets.upstream(6) if part.name} if targets else set()
    for part in mask.upstream(30):
        if part.op in ("eye", "diag", "tril", "triu", "fill_diagonal", "diag_embed"):
            return True
        if part.op in ("setitem", "scatter", "one_hot") and any(
            p.name in names for given in part.inputs[1:] for p in given.upstream(6) if p.name
        ):
            return True
    return False
