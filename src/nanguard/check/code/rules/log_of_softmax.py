"""``log(softmax(x))`` where ``log_softmax`` is meant."""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, replaced
from nanguard.check.code.origins import origins
from nanguard.check.code.training_path import is_branch_of_use, is_called_to_use, is_used_only
from nanguard.check.code.value_questions import carries_gradient, is_module_output, is_only_shown
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

# With less than this a log jumps by 10 and more, from the last number below 1 on.
_SMALLEST_EPS = 1e-12


class LogOfSoftmax(CodeRule):
    """The logarithm of a softmax or a sigmoid, or of 1 minus one with an eps of next to nothing.

    *Why it breaks a run*: a softmax underflows to exactly 0 once one logit leads by about 104 in
    float32, and by about 17 in float16. Its logarithm is then -inf and the gradient NaN, although
    the log-probability itself is an ordinary number.

    Write `log_softmax(x, dim)` or `logsigmoid(x)`: the same value, computed without the detour.
    """

    code = "SRC017"
    name = "log-of-softmax"
    severity = Severity.WARNING
    claim = "value"
    seen_in = "https://github.com/summerlvsong/Aggregation-Cross-Entropy/issues/2"
    examples: ClassVar = (
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\n"
            "def f(x):\n    return torch.log(F.softmax(x, dim=-1))\n",
            line=6,
            fixed="import torch\nimport torch.nn.functional as F\n\n\n"
            "def f(x):\n    return F.log_softmax(x, dim=-1)\n",
        ),
        Fails("import torch\n\n\ndef f(x):\n    p = x.sigmoid()\n    return p.log()\n", line=6),
        Passes(
            "import torch\n\n\ndef f(x):\n    p = x.softmax(-1)\n"
            "    return -(p * p.clamp(min=1e-8).log()).sum()\n"
        ),
        Passes("import torch\n\n\ndef f(x):\n    return torch.log_softmax(x, -1)\n"),
        Fails(
            "import torch\n\n\ndef loss(x):\n"
            "    return -torch.log(1 - torch.sigmoid(x) + 1e-24).mean()\n",
            line=5,
        ),
        Passes(
            "import torch\n\n\ndef loss(x):\n"
            "    return -torch.log(1 - torch.sigmoid(x) + 1e-7).mean()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        yield from self._of_complements(code)
        for log in code.of("log", "log2", "log10"):
            value = log.inputs[0] if log.inputs else None
            if value is None or value.lo > 0 or value.has("padded", "chosen"):
                continue
            source = value.core
            if source.op in ("softmax", "sigmoid") and not is_module_output(source, log):
                better = "log_softmax" if source.op == "softmax" else "logsigmoid"
                yield self.at(
                    code,
                    log.node,
                    f"log of a {source.op} is -inf as soon as a probability underflows to 0",
                    fixes=(Fix(f"use {better}", edits=_edits(code, log, source)),),
                    shown=log.grad and carries_gradient(source),
                    weak=_is_for_use(code, log) or is_only_shown(code, log),
                )

    def _of_complements(self, code: Code) -> Iterator[Finding]:
        """Logarithms of ``1 - sigmoid(x) + eps``, with an eps far below what the 1 resolves."""
        for log in code.of("log", "log2", "log10"):
            eps = _eps_of_complement(code, log.inputs[0]) if log.inputs else None
            if eps is None:
                continue
            yield self.at(
                code,
                log.node,
                "1 minus a sigmoid is exactly 0 from 16.7 on in float32: the log jumps from -17 to "
                f"{math.log(eps):.0f} there, and the gradient is 0 where the loss is largest",
                fixes=(Fix("use logsigmoid(-x): log(1 - sigmoid(x)) without the detour"),),
                shown=log.grad,
                weak=_is_for_use(code, log) or is_only_shown(code, log),
            )


def _eps_of_complement(code: Code, value: Value) -> float | None:
    """Returns the eps that is added to 1 minus a sigmoid, if it is next to nothing."""
    total = value.core
    if total.op != "add" or len(total.inputs) < 2:
        return None
    for rest, eps in (total.inputs[:2], total.inputs[1::-1]):
        number = eps.number()
        core = rest.core
        if number is None or not 0 < number < _SMALLEST_EPS or core.op != "sub":
            continue
        one, chance = core.inputs[:2]
        made = origins(code, chance).makers if one.number() == 1 else ()
        if made and all(maker.op in ("sigmoid", "softmax") for maker in made):
            return number
    return None


def _is_for_use(code: Code, log: Value) -> bool:
    """Returns whether nothing is trained with a log: what samples and evaluates has others."""
    if is_used_only(log) or is_branch_of_use(code, log.node):
        return True
    return log.scope is not None and is_called_to_use(code, log.scope)


def _edits(code: Code, log: Value, source: Value) -> tuple[Edit, ...]:
    """Returns the change, where both calls stand in one expression."""
    inner, outer = source.node, log.node
    if log.op != "log" or not isinstance(inner, ast.Call) or not isinstance(outer, ast.Call):
        return ()
    operand = outer.args[0] if outer.args else getattr(outer.func, "value", None)
    func = inner.func
    if operand is not inner or source.op != "softmax":
        return ()
    if not isinstance(func, ast.Attribute) or func.attr != "softmax" or _is_own(func.value):
        return ()
    text, name = code.segment(inner), code.span(func)[1] - code.span(inner)[0]
    before = text[: name - len("softmax")]
    return (replaced(code, outer, f"{before}log_softmax{text[name:]}"),)


def _is_own(receiver: ast.expr) -> bool:
    """Returns whether something is ``self``, whose ``softmax`` has no ``log_softmax`` beside it."""
    return isinstance(receiver, ast.Name) and receiver.id in ("self", "cls")
