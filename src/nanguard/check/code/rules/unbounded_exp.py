"""``exp`` of what a network or an optimizer can push to any height."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, bare, operand, replaced
from nanguard.check.code.operations import written_sigmoid
from nanguard.check.code.origins import origins
from nanguard.check.code.rules.unguarded_log import is_softmax_by_hand
from nanguard.check.code.training_path import is_beside_training, is_never_chosen
from nanguard.check.code.value_questions import (
    carries_gradient,
    guarded_by,
    is_bounded,
    is_kept_in_range,
    is_layer,
    is_learned,
    is_log_scale_of_network,
    is_made_by_layers,
    is_made_by_network,
    is_made_here,
    is_of_time,
    is_only_shown,
    is_open,
    is_rounded,
    is_table,
    returned_as,
    unscaled,
)
from nanguard.check.code.values import SHAPE
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_WHAT = {
    "logscale": "log-scale",
    "logratio": "log-ratio",
    "network": "network output",
    "logits": "logit",
}
_APART = Fix(
    "take logsumexp, which subtracts the maximum first: log(exp(a).sum()) is torch.logsumexp(a, "
    "dim), and log(exp(a) / exp(b).sum()) is a - torch.logsumexp(b, dim)"
)
_SOFTPLUS = Fix("take softplus: log(1 + exp(x)) is F.softplus(x)")
_OFFSET = re.compile(r"(box_|bbox_|pred_|reg_)?(deltas?|offsets?)")
_OTHER_MODEL = re.compile(r"^ref|_ref|teacher|reference|chosen|rejected")
_LOG_SCALE = re.compile(r"log_?(vars?|variance|stds?|sigmas?|scales?)(_|$)")
_BOUNDS_ONE = re.compile(
    rb"(?i)log_?(?:var|std|sigma|scale)[^\n]{0,60}(?:clamp|clip|tanh|sigmoid|min\()"
    rb"|(?:clamp|clip|tanh)_?\([^\n]{0,40}log_?(?:var|std|sigma|scale)|hardtanh"
)
_REFERENCE = re.compile(r"^ref|_ref|reference")
_BEFORE = re.compile(r"old|fixed|behaviou?r|prev|^b_|(^|_)mb_|batch_log|sampl")
_NOW = re.compile(r"(^|_)(now|new|curr(ent)?)(_|$)")
_DENSITY = re.compile(rb"\bNormal\(|\bBeta\(|log_?std|MultivariateNormal|normal_log_density")
# Logarithms of probabilities, the exponential of which is at most 1.
_LOG_CHANCE = re.compile(r"log_?p(s|i|_.*)?|log_?prob(s|_.*)?|log_?pdf|logits_?log_?softmax")
# Numbers that are learned by themselves.
_LEARNED = frozenset({"parameter", "tensor", "full"})
_OF_CHANCES = frozenset({"Categorical", "OneHotCategorical", "Bernoulli"})
_FILLED = frozenset({"zeros", "zeros_like", "ones", "ones_like", "full", "new_zeros"})
_TRUST_REGION = re.compile(r"\b(line_?search|conjugate_grad\w*|fisher_vector\w*|trpo_step)\(")
_LOGS = frozenset({"log", "log_softmax", "logsigmoid", "logsumexp", "math.log", "numpy.log"})
_BOUNDED = frozenset({"tanh", "sigmoid", "softsign", "hardtanh", "hardsigmoid", "erf", "atan"})
_SPEEDS_UP = 4
_BOUND = re.compile(r"bound|min|max|low|high|limit|range|scale")
_SCALES = frozenset({"add", "sub", "rsub", "mul", "neg", "named", "float", "to"})


class UnboundedExp(CodeRule):
    """`exp` of a network output, a log-variance or a log-ratio without an upper bound.

    *Why it breaks a run*: exp overflows at 88.7 in float32 and at 11.1 in float16. A log-variance
    or a log-ratio has no reason to stay below that: one odd batch, one stale policy, one large
    step, and the loss is inf.

    Bound the argument: `logvar.clamp(-30, 20).exp()`, `2 * tanh(s)`, `softplus` in place of exp,
    or subtract the maximum where the result is normalised; `logsumexp` does.
    """

    code = "SRC027"
    name = "unbounded-exp"
    severity = Severity.WARNING
    claim = "value"
    seen_in = "https://github.com/vanderschaarlab/synthcity/issues/331"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef f(logvar):\n    return torch.exp(0.5 * logvar)\n",
            line=5,
            fixed="import torch\n\n\ndef f(logvar):\n"
            "    return torch.exp((0.5 * logvar).clamp(max=20))\n",
        ),
        Fails(
            "import torch\n\n\ndef ratio(logp, old_logp):\n    return (logp - old_logp).exp()\n",
            line=5,
        ),
        Passes("import torch\n\n\ndef f(logvar):\n    return logvar.clamp(-30, 20).exp()\n"),
        Passes(
            "import torch\n\n\ndef f(x):\n    return torch.exp(x - x.max(-1, keepdim=True)[0])\n"
        ),
        Passes("import torch\n\n\ndef f(x):\n    return x.log_softmax(-1).exp()\n"),
        Passes(
            "import torch\n\n\nclass Actor(torch.nn.Module):\n    def __init__(self, bounds):\n"
            "        super().__init__()\n        self.bounds = bounds\n\n"
            "    def forward(self, obs):\n"
            "        mu, log_std = self.trunk(obs).chunk(2, dim=-1)\n"
            "        low, high = self.bounds\n"
            "        log_std = low + 0.5 * (high - low) * (torch.tanh(log_std) + 1)\n"
            "        return log_std.exp()\n"
        ),
        Fails(
            "import torch\n\n\ndef chance_of_edge(dist, r, t):\n"
            "    return 1.0 / (torch.exp((dist - r) / t) + 1.0)\n",
            line=5,
        ),
        Passes("import torch\n\n\ndef draw(log_p):\n    return log_p.exp().multinomial(1)\n"),
        Passes(
            "import torch\nfrom torch.distributions import Categorical\n\n\n"
            "class Policy(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.net = torch.nn.Linear(3, 2)\n\n"
            "    def evaluate(self, s, a):\n"
            "        return Categorical(torch.softmax(self.net(s), -1)).log_prob(a)\n\n\n"
            "def step(policy: Policy, s, a, old_logp):\n"
            "    return torch.exp(policy.evaluate(s, a) - old_logp)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        clamped = _clamped_in_place(code)
        told: set[str] = set()
        by_name = False
        naive = _summed_and_logged(code)
        sigmoids = _of_written_sigmoids(code)
        softplus = _of_written_softplus(code)
        yield from self._of_cosh(code)
        for power in code.of("exp", "expm1", "exp2"):
            value = power.inputs[0] if power.inputs else None
            if value is None or not power.grad or _is_kept_small(code, power, value):
                continue
            by_hand = id(power.node) in sigmoids
            what = _what(code, value, naive=id(power.node) in naive)
            what = "value in a sigmoid that is written out" if by_hand else what
            if id(power.node) in softplus and _is_score(code, value):
                by_hand, what = True, "value in a softplus that is written out"
            if not what or _names(value) & clamped:
                continue
            attribute = value.name if value.core.op == "parameter" else ""
            if attribute and attribute in told:
                continue
            told.add(attribute)
            shown = (
                by_hand
                or is_made_by_network(code, value)
                or _is_layer_by_hand(unscaled(value))
                or is_log_scale_of_network(code, unscaled(value))
                or _is_of_policies(code, value, what)
                or (what == "log-ratio" and _is_between_models(value))
            )
            if not shown and not by_name:  # once for each file: the same value is used again
                by_name = shown = _is_log_scale_by_name(code, unscaled(value))
            by_name = by_name or (shown and what == "log-scale")
            yield self.at(
                code,
                power.node,
                f"exp of a {what} without an upper bound: inf above 88.7 in float32, above 11.1 "
                "in float16",
                fixes=(_SOFTPLUS,)
                if id(power.node) in softplus
                else (_APART,)
                if id(power.node) in naive
                else _fixes(code, power),
                shown=shown,
                weak=_is_hardly_large(code, value, what)
                or (what == "log-ratio" and _is_clipped(code, power))
                or origins(code, unscaled(value)).detached
                or is_of_time(value)
                or is_beside_training(code, power)
                or is_rounded(code, power.node)
                or _is_of_one_layer(code, unscaled(value))
                or is_only_shown(code, power),
            )

    def _of_cosh(self, code: Code) -> Iterator[Finding]:
        """Logarithms of ``cosh``, whose exponential overflows where the logarithm would not."""
        for log in code.of("log"):
            cosh = log.inputs[0].core if log.inputs else None
            if cosh is None or cosh.op != "cosh" or not (cosh.grad and cosh.inputs):
                continue
            if is_bounded(cosh.inputs[0]):
                continue
            yield self.at(
                code,
                cosh.node,
                "cosh of a value without an upper bound: inf above 89 in float32, above 11 in "
                "float16, and its gradient is NaN",
                fixes=(Fix("log(cosh(x)) is x.abs() + F.softplus(-2 * x.abs()) - log(2)"),),
                shown=is_learned(code, cosh.inputs[0]),
                weak=is_beside_training(code, cosh) or is_only_shown(code, log),
            )


def _is_kept_small(code: Code, power: Value, value: Value) -> bool:
    """Returns whether something bounds a value, or nothing is learned in it."""
    if is_bounded(value) or is_table(value) or is_made_here(value) or not carries_gradient(value):
        return True
    if is_kept_in_range(_as_it_is(code, unscaled(value))):
        return True
    return guarded_by(value, power.guards) or _is_scaled_from_bounded(code, value)


def _as_it_is(code: Code, value: Value) -> Value:
    """Returns what makes a value, without what is made under an option that is always off."""
    while value.op in SHAPE and value.inputs:
        parts = value.inputs[:2] if value.op == "join" else value.inputs[:1]
        taken = [part for part in parts if not is_never_chosen(code, part.core.node)]
        value = (*taken, parts[0])[0]
    return value


def _what(code: Code, value: Value, *, naive: bool) -> str:
    """Returns what it is the exponential of, if that has no bound; else nothing."""
    inner = unscaled(value)
    what = next((word for kind, word in _WHAT.items() if value.has(kind)), "")
    if not what and value.core.op == "" and _OFFSET.fullmatch(value.core.name.lower()):
        what = "predicted offset"
    if not what and naive:
        what = "value that is summed and logged"
    by_hand = _is_layer_by_hand(inner)
    if not what and (by_hand or (is_open(inner.core) and is_made_by_network(code, inner))):
        what = "network output"
    if what == "log-ratio" and _is_of_chances(code, value):
        return ""
    if not what and inner.core.op == "parameter" and _is_multiplied(value):
        what = "multiple of a learned number"
    if what != "log-ratio" and _LOG_CHANCE.fullmatch(value.name.lower()):
        return ""
    return "" if what and _is_of_logs(code, inner) else what


def _is_of_one_layer(code: Code, value: Value) -> bool:
    """Returns whether one layer makes it, here or in the modules that return it by its name.

    What a layer makes of a ``tanh`` or of a normalised vector is as large as its weights, of which
    very many would have to grow together.
    """
    if _is_layer_of_unit(value):
        return True
    source = value.core
    if code.project is None or source.op != "part" or not value.name:
        return False
    returned = [*returned_as(code.project, value.name)]
    return bool(returned) and all(map(_is_layer_of_unit, returned))


def _is_layer_of_unit(value: Value) -> bool:
    """Returns whether a value is the output of one layer whose inputs lie between -1 and 1."""
    queue, layers = [value], 0
    for _ in range(24):
        if not queue:
            break
        part = queue.pop()
        if part.lo >= -1 and part.hi <= 1:
            continue
        if is_layer(part):
            given = part.inputs[1 if part.op == "call" else 0 :]
            if not given or not all(one.lo >= -1 and one.hi <= 1 for one in given):
                return False
            layers += 1
        elif part.op in SHAPE and part.inputs:
            queue += part.inputs if part.op == "join" else part.inputs[:1]
        else:
            return False
    return layers > 0 and not queue


def _is_multiplied(value: Value) -> bool:
    """Returns whether a value is some number times another one, which speeds its learning up."""
    core = value.core
    return core.op == "mul" and any((part.number() or 0) >= _SPEEDS_UP for part in core.inputs)


def _is_layer_by_hand(value: Value) -> bool:
    """Returns whether it is the product of a module's weight and what came in."""
    core = value.core
    if core.op == "add" and core.inputs:  # the bias
        core = core.inputs[0].core
    given = [part for part in core.inputs if part.const is None]
    if core.op not in ("matmul", "linear", "einsum") or len(given) < 2:
        return False
    return sum(part.core.op == "parameter" for part in given) == 1


