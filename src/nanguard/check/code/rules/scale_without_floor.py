"""The scale of a distribution that can be 0."""

from __future__ import annotations

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
_SCALED = dict.fromkeys(("Normal", "LogNormal", "Laplace", "Cauchy", "Gumbel"), (1, "scale"))
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
        for used in code.of("log_prob", "call"):
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
    return call.inputs[:2] if call.path.endswith("kl_divergence") else ()


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
