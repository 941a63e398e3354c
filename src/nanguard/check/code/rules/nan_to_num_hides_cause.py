"""NaN in activations is replaced inside a model."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.nan_checks import Conditions, asks_nan, cleaning_hook
from nanguard.check.code.training import Training, ValueRoles, label
from nanguard.check.code.training_path import is_called_without_gradient
from nanguard.check.code.value_questions import is_made_by_network
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Function
    from nanguard.check.code.values import Value

_FIX = Fix(
    "take it out and mend the operation that makes the NaN: its gradient is NaN all the same"
)
_MESSAGE = "NaN in activations is replaced: its cause and its gradient stay"
_IN_BACKWARD = "NaN in gradients is replaced on the way back: the step goes on without its cause"
_NOT_FORWARD = re.compile(
    r"^(__init__|_?init|reset|load|save|log|val|test|predict|metric|plot|eval)|grad"
)
_DATA = frozenset({"element", "field", "enumerate", "zip", ""})
_PREDICTION = re.compile(r"(^|_)(pred\w*|logits?|out(put)?s?|recon\w*|hidden|features?)($|_)")
_MOVES = frozenset({"getitem", "part", "named", "join", "attribute"})


class NanToNumHidesCause(CodeRule):
    """`nan_to_num` on the activations of a model, in its forward.

    *Why it breaks a run*: the value is replaced, its gradient is not: backward through the
    operation that made the NaN (a softmax over an empty row, a division by zero) is NaN as before.
    Where the gradient happens to be zero, the fault stays, and every check that would have named
    the operation sees healthy numbers.

    Fix the operation: mask rows before the softmax, add an eps to the divisor. Filling gaps in
    inputs and labels is fine.
    """

    code = "SRC010"
    name = "nan-to-num-hides-cause"
    severity = Severity.WARNING
    seen_in = "https://github.com/microsoft/unilm/issues/1642"
    examples: ClassVar = (
        Fails(
            "import torch\nfrom torch import nn\n\n\nclass Attention(nn.Module):\n"
            "    def forward(self, scores, v):\n        w = scores.softmax(-1)\n"
            "        return torch.nan_to_num(w) @ v\n",
            line=8,
        ),
        Fails(
            "import torch\nfrom torch import nn\n\n\ndef attend(q, k, v):\n"
            "    w = torch.softmax(q @ k.mT, -1)\n    w = w.masked_fill(torch.isnan(w), 0.0)\n"
            "    return w @ v\n\n\nclass Block(nn.Module):\n    def forward(self, x):\n"
            "        return attend(x, x, x)\n",
            line=7,
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef get_loss(pred, target):\n"
            "    if torch.isnan(pred).any():\n        pred = torch.nan_to_num(pred, nan=0.0)\n"
            "    return F.mse_loss(pred, target)\n",
            line=7,
        ),
        Passes(
            "import torch\nimport torch.nn.functional as F\n\n\ndef get_loss(pred, target):\n"
            "    if torch.isnan(target).any():\n        target = torch.nan_to_num(target)\n"
            "    return F.mse_loss(pred, target)\n"
        ),
        Passes(
            "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n"
            "    def forward(self, x):\n        known = ~torch.isnan(x)\n"
            "        x = torch.nan_to_num(x)\n        return self.body(torch.cat([x, known], -1))\n"
        ),
        Passes(
            "import torch\n\n\ndef clean(frame):\n"
            "    return torch.nan_to_num(torch.as_tensor(frame.values))\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        training = Training.of(code)
        roles = ValueRoles.of(code)
        for hook in training.called("register_forward_hook", "register_module_forward_hook"):
            if hook.node is not None and cleaning_hook(hook):
                yield self.at(code, hook.node, _MESSAGE, fixes=(_FIX,))
        for node in _under_conditions(code, training):
            yield self.at(code, node, _MESSAGE, fixes=(_FIX,))
        for value in code.of("nan_to_num", "masked_fill", "where", "setitem"):
            hidden = _hidden(value)
            if hidden is None or value.node is None or not value.grad or value.scope is None:
                continue
            if _is_in_backward(value.scope) and not hidden.has("labels"):
                yield self.at(code, value.node, _IN_BACKWARD, fixes=(_FIX,))
                continue
            if _mends_own_quotient(hidden) or is_called_without_gradient(code, value.scope):
                continue
            if _runs_in_forward(training, value.scope) and _is_activation(
                code, roles, hidden, value
            ):
                weak = not is_made_by_network(code, hidden) and not _is_of_loss(training, value)
                yield self.at(code, value.node, _MESSAGE, fixes=(_FIX,), weak=weak)


def _is_of_loss(training: Training, value: Value) -> bool:
    """Returns whether a quotient is mended in what the modules of losses call."""
    scope = value.scope
    if scope is None or not any(part.op == "div" for part in value.upstream(8)):
        return False
    classes = [call.scope.cls for call in training.callers(scope) if call.scope is not None]
    return any(cls is not None and "loss" in cls.name.lower() for cls in classes)


def _is_in_backward(scope: Function) -> bool:
    """Returns whether it is the way back of a function of autograd."""
    bases = scope.cls.bases if scope.cls is not None else ()
    return scope.name == "backward" and any(base.endswith("autograd.Function") for base in bases)


def _under_conditions(code: Code, training: Training) -> Iterator[ast.AST]:
    """Yields where NaN of a prediction is looked for, and replaced where it was found."""
    for test in Conditions.of(code).tests:
        if not (_runs_in_forward(training, test.function) or "loss" in test.function.name.lower()):
            continue
        asked = {label(c.subject): c.subject for c in test.checks if "nan" in c.sees and c.bad}
        for statement in test.when_bad:
            value = code.values.get(statement.value) if isinstance(statement, ast.Assign) else None
            if value is None or value.op != "nan_to_num" or not value.inputs or not value.grad:
                continue
            subject = asked.get(label(value.inputs[0]))
            if subject is not None and _is_predicted(subject):
                yield statement


def _is_predicted(value: Value) -> bool:
    """Whether a network has made a value, by what is seen of it or by its name."""
    if any(part.has("network") or part.op == "call" for part in value.upstream(6)):
        return not value.has("labels", "loss")
    return _PREDICTION.search(value.name.lower()) is not None


def _hidden(value: Value) -> Value | None:
    """The tensor whose NaN an operation replaces."""
    if value.op == "nan_to_num":
        return value.inputs[0] if value.inputs else None
    if value.op == "where":
        kept = value.inputs[1:3]
        if len(kept) < 2 or not asks_nan(value.inputs[0]):
            return None
        return next((part for part in kept if part.number() is None and part.lo != part.hi), None)
    return value.inputs[0] if len(value.inputs) > 1 and asks_nan(value.inputs[1]) else None


def _mends_own_quotient(value: Value) -> bool:
    """Whether it is the sign of a number, ``x / abs(x)``, which is set where that is 0."""
    quotient = value.core
    under = quotient.inputs[1].core if quotient.op == "div" and len(quotient.inputs) > 1 else None
    return under is not None and under.op == "abs" and bool(under.inputs)


def _runs_in_forward(training: Training, function: Function, depth: int = 3) -> bool:
    cls = function.cls
    if cls is not None and cls.is_module():
        return not _NOT_FORWARD.search(function.name)
    if not depth:
        return False
    callers = [call.scope for call in training.callers(function) if call.scope is not None]
    return any(_runs_in_forward(training, caller, depth - 1) for caller in callers)


def _is_activation(code: Code, roles: ValueRoles, value: Value, where: Value) -> bool:
    given = (made for made in value.upstream(8) if not made.op)
    if any(made.has("labels") for made in given) or roles.role(value) or _is_detached(value):
        return False
    if any(made.op == "grad" or "grad" in made.name.lower() for made in value.upstream(24)):
        return False
    made = value
    while made.op in _MOVES and made.inputs:
        made = made.inputs[0]
    computed = made.core
    if computed.op in _DATA or computed.op == "self":
        return False
    # Where a function asks for NaN by itself, gaps in the data are meant.
    asked = [v for v in code.of("isnan") if v.scope is where.scope and v.inputs]
    if where.op == "nan_to_num" and label(value):
        return not any(label(v.inputs[0]) == label(value) for v in asked)
    return True


def _is_detached(value: Value) -> bool:
    return any(made.op in ("detach", "item", "numpy") for made in value.upstream(6))
