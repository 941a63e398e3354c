"""Gumbel noise from uniform samples that can be 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, bare, operand, replaced
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Finding, Fix, Severity
from nanguard.source import floors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value


class GumbelLogLog(CodeRule):
    """`-log(-log(u))` on uniform samples that can be 0 or 1.

    *Why it breaks a run*: `torch.rand` returns exactly 0 about once in 16 million draws, which a
    model with a large vocabulary makes every few steps. log(0) is -inf, the noise is -inf, and a
    softmax over it NaN.

    Keep u inside the interval (`u.clamp(1e-6, 1 - 1e-6)`), draw from
    `torch.empty_like(x).exponential_()`, or use `F.gumbel_softmax`.
    """

    code = "SRC028"
    name = "gumbel-log-log"
    severity = Severity.INFO
    seen_in = "https://github.com/pytorch/pytorch/issues/22442"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef gumbel(shape):\n    u = torch.rand(shape)\n"
            "    return -torch.log(-torch.log(u))\n",
            line=6,
            fixed="import torch\n\n\ndef gumbel(shape):\n    u = torch.rand(shape)\n"
            "    return -torch.log(-torch.log(u.clamp(1e-6, 1 - 1e-6)))\n",
        ),
        Fails(
            "import torch\n\n\ndef gumbel(x):\n    u = torch.empty_like(x).uniform_(0, 1)\n"
            "    return -(-u.log()).log()\n",
            line=6,
        ),
        Passes(
            "import torch\n\n\ndef gumbel(shape, eps=1e-10):\n    u = torch.rand(shape)\n"
            "    return -torch.log(-torch.log(u + eps) + eps)\n"
        ),
        Passes(
            "import torch\n\n\ndef gumbel(x):\n"
            "    return -torch.empty_like(x).exponential_().log()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        for outer in code.of("log"):
            inner = _inner_log(outer)
            if inner is None or not inner.inputs:
                continue
            sample = inner.inputs[0]
            if sample.lo > 0 or sample.has("padded", "bounded-below"):
                continue
            yield self.at(
                code,
                outer.node,
                "Gumbel noise from a uniform sample that can be exactly 0: log(0) is -inf",
                fixes=(Fix("keep the sample inside (0, 1)", edits=_edits(code, inner)),),
            )


def _edits(code: Code, inner: Value) -> tuple[Edit, ...]:
    node = operand(inner)
    if node is None:
        return ()
    eps = floors.COSINE
    return (replaced(code, node, f"{bare(code, node)}.clamp({eps}, 1 - {eps})"),)


def _inner_log(outer: Value) -> Value | None:
    """Returns the log under the sign under a log."""
    value = outer.inputs[0].core if outer.inputs else None
    if value is not None and value.op == "add" and value.inputs:
        value = value.inputs[0].core
    if value is None or value.op != "neg":
        return None
    inner = value.inputs[0].core
    if inner.op == "add":
        inner = inner.inputs[0].core
    return inner if inner.op == "log" else None