def _is_of_logs(code: Code, value: Value) -> bool:
    """Returns whether it is a logarithm or a table wherever it comes from."""
    if not is_open(value.core):
        return False
    made = origins(code, value).makers
    return bool(made) and all(maker.op in _LOGS or is_table(maker) for maker in made)


def _is_scaled_from_bounded(code: Code, value: Value) -> bool:
    """Returns whether it is a ``tanh`` or the like, moved and scaled by settings of the module."""
    queue, seen, bounded = [value], 0, False
    while queue and seen < 24:
        part = queue.pop()
        seen += 1
        if part.op in _BOUNDED:
            bounded = True
        elif part.op in _SCALES or part.op in SHAPE:
            queue += part.inputs
        elif is_open(part) and _is_of_bounded(code, part):
            bounded = True
        elif part.const is None and not _is_setting(part):
            return False
    return bounded and not queue


def _is_of_bounded(code: Code, value: Value) -> bool:
    """Returns whether every caller hands in a ``tanh`` or the like."""
    made = origins(code, value).makers
    return bool(made) and all(maker.op in _BOUNDED for maker in made)


def _is_setting(value: Value) -> bool:
    return value.op in ("attribute", "part", "self", "parameter") or bool(
        _BOUND.search(value.name.lower())
    )


def _is_of_policies(code: Code, value: Value, what: str) -> bool:
    """Returns whether it is the ratio of two densities over actions that are numbers.

    A probability is at most 1, and what was drawn had a fair one; a density has no such bounds.
    """
    if what != "log-ratio" or value.core.op != "sub":
        return False
    now, before = value.core.inputs[:2]
    old = any(_BEFORE.search(part.name.lower()) for part in before.upstream(4))
    old = old or any(_NOW.search(part.name.lower()) for part in now.upstream(4))
    old = old or (bool(now.name) and now.name == before.name)  # of the network, and of the buffer
    if not now.has("logprob") or not old:
        return False
    if code.project is not None:
        return code.project.some_file_has(_DENSITY)
    return _DENSITY.search(code.text.content.encode()) is not None


