"""A loss that is not finite is replaced, and training goes on."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.nan_checks import Conditions, asks, chooses
from nanguard.check.code.origins import calls_of
from nanguard.check.code.training import Training, ValueRoles, is_backward, label
from nanguard.check.code.value_questions import ends_as_number, is_number
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.nan_checks import Test
    from nanguard.check.code.scopes import Function
    from nanguard.check.code.values import Value

_FIX = Fix(
    "skip the step when the loss is not finite (on all ranks together), count the skips, and look "
    "for the operation that made it"
)


class NanLossReplaced(CodeRule):
    """A loss that is not finite is replaced by zeros, a constant or `nan_to_num`, then trained on.

    *Why it breaks a run*: the curve looks healthy while the optimizer steps with gradients of zero
    or of nothing: moments decay, weight decay applies, and the fault that made the NaN comes back
    on every such batch. `nan_to_num` and `where` do not even stop the NaN: its gradient passes.

    Skip the step, count the skips, and find where the value comes from. Replacing a value that is
    only shown is fine.
    """

    code = "SRC009"
    name = "nan-loss-replaced"
    severity = Severity.WARNING
    seen_in = "https://github.com/fredzzhang/pvic/issues/53"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef step(model, x, opt):\n    loss = model(x).mean()\n"
            "    if not torch.isfinite(loss):\n"
            "        loss = torch.zeros((), requires_grad=True)\n"
            "    loss.backward()\n    opt.step()\n",
            line=7,
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef criterion(logits, y):\n"
            "    loss = F.cross_entropy(logits, y)\n    return torch.nan_to_num(loss, nan=0.0)\n",
            line=7,
        ),
        Fails(
            "import torch\n\n\ndef step(loss, opt):\n"
            "    loss = torch.where(torch.isnan(loss), torch.zeros_like(loss), loss)\n"
            "    loss.backward()\n    opt.step()\n",
            line=5,
        ),
        Fails(
            "import torch\nfrom torch import nn\n\n\nclass EdgeLoss(nn.Module):\n"
            "    def forward(self, x, y):\n        edge_loss = (x - y).square().mean()\n"
            "        if torch.isnan(edge_loss):\n            edge_loss = 0.0\n"
            "        return x.abs().mean() + edge_loss, {}\n",
            line=9,
        ),
        Passes(
            "import torch\n\n\ndef step(loss, opt, log):\n    if not torch.isfinite(loss):\n"
            "        return\n    loss.backward()\n    opt.step()\n"
            "    log(torch.nan_to_num(loss.detach(), nan=-1.0).item())\n"
        ),
        Passes(
            "import math\nimport torch\n\n\ndef step(loss, opt, total):\n    loss.backward()\n"
            "    opt.step()\n    shown = loss.item()\n    if math.isnan(shown):\n"
            "        shown = 0.0\n    return total + shown\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        if not code.relevant:
            return
        roles = ValueRoles.of(code)
        places: dict[ast.AST, None] = {}
        for value in code.of("nan_to_num", "where", "masked_fill", "setitem"):
            replaces = value.grad and _replaces(roles, value)
            if replaces and value.node is not None and roles.is_trained_on(value):
                places[value.node] = None
        for test in Conditions.of(code).tests:
            for node in _in_branch(code, roles, test):
                places[node] = None
        told: set[ast.stmt | None] = set()
        for node in places:
            statement = code.statement_of(node)
            if statement in told:
                continue
            told.add(statement)
            message = "a loss that is not finite is replaced and trained on: the fault stays hidden"
            function = Training.of(code).owner(node)
            yield self.at(code, node, message, fixes=(_FIX,), weak=_only_measures(code, function))


def _only_measures(code: Code, function: Function, depth: int = 3) -> bool:
    """Returns whether every call of a function turns what it gives back into a number."""
    project = code.project
    if not function.name or project is None or depth <= 0:
        return False
    handed_on = re.compile(rb"\b%s\b(?!\()" % function.name.encode())
    if any(project.holds(path, handed_on) for path in project.users(function.name)):
        return False  # as a loss that is called by another name
    calls = [*calls_of(code, function)]
    return bool(calls) and all(
        ends_as_number(home, call.node) or _is_given_on(home, call, depth) for home, call in calls
    )


def _is_given_on(code: Code, call: Value, depth: int) -> bool:
    """Returns whether a call stands in what a function gives back that only measures."""
    if not isinstance(code.statement_of(call.node) if call.node else None, ast.Return):
        return False
    return call.scope is not None and _only_measures(code, call.scope, depth - 1)


def _replaces(roles: ValueRoles, value: Value) -> bool:
    if value.op == "nan_to_num":
        return any(roles.is_loss(part) for part in value.inputs[:1])  # text may lack arguments
    if value.op == "where":
        return chooses(value) and any(roles.is_loss(part) for part in value.inputs[1:])
    return len(value.inputs) > 1 and roles.is_loss(value.inputs[0]) and asks(value.inputs[1])


def _in_branch(code: Code, roles: ValueRoles, test: Test) -> Iterator[ast.AST]:
    """What is done in the branch for a bad loss: another loss assigned, or given back."""
    losses = {label(c.subject) for c in test.checks if roles.role(c.subject) == "loss"}
    if not losses:
        return
    numbers = {label(c.subject) for c in test.checks if is_number(c.subject)}
    if isinstance(test.node, ast.IfExp):
        value = code.values.get(test.node)
        if value is not None and roles.is_trained_on(value):
            yield test.node
    for statement in test.when_bad:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
            value = code.values.get(statement.value)
            named = target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")
            within = None if named in numbers else test.function
            if named in losses and value is not None and roles.is_trained_on(value, within):
                yield statement
        elif isinstance(statement, ast.Return) and _gives_back(code, test, statement):
            yield statement


def _gives_back(code: Code, test: Test, statement: ast.Return) -> bool:
    """Whether a function that returns a loss returns something made up in its place."""
    training = Training.of(code)
    if any(training.does(event, is_backward) for event in test.function.events):
        return False
    value = code.values.get(statement.value) if statement.value is not None else None
    if value is None or value.name == "None" or isinstance(value.const, (bool, str)):
        return False
    made_up = value.lo == value.hi or value.op in ("zeros", "zeros_like", "new_zeros", "mul")
    roles = ValueRoles.of(code)
    others = [r for r in test.function.returns if r is not value]
    return made_up and any(roles.is_loss(r) and r.core.op != "item" for r in others)
