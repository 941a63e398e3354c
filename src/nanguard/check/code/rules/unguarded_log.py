"""``log`` of something that can be 0."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import (
    CodeRule,
    bare,
    is_chance_of_truth,
    is_overlap,
    is_ratio_of_chances,
    operand,
    replaced,
)
from nanguard.check.code.origins import origins
from nanguard.check.code.training_path import is_beside_training, is_evaluation, is_used_only
from nanguard.check.code.value_questions import (
    LARGEST_EPS,
    can_be_zero,
    carries_gradient,
    ends_as_number,
    guarded_by,
    is_clipped,
    is_learned,
    is_made_by_layers,
    is_module_output,
    is_of_time,
    is_only_shown,
    is_open,
    some_module_returns,
    unscaled,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity
from nanguard.source import floors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_PREDICTION = re.compile(r"pred(iction)?s?|[a-z_]+_pred|pred_[a-z]+|y_hat|yhat")
_ABOUT_PROBABILITIES = re.compile(r"entropy|kl|divergence|likelihood|nll|jsd?|mutual|prob|focal")
# Products that a network or its parameters make.
_LEARNED = frozenset({"matmul", "mul", "einsum", "sum", "bmm", "linear"})
# What makes exact zeros of half of what it is given.
_ZEROING = ("relu", "relu6")
_ARTICLES = {"absolute value": "an", "overlap": "an"}
_SIZE = re.compile(r"(^|_)(w|h|wh|widths?|heights?|sizes?)$")


class UnguardedLog(CodeRule):
    """The logarithm of a probability, a ratio or a difference that nothing keeps above 0.

    A prediction that was handed in as it is counts, too: a network's output has no lower bound.

    *Why it breaks a run*: log(0) is -inf and its gradient is infinite. A probability reaches
    exactly 0 by underflow, `1 - p` as soon as p rounds to 1, a ratio with its numerator. Times a
    weight of 0 the infinity becomes NaN.

    Bound it from below (`x.clamp(min=1e-7)`), or stay with log-probabilities: `log_softmax`,
    `logsigmoid`, `torch.xlogy`, `log1p`.
    """

    code = "SRC018"
    name = "unguarded-log"
    severity = Severity.WARNING
    claim = "value"
    seen_in = "https://github.com/pytorch/pytorch/issues/15288"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef kl(p, q):\n    return (p * torch.log(p / q)).sum(-1)\n",
            line=5,
            fixed="import torch\n\n\ndef kl(p, q):\n"
            "    return (p * torch.log((p / q).clamp(min=1e-7))).sum(-1)\n",
        ),
        Fails(
            "import torch\n\n\ndef f(logits):\n    p = torch.sigmoid(logits)\n"
            "    return (1 - p).log()\n",
            line=6,
        ),
        Fails(
            "import torch\n\n\ndef bce_loss(x, y):\n    p = torch.sigmoid(x)\n"
            "    return -((1 - y) * torch.log1p(-p)).mean()\n",
            line=6,
        ),
        Passes(
            "import torch\n\n\ndef bce_loss(x, y):\n    p = torch.sigmoid(x).clamp(max=1 - 1e-6)\n"
            "    return -((1 - y) * torch.log1p(-p)).mean()\n"
        ),
        Passes("import torch\n\n\ndef kl(p, q):\n    return torch.log((p / q).clamp(min=1e-7))\n"),
        Passes("import torch\n\n\ndef f(n):\n    return torch.log((n + 1.0) / (n + 1.0).sum())\n"),
        Passes(
            "import torch\n\n\ndef logit(x, alpha=1e-6):\n    s = alpha + (1 - 2 * alpha) * x\n"
            "    return torch.log(s) - torch.log(1 - s)\n"
        ),
        Passes(
            "import torch\nimport torch.nn.functional as F\n\n\ndef loss(a, b, keep, t):\n"
            "    near = torch.exp(F.cosine_similarity(a, b) / t)\n"
            "    return -torch.log(near / (near + keep.sum())).mean()\n"
        ),
        Fails(
            "import torch\n\n\ndef log_det(w, u):\n    return torch.log(torch.abs(1 + w @ u))\n",
            line=5,
        ),
        Passes(
            "import torch\n\n\ndef log_det(w, u):\n"
            "    return torch.log(torch.abs(1 + w @ u) + 1e-8)\n"
        ),
        Fails(
            "import torch\nfrom torch import nn\n\n\nclass Mixture(nn.Module):\n"
            "    def __init__(self, k):\n        super().__init__()\n"
            "        self.pi = nn.Parameter(torch.ones(k) / k)\n\n"
            "    def forward(self, log_p):\n        return torch.log(self.pi) + log_p\n",
            line=11,
        ),
        Fails(
            "import torch\n\n\ndef mdn_loss(pi, sigma, mu, y):\n"
            "    p = torch.exp(-0.5 * ((y - mu) / sigma) ** 2) / sigma\n"
            "    return -torch.log((pi * p).sum(1)).mean()\n",
            line=6,
        ),
        Fails(
            "import torch\n\n\ndef log_prior(w, wide, narrow, pi):\n"
            "    p = pi * wide.log_prob(w).exp() + (1 - pi) * narrow.log_prob(w).exp()\n"
            "    return torch.log(p).sum()\n",
            line=6,
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef poisson_loss(x, y):\n"
            "    rate = F.relu(x)\n    return (rate - y * torch.log(rate)).mean()\n",
            line=7,
        ),
        Passes(
            "import torch\nimport torch.nn.functional as F\n\n\ndef poisson_loss(x, y):\n"
            "    rate = F.relu(x) + 1e-6\n    return (rate - y * torch.log(rate)).mean()\n",
        ),
        Fails(
            "import math\nimport torch\n\nnet = torch.nn.Sequential(torch.nn.Linear(3, 1), "
            "torch.nn.Sigmoid())\n\n\ndef reward(x):\n    return -math.log(net(x)[0].item())\n",
            line=8,
        ),
        Passes(
            "import math\nimport torch\n\n\ndef entropy(n):\n    return math.log(n)\n",
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef nll_loss(x, y):\n"
            "    sigma = F.softplus(x)\n    return (sigma.log() + (y / sigma) ** 2).mean()\n",
            line=7,
        ),
        Passes(
            "import torch\nimport torch.nn.functional as F\n\n\ndef nll_loss(x, y):\n"
            "    sigma = F.softplus(x) + 1e-4\n    return (sigma.log() + (y / sigma) ** 2).mean()\n"
        ),
        Fails(
            "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.out = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Sigmoid())\n\n"
            "    def forward(self, x):\n        return self.loss(self.out(x), x)\n\n"
            "    def loss(self, p, x):\n        return -(x * torch.log(1 - p - 1e-7)).sum()\n",
            line=13,
        ),
        Passes(
            "import torch\n\n\ndef f(p):\n    safe = torch.where(p > 0, p, torch.ones_like(p))\n"
            "    return (p * safe.log()).sum()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        probable = some_module_returns(code, "softmax")
        both = _logged_on_both_sides(code)
        yield from self._at_minus_one(code)
        yield from self._of_numbers(code)
        for log in code.of("log", "log2", "log10"):
            value = log.inputs[0] if log.inputs else None
            if value is None or guarded_by(value, log.guards):
                continue
            if not can_be_zero(value) and not is_chance_of_truth(value.core):
                continue
            if ends_as_number(code, log.node) or _is_kept_as_table(code, log):
                continue
            of_time, clipped = is_of_time(value), is_clipped(code, log.node)
            if clipped and (of_time or not carries_gradient(value)):
                continue
            made = _made_elsewhere(code, value)
            kind = made or _kind(value, log, outputs_are_probabilities=probable)
            if kind:
                aside = is_beside_training(code, log)
                node = None if not log.grad or is_evaluation(code) else operand(log)
                bound = f".clamp(min={floors.PROBABILITY})"
                edits = (replaced(code, node, f"{bare(code, node)}{bound}"),) if node else ()
                gradient = "" if aside else ", and an infinite gradient"
                message = f"log of {_ARTICLES.get(kind, 'a')} {kind} that can be 0: -inf{gradient}"
                fix = Fix("bound it from below", edits=edits)
                by_hand = is_softmax_by_hand(value.core)
                if by_hand:  # inf / inf is NaN, which no bound changes
                    message, fix = _BY_HAND, _APART
                yield self.at(
                    code,
                    log.node,
                    message,
                    fixes=(fix,),
                    shown=bool(made)
                    or id(_of_side(value)) in both
                    or _is_seen(code, value, kind)
                    or (by_hand and _is_of_learned_scores(code, value.core)),
                    weak=not carries_gradient(value)
                    or of_time
                    or _is_of_sizes(value)
                    or clipped
                    or aside
                    or is_only_shown(code, log),
                )

    def _of_numbers(self, code: Code) -> Iterator[Finding]:
        """Logarithms of Python's own, of a number that a network gives: at 0 they raise."""
        for log in code.of("math.log", "math.log2", "math.log10", "numpy.log"):
            value = log.inputs[0] if log.inputs else None
            if value is None or value.lo > 0 or value.number() is not None:
                continue
            if guarded_by(value, log.guards) or not _is_chance_of_network(code, value):
                continue
            if value.has("padded") or is_evaluation(code) or is_used_only(log):
                continue
            result = "-inf" if log.op == "numpy.log" else "a ValueError"
            message = f"{log.op} of a probability of a network that can be 0: {result} there"
            fix = Fix("bound it from below: max(p, 1e-7), or take logsigmoid of the logit")
            yield self.at(code, log.node, message, fixes=(fix,), claim="code")

    def _at_minus_one(self, code: Code) -> Iterator[Finding]:
        for log in code.of("log1p"):
            value = log.inputs[0].core if log.inputs else None
            if value is None or value.op != "neg" or not value.inputs or value.lo > -1:
                continue
            inner = value.inputs[0]
            power = inner.core.op == "exp" and inner.hi >= 1 and carries_gradient(inner)
            if (_is_chance(inner) or power) and not guarded_by(inner, log.guards):
                yield self.at(
                    code,
                    log.node,
                    "log1p of minus a probability that can be 1: -inf, and an infinite gradient",
                    fixes=(Fix("take logsigmoid(-x) of the logits, or bound it below 1"),),
                    shown=power or inner.core.op in ("softmax", "sigmoid"),
                    weak=is_beside_training(code, log),
                )