def _is_log_scale_by_name(code: Code, value: Value) -> bool:
    """Returns whether a log-variance is handed in, and no file of the project bounds one.

    A number that is learned by itself moves slowly; what a network gives for each input need not.
    """
    core = value.core
    if core.op not in ("", "part", "field", "element") or not _LOG_SCALE.fullmatch(
        core.name.lower()
    ):
        return False
    if any(maker.op in _LEARNED for maker in origins(code, core).makers):
        return False
    if code.project is None:
        return _BOUNDS_ONE.search(code.text.content.encode()) is None
    return not code.project.some_file_has(_BOUNDS_ONE)


def _is_between_models(value: Value) -> bool:
    """Returns whether a reference's log-probability is the larger one, which nothing bounds."""
    core = value.core
    if core.op != "sub" or len(core.inputs) < 2 or not core.inputs[1].has("logprob"):
        return False
    over, under = (part.name.lower() for part in core.inputs[:2])
    return _REFERENCE.search(over) is not None and _REFERENCE.search(under) is None


def _is_of_chances(code: Code, value: Value) -> bool:
    """Returns whether a log-ratio is of a Categorical made of probabilities.

    It keeps them 1e-7 away from 0 and from 1, so that no ratio of two is above e^16.
    """
    if value.core.op != "sub":
        return False
    made = [maker for maker in origins(code, value.core.inputs[0]).makers if maker.op == "log_prob"]
    return bool(made) and all(_is_of_clamped_chances(code, maker) for maker in made)


