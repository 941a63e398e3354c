"""Division by a probability that underflows to 0."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, bare, operand, replaced
from nanguard.check.code.origins import origins
from nanguard.check.code.scopes import FunctionNode
from nanguard.check.code.training_path import is_beside_training
from nanguard.check.code.value_questions import (
    can_be_zero,
    carries_gradient,
    guarded_by,
    has_eps_outside,
    is_made_by_layers,
    is_only_shown,
    is_open,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity
from nanguard.source import floors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_CHANCES = ("softmax", "sigmoid")
# Words in the names of sizes and settings, whose callers need not be asked what they hand in.
_SETTING = re.compile(
    r"(^|_)(size|shape|height|width|[hw]|dim|num|n|count|len|length|idx|index|stride|patch|cap"
    r"|softcap|temperature|temp|tau|scale|scaling|factor|eps|rate|freq|steps?|name|channels?"
    r"|heads?|layers?|epochs?|std|sigma|norm)s?\d*(_|$)"
)
_NUMBERS = frozenset({"int", "float", "str", "bool"})


class DivisionByProbability(CodeRule):
    """`1 / p`, `p.pow(-1)` or `x / (1 - p)` of a softmax, a sigmoid, a ReLU or a layer's output.

    *Why it breaks a run*: a softmax underflows to exactly 0 once one logit leads by about 104 in
    float32, a sigmoid rounds to exactly 1 beyond about 17. The quotient is inf there, and its
    gradient, which has the square of it, is inf long before.

    Stay with logarithms (`(log_a - log_p).exp()`, with a bound), or bound the divisor:
    `p.clamp(min=1e-7)`.
    """

    code = "SRC040"
    name = "division-by-probability"
    severity = Severity.WARNING
    claim = "value"
    seen_in = "https://github.com/deeplearning4j/deeplearning4j/issues/3247"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef fisher(x):\n    p = torch.softmax(x, -1)\n"
            "    return p.pow(-1)\n",
            line=6,
        ),
        Fails(
            "import torch\n\n\ndef weighted_loss(x, r):\n    p = torch.sigmoid(x)\n"
            "    return (r / p).mean()\n",
            line=6,
            fixed="import torch\n\n\ndef weighted_loss(x, r):\n    p = torch.sigmoid(x)\n"
            "    return (r / p.clamp(min=1e-7)).mean()\n",
        ),
        Fails(
            "import torch\n\n\ndef odds_loss(x):\n    p = torch.sigmoid(x)\n"
            "    return (p / (1 - p)).mean()\n",
            line=6,
        ),
        Passes(
            "import torch\n\n\ndef weighted_loss(x, r):\n    p = torch.sigmoid(x) + 1e-6\n"
            "    return (r / p).mean()\n"
        ),
        Passes(
            "import torch\n\n\ndef smooth(x):\n    p = torch.softmax(x, -1)\n"
            "    return p / p.sum(-1, keepdim=True)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        for quotient in code.of("div", "reciprocal", "pow"):
            divisor = _divisor(quotient)
            if divisor is None or not quotient.grad or not can_be_zero(divisor):
                continue
            if guarded_by(divisor, quotient.guards) or has_eps_outside(code, quotient):
                continue
            what = _what(code, quotient, divisor)
            if what:
                yield self.at(
                    code,
                    quotient.node,
                    f"division by {what}: inf, and an infinite gradient",
                    fixes=_fixes(code, quotient),
                    shown=True,
                    weak=not carries_gradient(quotient)
                    or is_beside_training(code, quotient)
                    or is_only_shown(code, quotient),
                )


def _divisor(quotient: Value) -> Value | None:
    if quotient.op == "pow":
        exponent = quotient.arg(1, "exponent")
        number = exponent.number() if exponent is not None else None
        return quotient.inputs[0] if number is not None and number < 0 else None
    place = 1 if quotient.op == "div" else 0
    return quotient.inputs[place] if place < len(quotient.inputs) else None


def _is_target_of_error(quotient: Value, divisor: Value) -> bool:
    """Returns whether an error is taken relative to the target: ``(y_hat - y).abs() / y``."""
    target = divisor.core.inputs[0].core if divisor.core.op == "abs" else divisor.core
    scope = quotient.scope
    if target.op or not target.has("labels") or quotient.op != "div" or scope is None:
        return False
    if "loss" not in scope.name.lower() and scope.name != "forward":
        return False  # a measure of quality
    return any(
        part.op == "sub" and any(side.core is target for side in part.inputs[:2])
        for part in quotient.inputs[0].upstream(8)
    )


def _is_dot_product(core: Value) -> bool:
    """Returns whether rows of two learned things of any sign are multiplied and added up."""
    called = core.node.func if isinstance(core.node, ast.Call) else None
    if core.op != "matmul" or getattr(called, "attr", "") != "bmm" or len(core.inputs) < 2:
        return False
    sides = core.inputs[:2]
    if sides[0].core is sides[1].core or any(part.lo >= 0 for part in sides):
        return False
    return any(carries_gradient(part) for part in sides)


def _what(code: Code, quotient: Value, divisor: Value) -> str:
    """Returns what it is that something is divided by, if it reaches 0."""
    if _is_chance(code, divisor):
        return "a probability that underflows to 0"
    if _is_target_of_error(quotient, divisor):
        return "a target that can be 0"
    core = divisor.core
    if core.op == "relu":
        return "a ReLU, which is 0 for half of what it is given"
    if _is_dot_product(core):
        return "a dot product, which is 0 where two vectors are at right angles"
    if core.lo < 0 < core.hi and not _is_setting(divisor) and is_made_by_layers(code, core):
        return "the output of a layer, which can be 0"
    return ""


def _is_chance(code: Code, value: Value) -> bool:
    """Returns whether a value is a softmax or a sigmoid, or 1 minus one."""
    core = value.core
    if core.op == "sub" and core.inputs[0].number() == 1:
        value = core.inputs[1]
    if value.core.op in _CHANCES:
        return True
    if not is_open(value.core) or _is_setting(value):
        return False
    return origins(code, value).made_by(*_CHANCES)


def _is_setting(value: Value) -> bool:
    """Returns whether a name, an annotation or a default says that it is a size or a number."""
    if any(_SETTING.search(name.lower()) for name in {value.name, value.core.name}):
        return True
    scope = value.core.scope
    if value.core.op or scope is None or not isinstance(scope.node, FunctionNode):
        return False
    given = scope.node.args
    arguments = [*given.posonlyargs, *given.args]
    defaults = dict(zip(reversed(arguments), reversed(given.defaults), strict=False))
    defaults |= {a: d for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True) if d}
    for argument in (*arguments, *given.kwonlyargs):
        if argument.arg == value.core.name:
            default = defaults.get(argument)
            number = isinstance(default, ast.Constant) and default.value is not None
            return number or _is_of_numbers(argument.annotation)
    return False


def _is_of_numbers(annotation: ast.expr | None) -> bool:
    names = {getattr(n, "id", "") for n in ast.walk(annotation)} if annotation is not None else ()
    return not _NUMBERS.isdisjoint(names)


def _fixes(code: Code, quotient: Value) -> tuple[Fix, ...]:
    node = operand(quotient, 1 if quotient.op == "div" else 0)
    title = "bound the divisor from below, or stay with log-probabilities"
    if node is None:
        return (Fix(title),)
    bounded = f"{bare(code, node)}.clamp(min={floors.PROBABILITY})"
    return (Fix(title, edits=(replaced(code, node, bounded),)),)
