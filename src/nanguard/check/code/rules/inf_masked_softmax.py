"""A softmax over rows that a mask can empty."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import (
    CodeRule,
    fills_with_minus_inf,
    finite_fill,
    keeps_one_per_row,
    mask_of,
    rows_are_kept_apart,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

# What makes a mask of others, or of numbers, so that nothing may be left.
_MAKES = frozenset(
    {"and", "or", "mul", "rand", "bernoulli", "isin", "logical_and", "logical_or", "cdist", "lt",
     "gt", "le", "ge", "xor"}
)  # fmt: skip


class InfMaskedSoftmax(CodeRule):
    """-inf written by a mask, then a softmax, with nothing that keeps a fully masked row apart.

    *Why it breaks a run*: the softmax of a row in which everything is -inf is 0 / 0, NaN. A
    sample that is all padding, a query without a key in its window: one row is enough, and its
    gradient reaches every weight of the layer.

    Use a large finite number (`torch.finfo(scores.dtype).min`), or set rows that are masked as a
    whole to 0 before and after the softmax; `F.scaled_dot_product_attention` does.
    """

    code = "SRC014"
    name = "inf-masked-softmax"
    severity = Severity.WARNING
    claim = "value"
    seen_in = "https://github.com/pytorch/pytorch/issues/41508"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef attend(s, pad):\n"
            '    s = s.masked_fill(pad == 0, float("-inf"))\n    return s.softmax(-1)\n',
            line=5,
            fixed="import torch\n\n\ndef attend(s, pad):\n"
            "    s = s.masked_fill(pad == 0, torch.finfo(s.dtype).min)\n"
            "    return s.softmax(-1)\n",
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef attend(s, keep):\n"
            "    s[~keep] = -torch.inf\n    return F.softmax(s, dim=-1)\n",
            line=6,
        ),
        Passes(
            "import torch\n\n\ndef attend(s):\n    n = s.size(-1)\n"
            "    future = torch.triu(torch.ones(n, n), 1).bool()\n"
            '    return s.masked_fill(future, float("-inf")).softmax(-1)\n'
        ),
        Passes(
            "import torch\n\n\ndef attend(s, keep):\n"
            '    s = s.masked_fill(~keep, float("-inf"))\n'
            "    empty = (~keep).all(-1, keepdim=True)\n"
            "    return s.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)\n"
        ),
        Passes(
            "import torch\n\n\ndef attend(s, keep):\n"
            "    return s.masked_fill(~keep, -1e4).softmax(-1)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        seen: set[int] = set()
        for softmax in code.of("softmax", "log_softmax"):
            if not softmax.inputs or not softmax.grad or rows_are_kept_apart(code, softmax):
                continue
            if softmax.op == "log_softmax" and _is_in_a_loss(code, softmax):
                continue
            for masking in fills_with_minus_inf(softmax.inputs[0]):
                if id(masking.node) in seen or keeps_one_per_row(masking):
                    continue
                seen.add(id(masking.node))
                here = masking if masking.scope is softmax.scope else softmax
                yield self.at(
                    code,
                    here.node,
                    "a row that is masked as a whole becomes all -inf, and its softmax NaN",
                    fixes=_fixes(code, masking),
                    shown=not _may_be_causal(masking),
                )


def _may_be_causal(masking: Value) -> bool:
    """Returns whether a mask was handed in, and nothing here says that a row can be empty."""
    mask = mask_of(masking)
    if mask is None:
        return False
    if any(part.name in ("attn_mask", "attention_bias") for part in mask.upstream(8)):
        return True
    # Handed in as a whole: most are made from lengths, which leave something in every row.
    return not any(
        part.op in _MAKES and (part.op != "mul" or part.has("mask")) for part in mask.upstream(8)
    )


def _fixes(code: Code, masking: Value) -> tuple[Fix, ...]:
    title = "fill with the lowest finite number, or keep such rows apart"
    known = code.names.imports.get("torch") == "torch"
    edits = finite_fill(code, masking, "torch.finfo(SCORES.dtype).min") if known else ()
    return (Fix(title, edits=edits),)


def _is_in_a_loss(code: Code, softmax: Value) -> bool:
    """Returns whether it is part of a cross-entropy, which another rule speaks about."""
    return any(
        part is softmax
        for loss in code.of("nll_loss", "kl_div")
        for given in loss.inputs[:1]
        for part in given.upstream(12)
    )