_BY_HAND = "log of a softmax that is written out: exp overflows to inf / inf, or underflows to 0"
_APART = Fix(
    "take it apart: log(exp(a) / exp(b).sum()) is a - torch.logsumexp(b, dim); cross_entropy and "
    "log_softmax do the same"
)
_IN_BOUNDS = frozenset({"normalize", "cosine_similarity", "tanh", "sigmoid", "softmax", "clamp"})


def is_softmax_by_hand(core: Value) -> bool:
    """Returns whether it is exp divided by a sum of exp, with no maximum taken off."""
    if core.op != "div" or len(core.inputs) < 2:
        return False
    over, under = (part.core for part in core.inputs[:2])
    if over.op == "sum" and over.inputs:
        over = over.inputs[0].core
    if over.op == "mul":
        over = next((part.core for part in over.inputs if part.core.op == "exp"), over)
    if over.op != "exp" or not over.inputs or over.inputs[0].has("shifted"):
        return False
    return any(part.op == "sum" for part in under.upstream(6)) and any(
        part.op == "exp" for part in under.upstream(12)
    )


def _is_of_learned_scores(code: Code, core: Value) -> bool:
    """Returns whether the exponents are products with learned weights, and nothing bounds them."""
    powers = [part for part in core.inputs[0].upstream(12) if part.op == "exp"]
    parts = [part for power in powers for part in power.upstream(24)]
    if any(part.op in _IN_BOUNDS or part.has("unit", "cosine", "shifted") for part in parts):
        return False
    if any(
        part.op == "matmul" and all(is_made_by_layers(code, side) for side in part.inputs[:2])
        for part in parts
    ):
        return True
    return any(part.op == "parameter" for part in parts) and any(
        part.op in ("matmul", "mul", "linear", "einsum") for part in parts
    )


