"""Class logits masked with -inf in front of a cross-entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import (
    CodeRule,
    fills_with_minus_inf,
    finite_fill,
    is_end_of_rows,
    mask_of,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value


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
    claim = "value"
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
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef loss(logits, y, n, eps=0.1):\n"
            '    logits[:, n:] = float("-inf")\n    logs = F.log_softmax(logits, dim=-1)\n'
            "    share = torch.full_like(logs, eps / logs.size(-1))\n"
            "    return -(share * logs).sum(-1).mean()\n",
            line=6,
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
                if id(masking.node) in seen:
                    continue
                if _spares_the_target(masking, loss) and not _smooths(loss):
                    continue
                seen.add(id(masking.node))
                yield self.at(
                    code,
                    masking.node,
                    "a target that is masked with -inf has an infinite loss",
                    shown=_smooths(loss) or _is_by_number(masking),
                    fixes=(
                        Fix("mask with a finite number", edits=finite_fill(code, masking, "-1e4")),
                    ),
                )
        yield from self._smoothed(code, seen)

    def _smoothed(self, code: Code, seen: set[int]) -> Iterator[Finding]:
        """Yields masked logits whose log-probabilities are multiplied with targets, zeros too."""
        for product in code.of("mul"):
            for part in product.inputs[:2]:
                logs = part.core
                if logs.op != "log_softmax" or not logs.inputs or not product.grad:
                    continue
                for masking in fills_with_minus_inf(logs.inputs[0]):
                    if id(masking.node) in seen or _is_looked_after(code, product):
                        continue
                    seen.add(id(masking.node))
                    yield self.at(
                        code,
                        masking.node if masking.scope is product.scope else product.node,
                        "log-probabilities of logits that are masked with -inf are multiplied: "
                        "0 * -inf is NaN, and label smoothing gives every class a share",
                        shown=True,
                        fixes=(Fix("smooth over the classes that are left only"),),
                    )


def _is_by_number(masking: Value) -> bool:
    """Returns whether classes from some number on are masked, whatever the target is."""
    mask = mask_of(masking)
    return masking.op == "setitem" and mask is not None and is_end_of_rows(mask)


def _smooths(loss: Value) -> bool:
    """Returns whether every class, masked or not, gets a share of the target."""
    given = loss.keywords.get("label_smoothing")
    return given is not None and given.number() != 0


def _is_looked_after(code: Code, product: Value) -> bool:
    """Returns whether masked classes are taken out again, or zeros put in place of NaN."""
    mending = code.of("masked_fill", "where", "nan_to_num", "xlogy", "masked_select")
    return any(used.scope is product.scope and used.line >= product.line - 2 for used in mending)


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
