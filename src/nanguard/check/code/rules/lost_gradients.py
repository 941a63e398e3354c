"""Losses through which no gradient comes back: above a bound, or at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.training import Training, ValueRoles, losses_of
from nanguard.check.code.value_questions import carries_gradient, is_learned, is_number
from nanguard.check.code.values import SHAPE
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_FIX = Fix(
    "take the bound away and clip gradients instead: "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
)


class LossClamped(CodeRule):
    """A loss is clamped to a maximum before backward.

    *Why it breaks a run*: above the bound a clamp is flat and its gradient is exactly zero. The
    batches that are worst teach nothing, a model that starts above the bound never starts, and NaN
    passes the clamp unchanged.

    Clip the gradients (`clip_grad_norm_`), which keeps their direction, or use a loss that grows
    more slowly, such as `smooth_l1_loss`. A lower bound, as in free bits, is fine.

    Logits that are clamped to some range in front of `binary_cross_entropy_with_logits` bound the
    loss in the same way: a discriminator that is sure of what is wrong gets no gradient. That loss
    is stable without it.
    """

    code = "SRC011"
    name = "loss-clamped"
    severity = Severity.WARNING
    seen_in = "https://github.com/Alibaba-MIIL/ASL/issues/106"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef step(model, x, opt):\n    loss = model(x).mean()\n"
            "    loss = torch.clamp(loss, max=10.0)\n    loss.backward()\n    opt.step()\n",
            line=6,
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef criterion(logits, y):\n"
            '    losses = F.cross_entropy(logits, y, reduction="none")\n'
            "    return torch.minimum(losses, torch.tensor(5.0)).mean()\n",
            line=7,
        ),
        Fails(
            "import torch.nn.functional as F\n\n\ndef adv_loss(logits, wanted):\n"
            "    logits = logits.clamp(min=-10, max=10)\n"
            "    return F.binary_cross_entropy_with_logits(logits, wanted)\n",
            line=5,
        ),
        Passes(
            "import torch.nn.functional as F\n\n\ndef adv_loss(logits, wanted):\n"
            "    logits = logits.clamp(min=-100, max=100)\n"
            "    return F.binary_cross_entropy_with_logits(logits, wanted)\n"
        ),
        Passes(
            "import torch\n\n\ndef draw(logits):\n"
            "    return torch.sigmoid(logits.clamp(min=-10, max=10)).bernoulli()\n"
        ),
        Passes(
            "import torch\n\n\ndef step(model, x, opt, free_bits):\n    kl_loss = model(x)\n"
            "    loss = kl_loss.clamp(min=free_bits).sum()\n    loss.backward()\n"
        ),
        Passes(
            "import torch\nimport torch.nn.functional as F\n\n\ndef perplexity(logits, y):\n"
            "    loss = F.cross_entropy(logits, y)\n    return loss.clamp(max=20.0).exp()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        yield from self._of_clamped_logits(code)
        roles = ValueRoles.of(code)
        for value in code.of("clamp", "clamp_max", "minimum", "min", "hardtanh"):
            if value.node is None or not value.grad or not value.inputs:
                continue
            if _never_reached(value) or any(is_number(part) for part in value.inputs):
                continue
            if not carries_gradient(value):
                continue
            if _bounds_above(value) and _is_loss(roles, value) and roles.is_trained_on(value):
                message = "a clamped loss has no gradient above its bound"
                yield self.at(code, value.node, message, fixes=(_FIX,))

    def _of_clamped_logits(self, code: Code) -> Iterator[Finding]:
        for loss in code.of("binary_cross_entropy_with_logits"):
            logits = loss.inputs[0] if loss.inputs else None
            while logits is not None and logits.op == "named" and logits.inputs:
                logits = logits.inputs[0]
            if logits is None or logits.op not in ("clamp", "clip") or not loss.grad:
                continue
            bounds = [logits.arg(1, "min"), logits.arg(2, "max")]
            numbers = [bound.number() for bound in bounds if bound is not None]
            given = logits.inputs[0]
            if len(numbers) < 2 or not carries_gradient(given):
                continue
            if all(n is not None and abs(n) <= _FAR for n in numbers) and given.hi > _FAR:
                yield self.at(
                    code,
                    logits.node,
                    "a clamped logit has no gradient beyond its bounds, where the loss is largest",
                    fixes=(Fix("take the bounds away: this loss is stable without them"),),
                )


# Beyond this a logit means certainty in float32 too.
_FAR = 20


def _is_loss(roles: ValueRoles, value: Value) -> bool:
    return any(roles.is_loss(part) for part in value.inputs[:2]) or _is_in_a_loss(value)


def _is_in_a_loss(value: Value) -> bool:
    """Whether it is an error that a loss of the file has worked out."""
    scope = value.scope
    if scope is None or not value.inputs[0].has("sumsq"):
        return False
    names = f"{scope.name} {scope.cls.name if scope.cls is not None else ''}".lower()
    return "loss" in names or "criterion" in names


def _never_reached(value: Value) -> bool:
    """Whether the loss stays below the bound anyway."""
    bound = value.arg(1 if value.op == "clamp_max" else 2, "max")
    number = bound.number() if bound is not None else None
    return value.op.startswith("clamp") and number is not None and value.inputs[0].hi <= number


def _bounds_above(value: Value) -> bool:
    if value.op == "clamp_max":
        return True
    if value.op == "clamp":
        bound = value.arg(2, "max")
        return bound is not None and bound.name != "None"
    if value.op == "hardtanh":
        return True
    # The smaller of two tensors is a choice; the smaller of a tensor and a number is a bound.
    return len(value.inputs) == 2 and any(part.lo == part.hi for part in value.inputs)


# What a loss may be a multiple, a part or a mean of.
_ON_TOP = SHAPE | {"mean", "sum", "mul", "div", "neg", "add", "sub"}
_COPIES = frozenset({"tensor", "FloatTensor", "Tensor"})
_CHOOSES = frozenset({"argmax", "compare", "gt", "ge", "lt", "le", "round", "sign"})
_LOSSES = frozenset(
    {"mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
     "binary_cross_entropy_with_logits", "cross_entropy", "nll_loss", "kl_div"}
)  # fmt: skip


class LossCutFromGraph(CodeRule):
    """A loss, or a term of one, that is a copy: `torch.tensor(losses).mean()`, or of an `argmax`.

    *Why it breaks a run*: `torch.tensor` and `Variable(..., requires_grad=True)` make a new tensor
    that knows nothing of the model, and an `argmax` or a comparison has no gradient. The number is
    shown, added to the loss and never made smaller; if it is all of the loss, nothing is trained.

    Put tensors together with `torch.stack(losses)`, and compute losses from probabilities or
    logits, before anything is chosen from them.
    """

    code = "SRC056"
    name = "loss-cut-from-graph"
    severity = Severity.WARNING
    seen_in = "https://github.com/Kostis-S-Z/exploring_meta/issues/16"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef train(net: torch.nn.Linear, loader, opt):\n"
            "    net = torch.nn.Linear(3, 3)\n    for xs in loader:\n        losses = []\n"
            "        for x in xs:\n            losses.append(net(x).mean())\n"
            "        loss = torch.tensor(losses, requires_grad=True).mean()\n"
            "        loss.backward()\n        opt.step()\n",
            line=10,
        ),
        Passes(
            "import torch\n\n\ndef train(net: torch.nn.Linear, loader, opt):\n"
            "    net = torch.nn.Linear(3, 3)\n    for xs in loader:\n        losses = []\n"
            "        for x in xs:\n            losses.append(net(x).mean())\n"
            "        loss = torch.stack(losses).mean()\n"
            "        loss.backward()\n        opt.step()\n"
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\nnet = torch.nn.Linear(3, 3)\n\n\n"
            "def train(loader, opt):\n    for x, y in loader:\n"
            "        out = net(x)\n        loss = F.cross_entropy(out, y)\n"
            "        loss = loss + F.mse_loss(out.argmax(1).float(), y.float())\n"
            "        loss.backward()\n        opt.step()\n",
            line=11,
        ),
        Passes(
            "import torch\nimport torch.nn.functional as F\n\nnet = torch.nn.Linear(3, 3)\n\n\n"
            "def train(loader, opt):\n    for x, y in loader:\n"
            "        out = net(x)\n        loss = F.cross_entropy(out, net(y).argmax(1))\n"
            "        loss.backward()\n        opt.step()\n"
        ),
        Passes(
            "import torch\n\n\ndef train(net, loader, opt):\n    for x in loader:\n"
            "        loss = net(x).mean() * torch.tensor([0.5, 1.0])\n"
            "        loss.sum().backward()\n        opt.step()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        seen: set[int] = set()
        for loss in _trained_on(code):
            for term in _terms(loss):
                what = _cut_by(code, term)
                if what and term.node is not None and id(term.node) not in seen:
                    seen.add(id(term.node))
                    message = f"this term of the loss has no gradient: {what}"
                    fix = Fix("put tensors together with torch.stack; choose nothing before a loss")
                    yield self.at(code, term.node, message, fixes=(fix,))


def _trained_on(code: Code) -> Iterator[Value]:
    """Yields what backward passes start from, and what losses of the file give back."""
    for backward in Training.of(code).backwards:
        yield from losses_of(backward)
    for function in code.functions:
        owner = function.cls.name if function.cls is not None and function.name == "forward" else ""
        if "loss" in (owner or function.name).lower():
            yield from function.returns


def _terms(loss: Value) -> Iterator[Value]:
    """Yields the terms that a loss is made of, without factors and means."""
    queue, seen = [loss], set[int]()
    while queue and len(seen) < 48:
        part = queue.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if part.op in _ON_TOP and part.op not in _COPIES and not part.items:
            several = part.op in ("add", "sub", "join")
            queue += part.inputs[:2] if several else part.inputs[:1]


def _cut_by(code: Code, term: Value) -> str:
    """Returns what cuts a term off from the model; nothing if it is not cut off."""
    given = term.inputs[0] if term.inputs else None
    if given is None or not term.grad:
        return ""
    asks = term.keywords.get("requires_grad")
    is_leaf = asks is not None and asks.const is True
    if term.op in _COPIES or (
        term.op == "as_tensor" and is_leaf and term.path.endswith("Variable")
    ):
        parts = [*(given.items or ()), given]
        listed = given.items is not None or any(p.op == "appended" for p in given.upstream(6))
        if (is_leaf or listed) and any(is_learned(code, part) for part in parts):
            return f"{term.path.rpartition('.')[2] or term.op} makes a new tensor"
    if term.op in _LOSSES:
        chosen = given
        while chosen.op in SHAPE and chosen.op not in ("join", "detach", "data") and chosen.inputs:
            chosen = chosen.inputs[0]
        if chosen.op in _CHOOSES and chosen.inputs and is_learned(code, chosen.inputs[0]):
            other = any(is_learned(code, part) for part in term.inputs[1:2])
            name = _CALLED.get(chosen.op, chosen.op)
            return "" if other else f"it is computed from what {name} has chosen"
    return ""


_CALLED = dict.fromkeys(("compare", "gt", "ge", "lt", "le"), "a comparison")