def _is_kept_as_table(code: Code, log: Value) -> bool:
    """Returns whether a log is worked out once and kept in a buffer, where it is seen at once."""
    for outer in code.ancestors(log.node) if log.node is not None else ():
        if isinstance(outer, ast.stmt):
            return False
        called = outer.func if isinstance(outer, ast.Call) else None
        if getattr(called, "attr", getattr(called, "id", "")) == "register_buffer":
            return True
    return False


def _is_chance_of_network(code: Code, value: Value) -> bool:
    """Returns whether a number is what a softmax or a sigmoid gave, or 1 minus that."""
    core = value.core
    if core.op == "sub" and core.inputs[0].number() == 1:
        value = core.inputs[1]
    if value.core.op in ("softmax", "sigmoid"):
        return True
    return origins(code, value).made_by("softmax", "sigmoid")


def _made_elsewhere(code: Code, value: Value) -> str:
    """Returns what a value is that a caller hands in or a model gives back, if it reaches 0."""
    core = unscaled(value).core
    if core.op in ("softplus", "log1p", "join") and core.has("softplus"):
        return "" if _is_picked_by_size(core) else "softplus"
    if not is_open(core):
        return ""
    found = origins(code, unscaled(value))
    made = {_without_ceiling(code, maker) for maker in found.makers}
    if made & {"softmax", "sigmoid"}:
        return "probability"
    return "softplus" if "softplus" in made else ""


