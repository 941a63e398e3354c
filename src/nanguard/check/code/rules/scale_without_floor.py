"""The scale of a distribution that can be 0: one that is learned, and one that is fitted."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.origins import origins
from nanguard.check.code.training_path import is_beside_training
from nanguard.check.code.value_questions import is_only_shown
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

# Distributions, and their argument that has to be above 0, with its place.
_SCALED = {
    **dict.fromkeys(("Normal", "LogNormal", "Laplace", "Cauchy", "Gumbel"), (1, "scale")),
    **dict.fromkeys(("Beta", "Gamma"), (0, "concentration1")),
}
# Operations that give exactly 0 for ordinary inputs, or for such as training reaches.
_REACHES_ZERO = {
    "softplus": "softplus underflows to 0",
    "relu": "relu is 0 for half of what it is given",
    "sigmoid": "sigmoid underflows to 0",
    "abs": "abs is 0 where its input changes its sign",
}


class ScaleWithoutFloor(CodeRule):
    """`Normal(mu, softplus(x)).log_prob(y)`, or its KL divergence: no floor under the scale.

    *Why it breaks a run*: a likelihood is larger the smaller the scale where the mean fits, and
    nothing stops it: the gradient grows with `1 / scale**2` until the loss is inf or NaN, or the
    distribution raises an error because the scale has become 0.

    Add a floor: `softplus(x) + 1e-3`, or `.clamp(min=1e-3)`.
    """

    code = "SRC054"
    name = "scale-without-floor"
    severity = Severity.WARNING
    claim = "value"
    seen_in = "https://github.com/mllam/neural-lam/pull/537"
    examples: ClassVar = (
        Fails(
            "import torch.nn.functional as F\nfrom torch import nn\n"
            "from torch.distributions import Normal\n\n\nclass Head(nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.mu, self.sd = nn.Linear(3, 1), nn.Linear(3, 1)\n\n"
            "    def loss(self, x, y):\n        scale = F.softplus(self.sd(x))\n"
            "        return -Normal(self.mu(x), scale).log_prob(y).mean()\n",
            line=13,
        ),
        Passes(
            "import torch.nn.functional as F\nfrom torch import nn\n"
            "from torch.distributions import Normal\n\n\nclass Head(nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.mu, self.sd = nn.Linear(3, 1), nn.Linear(3, 1)\n\n"
            "    def loss(self, x, y):\n        scale = F.softplus(self.sd(x)) + 1e-3\n"
            "        return -Normal(self.mu(x), scale).log_prob(y).mean()\n"
        ),
        Passes(
            "import torch.nn.functional as F\nfrom torch import nn\n"
            "from torch.distributions import Normal\n\n\nclass Head(nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.mu, self.sd = nn.Linear(3, 1), nn.Linear(3, 1)\n\n"
            "    def draw(self, x):\n"
            "        return Normal(self.mu(x), F.softplus(self.sd(x))).sample()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        told: set[int] = set()
        for used in code.of("log_prob", "call", "kl_divergence"):
            given = used.inputs[:1] if used.op == "log_prob" else _compared(used)
            for distribution in given:
                why, scale = _why(code, distribution)
                if not why or not used.grad or id(scale) in told:
                    continue
                told.add(id(scale))
                yield self.at(
                    code,
                    used.node,
                    f"the scale of this distribution has no floor: {why}, and the likelihood pulls "
                    "it there",
                    fixes=(Fix("add a floor to the scale: + 1e-3, or .clamp(min=1e-3)"),),
                    shown=True,
                    weak=is_beside_training(code, used) or is_only_shown(code, used),
                )


def _compared(call: Value) -> tuple[Value, ...]:
    """Returns the distributions whose divergence is asked for."""
    if call.path.endswith("kl_divergence"):
        return call.inputs[:2]
    # taken from another file of the project, which has it from torch
    return call.inputs[1:3] if call.name == "kl_divergence" else ()


def _why(code: Code, distribution: Value) -> tuple[str, Value | None]:
    """Returns why a scale can be 0, with the scale; nothing if it cannot."""
    for made in origins(code, distribution).makers:
        if made.op != "new" or not made.path.startswith("torch.distributions"):
            continue
        place = _SCALED.get(made.path.rpartition(".")[2])
        scale = made.arg(*place) if place is not None else None
        if scale is None or scale.lo > 0 or scale.has("padded", "bounded-below", "chosen"):
            continue
        for maker in origins(code, scale).makers:
            if maker.op in _REACHES_ZERO and maker.lo <= 0:
                return _REACHES_ZERO[maker.op], scale
    return "", None


_SPREAD = re.compile(r"(^|_)(var(iances?)?|sigma(_?sq|2)?s?|cov(ariances?)?|sq_?sigmas?)(_|$)")
_FLOORS = ("clamp", "clamp_min", "maximum", "clip", "max", "add", "where", "setitem", "masked_fill")
# What leaves a variance what it is.
_MOVES = frozenset({"named", "expand", "view", "unsqueeze", "data"})


class FittedVarianceWithoutFloor(CodeRule):
    """A weighted variance, as the M-step of a mixture makes it, that divides or is logged later.

    *Why it breaks a run*: a component that is left with one point, or with none, has a variance of
    0. The next density divides by it: 0 / 0 is NaN, and the other components get it through their
    weights.

    Add a floor to it: `(w * (x - mu) ** 2).sum(0) / n + 1e-6`.
    """

    code = "SRC062"
    name = "fitted-variance-without-floor"
    severity = Severity.WARNING
    claim = "value"
    seen_in = "https://github.com/ldeecke/gmm-torch/issues/13"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\nclass Mixture(torch.nn.Module):\n"
            "    def density(self, x, mu, var):\n"
            "        return torch.exp(-0.5 * ((x - mu) ** 2 / var).sum(-1))\n\n"
            "    def m_step(self, x, w):\n        n = w.sum(0) + 1e-6\n"
            "        mu = (w * x).sum(0) / n\n"
            "        var = (w * (x - mu) ** 2).sum(0) / n\n        return mu, var\n",
            line=11,
        ),
        Passes(
            "import torch\n\n\nclass Mixture(torch.nn.Module):\n"
            "    def density(self, x, mu, var):\n"
            "        return torch.exp(-0.5 * ((x - mu) ** 2 / var).sum(-1))\n\n"
            "    def m_step(self, x, w):\n        n = w.sum(0) + 1e-6\n"
            "        mu = (w * x).sum(0) / n\n"
            "        var = (w * (x - mu) ** 2).sum(0) / n + 1e-6\n        return mu, var\n"
        ),
        Passes(
            "import torch\n\n\nclass Mixture(torch.nn.Module):\n"
            "    def density(self, x, mu, var):\n"
            "        return torch.exp(-0.5 * ((x - mu) ** 2 / var).sum(-1))\n\n"
            "    def m_step(self, x, w):\n        n = w.sum(0) + 1e-6\n"
            "        mu = (w * x).sum(0) / n\n"
            "        var = (w * (x - mu) ** 2).sum(0) / n\n"
            "        return mu, var.clamp(min=1e-6)\n"
        ),
        Passes(
            "import torch\n\n\nclass Pool(torch.nn.Module):\n    def forward(self, x, w):\n"
            "        n = w.sum(0) + 1e-6\n        mu = (w * x).sum(0) / n\n"
            "        var = (w * (x - mu) ** 2).sum(0) / n\n        return torch.cat([mu, var])\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        fitted = [quotient for quotient in code.of("div") if _is_weighted_variance(quotient)]
        if not fitted or _is_floored(code):
            return
        for variance in fitted:
            scope = variance.scope
            cls = scope.cls if scope is not None else None
            used = next(
                (
                    use
                    for use in code.of("div")
                    if len(use.inputs) > 1
                    and use.scope is not None
                    and use.scope.cls is cls
                    and _is_spread(use.inputs[1])
                    and _is_square(use.inputs[0])
                ),
                None,
            )
            if used is not None and not used.guards:
                yield self.at(
                    code,
                    variance.node,
                    "the variance of a component that has lost its points is 0, and divides in "
                    f"line {used.line}: 0 / 0 is NaN",
                    fixes=(Fix("add a floor to the variance: + 1e-6"),),
                    shown=True,
                )


def _is_weighted_variance(quotient: Value) -> bool:
    """Returns whether it is the sum of weighted squares of differences, divided by a number."""
    total = quotient.inputs[0].core if len(quotient.inputs) > 1 else None
    if total is None or total.op != "sum" or not total.inputs:
        return False
    factors = [*_factors(total.inputs[0])]
    squares = [factor for factor in factors if _is_square(factor)]
    differences = [factor for factor in factors if factor.core.op == "sub"]
    weights = [f for f in factors if f not in squares and f not in differences]
    return bool(weights) and (len(squares) == 1 or len(differences) == 2)


def _factors(value: Value, depth: int = 3) -> Iterator[Value]:
    core = value.core
    if core.op == "mul" and depth > 0:
        for part in core.inputs[:2]:
            yield from _factors(part, depth - 1)
    else:
        yield core


def _is_square(value: Value) -> bool:
    """Returns whether a value is the square of a difference."""
    core = value.core
    if core.op in ("pow", "square") and core.inputs:
        return core.inputs[0].core.op == "sub"
    parts = [part.core for part in core.inputs[:2]] if core.op == "mul" else []
    return len(parts) == 2 and all(part.op == "sub" for part in parts)


def _is_spread(divisor: Value) -> bool:
    """Returns whether a divisor is a variance that was handed in or is kept."""
    if _SPREAD.search(divisor.name.lower()) is None or divisor.lo > 0:
        return False
    while divisor.op in _MOVES and divisor.inputs:
        divisor = divisor.inputs[0]
    return divisor.op in ("", "attribute", "parameter", "buffer")


def _is_floored(code: Code) -> bool:
    """Returns whether a variance of the file is bounded from below somewhere."""
    for bound in code.of(*_FLOORS):
        for part in bound.inputs[:2]:
            if _SPREAD.search(part.name.lower()) or _is_weighted_variance(part.core):
                return True
    return False
