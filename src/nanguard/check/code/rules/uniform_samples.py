"""Random numbers between 0 and 1 that are exactly 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, bare, operand, replaced
from nanguard.check.code.training_path import is_evaluation, is_used_only
from nanguard.check.code.value_questions import guarded_by, is_number
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


_DRAWN = frozenset({"rand", "rand_like", "uniform"})
# What keeps a number that is 0 at 0.
_KEEPS_ZERO = frozenset({"sqrt", "pow", "square", "mul", "sin", "tan", "abs", "neg", "named"})
_OPERATIONS_BETWEEN = 8  # operations between the drawing and the division


class DivisionByUniformSample(CodeRule):
    """A weight that divides by a time or a noise level drawn from `torch.rand`.

    *Why it breaks a run*: `rand` gives numbers from 0 on, 0 included: one in 16 million in float32,
    one in 256 in bfloat16. A weight such as `(t + 1) / t.sqrt()` is inf there, and very large close
    to it: the loss of one sample swamps the batch long before it is inf.

    Keep the time away from its end: `t = eps + (1 - eps) * torch.rand(n)`, or clamp the weight.
    """

    code = "SRC034"
    name = "division-by-uniform-sample"
    severity = Severity.WARNING
    claim = "value"
    seen_in = "https://github.com/yang-song/score_sde_pytorch/blob/main/losses.py"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef loss_of(model, x):\n    t = torch.rand(x.shape[0])\n"
            "    weight = (t + 1) / t.sqrt()\n    return (weight * model(x, t)).mean()\n",
            line=6,
            fixed="import torch\n\n\ndef loss_of(model, x):\n    t = torch.rand(x.shape[0])\n"
            "    weight = (t + 1) / t.sqrt().clamp(min=1e-3)\n"
            "    return (weight * model(x, t)).mean()\n",
        ),
        Passes(
            "import torch\n\n\ndef loss_of(model, x, eps=1e-3):\n"
            "    t = torch.rand(x.shape[0]) * (1 - eps) + eps\n"
            "    return (model(x, t) / t.sqrt()).mean()\n"
        ),
        Passes(
            "import torch\n\n\ndef dropped(x, keep):\n"
            "    return x / keep * (torch.rand(x.shape) < keep)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        for quotient in code.of("div", "rsqrt", "reciprocal"):
            divisor = _divisor(quotient)
            if (
                divisor is None
                or not _is_drawn(divisor, _OPERATIONS_BETWEEN)
                or not _reaches_zero(divisor)
            ):
                continue
            if guarded_by(divisor, quotient.guards) or is_number(divisor):
                continue
            yield self.at(
                code,
                quotient.node,
                "division by a random number that can be 0: inf there, and very large near it",
                fixes=_fixes(code, quotient),
                shown=True,
                weak=is_evaluation(code) or is_used_only(quotient) or not quotient.grad,
            )


def _divisor(quotient: Value) -> Value | None:
    place = 1 if quotient.op == "div" else 0
    return quotient.inputs[place] if place < len(quotient.inputs) else None


def _reaches_zero(value: Value) -> bool:
    return value.lo <= 0 and not value.has("padded", "chosen", "bounded-below")


def _is_drawn(value: Value, depth: int) -> bool:
    """Returns whether a value is 0 where a number drawn from 0 to 1 is."""
    core = value.core
    if core.op in _DRAWN:
        return core.lo == 0  # not one whose bounds are not known
    if not depth or core.op not in _KEEPS_ZERO or not core.inputs:
        return False
    if core.op == "pow" and (core.arg(1, "exponent") or core).number() is None:
        return False
    others = core.inputs[1:] if core.op == "mul" else ()
    return _is_drawn(core.inputs[0], depth - 1) or any(_is_drawn(o, depth - 1) for o in others)


def _fixes(code: Code, quotient: Value) -> tuple[Fix, ...]:
    node = operand(quotient, 1 if quotient.op == "div" else 0)
    title = "keep what is drawn away from 0"
    if node is None:
        return (Fix(title),)
    bounded = f"{bare(code, node)}.clamp(min={floors.DRAW})"
    return (Fix(title, edits=(replaced(code, node, bounded),)),)