def _is_picked_by_size(core: Value) -> bool:
    """Returns whether it is worked out for the elements alone that a comparison has picked."""
    picked = core.inputs[0] if core.inputs else core
    if picked.op != "getitem" or len(picked.inputs) < 2:
        return False
    asked = picked.inputs[1].core
    return asked.op in ("compare", "gt", "ge", "lt", "le") and any(
        part.core is picked.inputs[0].core for part in asked.inputs
    )


def _without_ceiling(code: Code, maker: Value) -> str:
    """Returns the operation that makes a value; a bound from above alone keeps a 0 a 0."""
    if maker.op in ("clamp", "clamp_max", "minimum") and maker.lo <= 0 and maker.inputs:
        before = origins(code, maker.inputs[0]).makers
        return before[0].op if before else ""
    return maker.op


def _is_of_sizes(value: Value) -> bool:
    """Returns whether it is the ratio of two widths or heights, as targets of boxes are."""
    core = value.core
    if core.op != "div" or len(core.inputs) < 2:
        return False
    return all(_SIZE.search(part.name.lower()) for part in core.inputs[:2])


def _is_chance(value: Value) -> bool:
    """Returns whether a value goes up to exactly 1: a probability, or a share of a sum."""
    core = value.core
    return core.op in ("softmax", "sigmoid") or core.has("probability", "cosine")


def _of_side(value: Value) -> Value:
    """Returns ``p`` of ``p`` and of ``1 - p``."""
    core = value.core
    if core.op == "sub" and len(core.inputs) > 1 and core.inputs[0].number() == 1:
        return core.inputs[1].core
    return core


def _logged_on_both_sides(code: Code) -> set[int]:
    """Returns what is handed in and of which ``log(p)`` and ``log(1 - p)`` are taken: chances."""
    logged = [log.inputs[0] for log in code.of("log") if log.inputs]
    whole = {id(value.core) for value in logged if value.core.op == ""}
    return {id(_of_side(value)) for value in logged if value.core.op == "sub"} & whole


def _is_seen(code: Code, value: Value, kind: str) -> bool:
    """Returns whether an operation is seen that rounds to 0: not if only a name speaks for it."""
    core = _unscaled(value.core)
    if kind in ("variance", "magnitude"):
        return is_learned(code, core)
    if kind == "ratio":
        return _is_seen_ratio(code, value, core)
    if kind == "difference":
        return _is_seen_difference(code, core)
    if kind == "overlap" or is_chance_of_truth(core):
        return True
    if core.op in ("softmax", "sigmoid", "abs", "parameter", *_ZEROING):
        return True
    return _is_mass(core) or _is_mixture(core) or _is_density(core)


