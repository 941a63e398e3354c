"""The root of a mean of squares minus the square of a mean."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, operand, replaced
from nanguard.check.code.rules.sqrt_at_zero import is_root
from nanguard.check.code.training_path import is_evaluation
from nanguard.check.code.value_questions import guarded_by, is_number
from nanguard.check.code.values import SHAPE
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity
from nanguard.source import floors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_MEAN = re.compile(r"mean|avg|average|ema|running|expect|moment")
_SQUARE = re.compile(r"sq|square|second|pow2|x2")
_AVERAGES = frozenset({"mean", "avg_pool1d", "avg_pool2d", "conv1d", "conv2d", "div"})


class VarianceFromMoments(CodeRule):
    """The square root of a variance that is worked out as `mean(x**2) - mean(x)**2`.

    *Why it breaks a run*: the two numbers agree in most of their digits where the spread is small
    beside the mean, and rounding makes their difference negative. Its root is NaN, and a bound
    behind the root (`.sqrt().clamp(min=1e-4)`) lets NaN pass.

    Bound the variance before the root: `(mean_sq - mean**2).clamp(min=1e-6).sqrt()`, or take
    `torch.var`.
    """

    code = "SRC042"
    name = "variance-from-moments"
    severity = Severity.WARNING
    claim = "value"
    seen_in = "https://github.com/anthonymlortiz/lcn/issues/4"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef spread(x):\n    mean, mean_sq = x.mean(0), x.pow(2).mean(0)\n"
            "    return torch.sqrt(mean_sq - mean**2).clamp(min=1e-4)\n",
            line=6,
            fixed="import torch\n\n\ndef spread(x):\n"
            "    mean, mean_sq = x.mean(0), x.pow(2).mean(0)\n"
            "    return torch.sqrt((mean_sq - mean**2).clamp(min=1e-12)).clamp(min=1e-4)\n",
        ),
        Fails(
            "import torch\nfrom torch import nn\n\n\nclass Normaliser(nn.Module):\n"
            "    def std(self):\n"
            "        return torch.sqrt(self.running_mean_sq - self.running_mean**2)\n",
            line=7,
        ),
        Passes(
            "import torch\n\n\ndef spread(x):\n"
            "    return (x.pow(2).mean(0) - x.mean(0) ** 2).clamp(min=1e-6).sqrt()\n"
        ),
        Passes(
            "import torch\n\n\ndef spread(x):\n"
            "    return torch.sqrt(x.pow(2).mean(0) - x.mean(0) ** 2 + 1e-5)\n"
        ),
        Passes("import torch\n\n\ndef side(c, a):\n    return torch.sqrt(c**2 - a**2)\n"),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        for root in code.of("sqrt", "rsqrt", "pow"):
            if not root.inputs or (root.op == "pow" and not is_root(root)):
                continue
            value = root.inputs[0]
            if not _is_of_moments(value) or guarded_by(value, root.guards):
                continue
            if is_number(value) or is_evaluation(code):
                continue
            yield self.at(
                code,
                root.node,
                "square root of a mean of squares minus a squared mean: rounding makes it "
                "negative where the spread is small, and its root NaN",
                fixes=_fixes(code, root),
                shown=True,
                # NaN in a running statistic needs no gradient to spoil what is scaled by it.
                claim="code" if _is_of_module(root) else None,
            )


def _is_of_module(root: Value) -> bool:
    scope = root.scope
    return scope is not None and scope.cls is not None and scope.cls.is_module()


def _is_of_moments(value: Value) -> bool:
    """Returns whether it is the mean of some squares minus the square of the mean."""
    core = value.core
    if core.op != "sub" or len(core.inputs) < 2:
        return False
    second = core.inputs[1].core
    squared = second.op in ("pow", "square", "mul") and second.has("square")
    if not squared or not second.inputs:
        return False
    return _is_mean(second.inputs[0]) and _is_mean_of_squares(core.inputs[0])


def _is_mean(value: Value) -> bool:
    return value.core.op in _AVERAGES or any(map(_MEAN.search, _names(value)))


def _is_mean_of_squares(value: Value) -> bool:
    if value.core.op in _AVERAGES:
        return any(part.has("square") for part in value.core.upstream(6))
    return any(_MEAN.search(name) and _SQUARE.search(name) for name in _names(value))


def _names(value: Value) -> list[str]:
    """Returns what a value is called, on its way from where it was made."""
    names = [value.name.lower()]
    while value.op in SHAPE and value.inputs:
        value = value.inputs[0]
        names.append(value.name.lower())
    return names


def _fixes(code: Code, root: Value) -> tuple[Fix, ...]:
    node = operand(root)
    title = "bound the variance from below before the root"
    if node is None:
        return (Fix(title),)
    bounded = f"({code.segment(node)}).clamp(min={floors.SQUARE})"
    return (Fix(title, edits=(replaced(code, node, bounded),)),)