def _is_of_clamped_chances(code: Code, log_prob: Value) -> bool:
    """Returns whether a log-probability is of a Categorical, which was given probabilities."""
    drawn_from = origins(code, log_prob.inputs[0]).makers
    return bool(drawn_from) and all(
        maker.op == "new"
        and maker.path.rpartition(".")[2] in _OF_CHANCES
        and "logits" not in maker.keywords
        for maker in drawn_from
    )


def _is_clipped(code: Code, power: Value) -> bool:
    """Returns whether a ratio is bounded beside its use as it is, as PPO does."""
    return any(
        bound.scope is power.scope and any(part.node is power.node for part in bound.upstream(12))
        for bound in code.of("clamp", "clip", "clamp_max", "minimum")
    )


def _is_hardly_large(code: Code, value: Value, what: str) -> bool:
    """Returns whether it is one learned number, or a ratio for what was drawn by a policy."""
    if any(part.op in _LEARNED for part in value.upstream(5)):
        return True
    if _is_learned_elsewhere(code, value):
        return True
    held = value.core.node if value.core.op == "attribute" else None
    if isinstance(held, ast.Attribute) and isinstance(held.value, ast.Attribute):
        return True  # what a module or a schedule keeps, and no network has made for this batch
    # Scales that are learned by themselves, moved by a temperature or picked by a class.
    if value.has("logscale") and any(part.op == "parameter" for part in value.upstream(24)):
        return not any(part.has("network") for part in value.upstream(24))
    if what == "log-ratio" and _bounds_its_steps(code):
        return True
    if what != "log-ratio" or _is_of_policies(code, value, what):
        return False
    summed = any(part.op in ("sum", "cumsum") for part in value.upstream(16))
    other = any(_OTHER_MODEL.search(part.name.lower()) for part in value.upstream(16))
    return not summed and not other


