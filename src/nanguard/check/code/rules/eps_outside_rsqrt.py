"""An eps where it protects nothing."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.value_questions import can_be_zero, is_eps
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value


class EpsOutsideRsqrt(CodeRule):
    """An eps that is added after `rsqrt`, or to the quotient.

    *Why it breaks a run*: `rsqrt(0)` and `x / 0` are infinite before the eps arrives, and infinity
    plus 1e-6 is infinity. The line looks protected, so nobody looks at it again.

    Add it inside: `torch.rsqrt(var + eps)`, `x / (norm + eps)`.
    """

    code = "SRC026"
    name = "eps-outside-rsqrt"
    severity = Severity.INFO
    seen_in = "https://github.com/tile-ai/tilelang/pull/1243"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef f(x, eps):\n    ms = x.pow(2).mean(-1, keepdim=True)\n"
            "    return x * (torch.rsqrt(ms) + eps)\n",
            line=6,
        ),
        Fails(
            "import torch\n\n\ndef f(x):\n    return (x - x.mean()) / x.std() + 1e-6\n",
            line=5,
        ),
        Passes("import torch\n\n\ndef f(ms, eps):\n    return torch.rsqrt(ms + eps)\n"),
        Passes("import torch\n\n\ndef f(x, eps):\n    return x / (x.norm() + eps)\n"),
        Passes("import torch\n\n\ndef f(x, n):\n    return x / n + 1e-6\n"),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        for total in code.of("add"):
            if len(total.inputs) < 2:
                continue
            for quotient, eps in (total.inputs[:2], total.inputs[1::-1]):
                if _is_protecting(code, total):
                    break
                if _is_meant_as_eps(eps) and not is_eps(quotient) and _is_unprotected(quotient):
                    yield self.at(
                        code,
                        total.node,
                        "the eps is added after the division, which is infinite by then",
                        fixes=(Fix("add the eps to the divisor, under the root"),),
                    )
                    break


def _is_meant_as_eps(value: Value) -> bool:
    """Returns whether it is written as an eps; the small default of a parameter may be anything."""
    return is_eps(value) and (value.has("eps") or "default" not in value.kinds)


def _is_protecting(code: Code, total: Value) -> bool:
    """Returns whether the sum is itself what something is divided by, or the root of."""
    parent = code.parents.get(total.node) if total.node is not None else None
    if isinstance(parent, ast.BinOp):
        return isinstance(parent.op, (ast.Div, ast.Pow)) and (
            parent.right is total.node or isinstance(parent.op, ast.Pow)
        )
    if isinstance(parent, ast.Attribute):
        return parent.attr in ("sqrt", "rsqrt", "log", "reciprocal", "pow")
    made = code.values.get(parent) if isinstance(parent, ast.Call) else None
    return made is not None and made.op in ("sqrt", "rsqrt", "log", "reciprocal", "pow")


def _is_unprotected(value: Value) -> bool:
    core = value.core
    if core.op == "mul":
        return any(_is_unprotected(part) for part in core.inputs)
    if core.op == "rsqrt" and core.inputs:
        return can_be_zero(core.inputs[0]) and _is_measure(core.inputs[0])
    if core.op == "pow" and core.inputs:
        exponent = core.arg(1, "exponent")
        number = None if exponent is None else exponent.number()
        if number is not None and number < 0:
            return can_be_zero(core.inputs[0]) and _is_measure(core.inputs[0])
    if core.op in ("div", "reciprocal") and core.inputs:
        divisor = core.inputs[-1]
        total = divisor.core
        if total.op == "sum" and total.inputs and total.inputs[0].core is core.inputs[0].core:
            return False  # shares of a whole; the eps is for what comes next, such as a log
        return divisor.number() is None and can_be_zero(divisor) and _is_measure(divisor)
    return False


def _is_measure(value: Value) -> bool:
    """Returns whether a value is a norm, a spread or a count: something meant to be divided by."""
    core = value.core
    if core.op == "mul":
        return any(_is_measure(part) for part in core.inputs)
    if core.op == "add":
        return any(_is_measure(part) for part in core.inputs)
    return core.has("sumsq", "var", "std", "norm", "masksum", "weightsum", "minmax", "sum")