def _is_seen_ratio(code: Code, value: Value, core: Value) -> bool:
    over = core.inputs[0].core
    quiet = over.op == "sum" and over.has("sumsq") and is_learned(code, core)
    return quiet or is_ratio_of_chances(core) or _is_weighed_by_itself(code, value)


def _is_seen_difference(code: Code, core: Value) -> bool:
    if core.op == "sub" and core.inputs and core.inputs[0].core.op == "sub":
        core = core.inputs[0].core  # what is taken off as well makes it smaller still
    taken = core.inputs[1].core if len(core.inputs) > 1 else core
    if taken.op in ("pow", "square") and taken.inputs:
        taken = taken.inputs[0].core
    if core.inputs[0].number() != 1:
        return False
    if is_overlap(taken) or _has_no_ceiling(taken):
        return True
    squeezed = ("sigmoid", "softmax", "tanh")
    return taken.op in squeezed or (is_open(taken) and origins(code, taken).made_by(*squeezed))


def _is_trained(parameter: Value) -> bool:
    """Returns whether an optimizer moves a parameter, which it may move to 0 and below."""
    given = parameter.arg(1, "requires_grad")
    return given is None or given.const is not False


def _is_mass(core: Value) -> bool:
    """Returns whether it is the probability of a few classes together, got from a softmax."""
    if core.op == "sum" and core.inputs:
        core = core.inputs[0].core
    if core.op != "matmul" or len(core.inputs) < 2:
        return False
    return any(part.core.op == "softmax" for part in core.inputs[:2])


def _is_density(core: Value, depth: int = 6) -> bool:
    """Returns whether it is made of the exponential of minus a square, which underflows to 0."""
    if depth <= 0 or core.has("padded"):
        return False
    if core.op in ("sum", "mean", "prod") and core.inputs:
        return _is_density(core.inputs[0].core, depth - 1)
    if core.op in ("mul", "div") and len(core.inputs) > 1:
        factors = core.inputs[:2] if core.op == "mul" else core.inputs[:1]
        return any(_is_density(factor.core, depth - 1) for factor in factors)
    if core.op != "exp" or not core.inputs:
        return False
    power = core.inputs[0]
    return power.hi <= 0 and any(part.op in ("pow", "square") for part in power.upstream(6))


def _is_mixture(core: Value) -> bool:
    """Returns whether it is a sum of densities, each taken out of its logarithm by exp."""
    if core.op in ("sum", "mean") and core.inputs:
        core = core.inputs[0].core
        return core.op == "exp" and core.inputs[0].core.op == "log_prob"
    if core.op != "add" or len(core.inputs) < 2 or core.has("padded"):
        return False
    powers = [part for given in core.inputs[:2] for part in given.upstream(4) if part.op == "exp"]
    return len(powers) > 1 and all(power.inputs[0].core.op == "log_prob" for power in powers)


def _is_around_one(value: Value) -> bool:
    """Returns whether it is 1 plus something learned, such as the determinant of a flow."""
    if value.op not in ("add", "sub") or len(value.inputs) < 2:
        return False
    one, other = value.inputs[:2]
    if one.number() != 1:
        one, other = other, one
    return one.number() == 1 and other.core.op in _LEARNED and carries_gradient(other)


def _is_exp_of_cosine(value: Value) -> bool:
    """Returns whether it is the exponential of a cosine over a temperature, which is no 0."""
    if value.op != "exp" or not value.inputs:
        return False
    return any(p.op == "cosine_similarity" or p.has("cosine") for p in value.inputs[0].upstream(6))


def _is_squeezed(value: Value) -> bool:
    """Returns whether it is ``a + (1 - 2 * a) * x``, which keeps ``a`` away from 0 and 1."""
    if value.op != "add" or len(value.inputs) < 2:
        return False
    for margin, scaled in (value.inputs[:2], value.inputs[1::-1]):
        factors = scaled.core.inputs if scaled.core.op == "mul" else ()
        for factor in factors:
            rest = factor.core
            if rest.op == "sub" and rest.inputs[0].number() == 1:
                return any(part.core is margin.core for part in rest.inputs[1].upstream(4))
    return False