def _bounds_its_steps(code: Code) -> bool:
    """Returns whether a file keeps each step of a policy within a divergence, and undoes others."""
    return _TRUST_REGION.search(code.text.content.lower()) is not None


def _is_learned_elsewhere(code: Code, value: Value) -> bool:
    """Returns whether a module gives back numbers that are learned by themselves, and no more."""
    makers = origins(code, unscaled(value)).makers
    return bool(makers) and all(_is_only_learned(code, maker) for maker in makers)


def _is_only_learned(code: Code, maker: Value) -> bool:
    """Returns whether parameters go into a value, and nothing that comes from elsewhere."""
    queue, learned = [maker], False
    for _ in range(30):
        if not queue:
            break
        part = queue.pop()
        if part.op == "parameter":
            learned = True
        elif part.has("network") or part.op in ("matmul", "linear"):
            return False
        elif is_open(part):
            if not all(made.op in _FILLED for made in origins(code, part).makers):
                return False
        elif part.op not in _FILLED:
            queue += part.inputs
    return learned and not queue


def _summed_and_logged(code: Code) -> set[int]:
    """Returns the exponentials of a log-sum-exp that is written out, unshifted."""
    found: set[int] = set()
    for log in code.of("log", "log1p"):
        total = log.inputs[0].core if log.inputs else None
        if log.op == "log1p" and total is not None and total.op == "exp":
            found.add(id(total.node))  # a softplus that is written out
        if total is not None and is_softmax_by_hand(total):
            found |= {id(part.node) for part in total.upstream(24) if part.op == "exp"}
        adds = total is not None and total.op == "add" and len(total.inputs) > 1
        if total is not None and adds and total.inputs[0].number() is not None:
            total = total.inputs[1].core  # 1 + the sum: the exponential of 0 is in it
        if total is not None and total.op in ("sum", "cumsum", "mean") and total.inputs:
            found |= {id(part.node) for part in total.inputs[0].upstream(6) if part.op == "exp"}
    return found


def _of_written_softplus(code: Code) -> set[int]:
    """Returns the exponentials in ``log(1 + exp(x))``, whose gradient is inf / inf there."""
    found: set[int] = set()
    for log in code.of("log"):
        total = log.inputs[0].core if log.inputs else None
        if total is not None and total.op == "add" and len(total.inputs) > 1:
            numbers = [part.number() for part in total.inputs[:2]]
            if 1 in numbers:
                power = total.inputs[1 - numbers.index(1)].core
                found |= {id(power.node)} if power.op == "exp" else set()
    return found


def _is_score(code: Code, value: Value) -> bool:
    """Returns whether it is what a layer makes, with a sign or a label for a factor."""
    core = unscaled(value).core
    if core.op == "mul" and len(core.inputs) > 1:
        parts = [part for part in core.inputs[:2] if not unscaled(part).has("labels")]
        core = unscaled(parts[0]).core if len(parts) == 1 else core
    return is_made_by_layers(code, core)


def _of_written_sigmoids(code: Code) -> set[int]:
    """Returns the exponentials in ``1 / (1 + exp(x))``, whose gradient is 0 times inf there."""
    found: set[int] = set()
    for quotient in code.of("div"):
        if len(quotient.inputs) > 1 and quotient.inputs[0].number() == 1:
            power = written_sigmoid(quotient.inputs[1])
            if power is not None:
                found.add(id(power.node))
    return found


def _names(value: Value) -> set[str]:
    return {part.name.strip("_") for part in value.upstream(8) if part.name}


def _clamped_in_place(code: Code) -> set[str]:
    """Returns the names of what is kept in range elsewhere in the file."""
    found: set[str] = set()
    for bound in code.of("clamp", "clamp_max"):
        kept = bound.name.endswith("_") or (bool(bound.inputs) and _is_kept(code, bound))
        if kept and bound.inputs and is_bounded(bound):
            names = {part.name for part in bound.inputs[0].upstream(4) if part.name}
            found |= {name.strip("_") for name in names}
    return found - {"data", "self"}


def _is_kept(code: Code, bound: Value) -> bool:
    """Returns whether an attribute is given its own value, clamped."""
    statement = code.statement_of(bound.node) if bound.node is not None else None
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    given = bound.inputs[0].core.name
    return any(isinstance(t, ast.Attribute) and t.attr == given for t in targets)


def _fixes(code: Code, power: Value) -> tuple[Fix, ...]:
    node = operand(power)
    title = "bound the argument from above"
    if node is None:
        return (Fix(title),)
    return (Fix(title, edits=(replaced(code, node, f"{bare(code, node)}.clamp(max=20)"),)),)