def _unscaled(value: Value) -> Value:
    """Returns what a product with a number or a size is a multiple of."""
    if value.op == "mul" and len(value.inputs) > 1:
        for part, other in (value.inputs[:2], value.inputs[1::-1]):
            if other.number() is not None or other.has("size"):
                return part.core
    return value


def _kind_of_quotient(over: Value, under: Value) -> str:
    """Returns ``ratio`` if a quotient reaches 0 with its numerator."""
    constant = over.number() is not None or "default" in over.kinds
    if constant or any(map(_is_exp_of_cosine, over.upstream(10))):
        return ""
    scaled = under.number() is not None or under.has("size") or under.core.op == "floordiv"
    return "" if scaled else "ratio"


def _has_no_ceiling(taken: Value) -> bool:
    """Returns whether a probability is kept away from 0 alone, so that 1 minus it can be 0."""
    bounded = taken.op in ("clamp", "clamp_min", "maximum") and 0 < taken.lo < LARGEST_EPS
    return bounded and taken.hi >= 1


def _is_weighed_by_itself(code: Code, value: Value) -> bool:
    """Returns whether it is the log in ``p * log(p / q)``, which is 0 times -inf where p is 0."""
    over = value.core.inputs[0].core
    node = next((n for n in code.of("log") if n.inputs and n.inputs[0] is value), None)
    factor = code.values.get(code.parents.get(node.node)) if node is not None else None  # type: ignore[arg-type]
    if factor is None or factor.op != "mul" or over.op or over.lo > 0:
        return False
    return any(part.core is over for part in factor.inputs[:2])


def _kind(value: Value, log: Value, *, outputs_are_probabilities: bool) -> str:
    """Returns what it is the log of, if that is something that reaches 0."""
    core = _unscaled(value.core)
    elsewhere = core.scope is not None and core.scope is not log.scope
    if core.op in ("softmax", "sigmoid"):
        return "probability" if is_module_output(core, log) else ""
    if core.op in _ZEROING:
        return "ReLU"
    form = _kind_by_form(core)
    if form:
        return form
    if _is_mass(core) or _is_mixture(core) or _is_density(core):
        return "probability"
    if core.op == "parameter" and _is_trained(core):
        return "learned parameter"
    if core.op == "abs" and _is_around_one(core.inputs[0].core):
        return "absolute value"
    if core.has("exp") or elsewhere or any(part.has("shifted") for part in core.upstream(6)):
        return ""
    if core.op == "div" and len(core.inputs) > 1:
        return _kind_of_quotient(*core.inputs[:2])
    if core.op in ("sub", "rsub") and not core.has("shifted"):
        return "" if any(map(_is_squeezed, core.upstream(8))) else "difference"
    return _kind_by_name(value, core, log, outputs_are_probabilities=outputs_are_probabilities)


def _kind_by_form(core: Value) -> str:
    if is_chance_of_truth(core):
        return "probability"
    if is_overlap(core):
        return "overlap"
    if core.op == "var":
        return "variance"
    of_spectrum = core.op in ("abs", "sqrt") and any(p.op == "stft" for p in core.upstream(12))
    return "magnitude" if of_spectrum else ""


def _kind_by_name(value: Value, core: Value, log: Value, *, outputs_are_probabilities: bool) -> str:
    """Returns what names say that it is the log of."""
    if core.has("probability") or value.has("probability"):
        return "probability"
    scope = log.scope
    about = scope is not None and _ABOUT_PROBABILITIES.search(
        (scope.name + (scope.cls.name if scope.cls else "")).lower()
    )
    if core.op == "" and _PREDICTION.fullmatch(core.name.lower()):
        return "prediction"
    if core.op == "" and outputs_are_probabilities and core.name.endswith("dist"):
        return "probability"
    if about and core.op == "" and core.name in ("p", "q", "pi", "p_hat", "q_hat", "pt", "p_t"):
        return "probability"
    return ""
