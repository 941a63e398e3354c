"""Bad gradients are set to zero, and the optimizer steps all the same."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.nan_checks import Conditions, cleaned_gradients
from nanguard.check.code.training import (
    Training,
    after,
    is_step,
    label,
    leaves,
    marks_of,
    names_in,
    spans,
    within,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Function

# Methods after which a trainer steps by itself.
_HOOKS = frozenset(
    {
        "on_after_backward",
        "on_before_optimizer_step",
        "on_pre_optimizer_step",
        "configure_gradient_clipping",
        "on_before_zero_grad",
        "training_step",
    }
)
_FIX = Fix(
    "leave the gradients alone and skip the step: check the norm that clip_grad_norm_ returns with "
    "isfinite, and go on to the next batch when it is not"
)


class StepAfterZeroedGrads(CodeRule):
    """Gradients are zeroed or cleaned of NaN because they are bad, and the optimizer still steps.

    *Why it breaks a run*: a step with zero gradients is not a skipped step. Adam's moments decay,
    momentum and weight decay move the weights, schedules go on; and the NaN, whose cause is still
    there, leaves no trace but a model that learns less and less.

    Skip the step instead: leave the gradients as they are, test their norm with `isfinite`, drop
    them with `zero_grad(set_to_none=True)` and take the next batch. Count the skips.
    """

    code = "SRC002"
    name = "step-after-zeroed-grads"
    severity = Severity.ERROR
    seen_in = "https://github.com/AI-Hypercomputer/maxtext/pull/3721"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef step(model, loss, opt):\n    loss.backward()\n"
            "    for p in model.parameters():\n        if not torch.isfinite(p.grad).all():\n"
            "            p.grad.zero_()\n    opt.step()\n",
            line=8,
        ),
        Fails(
            "import torch\n\n\ndef clean(params):\n    for p in params:\n"
            "        p.grad = torch.nan_to_num(p.grad)\n\n\ndef step(model, loss, opt):\n"
            "    loss.backward()\n    clean(model.parameters())\n    opt.step()\n",
            line=6,
        ),
        Fails(
            "import torch\n\n\ndef train(model, loader, opt):\n    for p in model.parameters():\n"
            "        p.register_hook(lambda g: torch.nan_to_num(g))\n    for x in loader:\n"
            "        model(x).backward()\n        opt.step()\n",
            line=6,
        ),
        Passes(
            "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n"
            "        model(x).backward()\n"
            "        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "        if not torch.isfinite(norm):\n            for p in model.parameters():\n"
            "                p.grad.zero_()\n            continue\n        opt.step()\n"
        ),
        Passes(
            "import torch\n\n\ndef step(model, loss, opt):\n    for p in model.parameters():\n"
            "        p.grad.zero_()\n    loss.backward()\n    opt.step()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        training = Training.of(code)
        for node, is_hook in cleaned_gradients(code):
            steps = bool(training.steps) if is_hook else _steps_after(code, training, node)
            if steps:
                message = "bad gradients are made zero and the optimizer steps with them"
                yield self.at(code, node, message, fixes=(_FIX,))


def _steps_after(code: Code, training: Training, node: ast.AST, depth: int = 3) -> bool:
    """Whether an optimizer steps after a node, in its function or in those that call it."""
    function = training.owner(node)
    lines = [e.line for e in function.events if training.does(e, is_step)]
    marks = marks_of(code, node)
    asked = _asked_around(code, node)
    for later in after(code, node):
        if asked and _leaves_if_bad(code, later, asked):
            return False
        if isinstance(later, ast.If) and marks & names_in(later.test):
            if leaves(later.body) or leaves(later.orelse) or spans(later, lines):
                return False
        elif spans(later, lines):
            return True
    if not lines and _is_hook(function):
        return True
    if depth and not lines:
        called = training.callers(function)
        if not called and function.cls is not None:
            # The receiver's class is not known, the name of the method is all there is.
            called = [*training.called(function.name)]
        calls = [call.node for call in called if call.node is not None]
        return any(_after_call(code, training, call, depth) for call in calls)
    return False


def _asked_around(code: Code, node: ast.AST) -> set[str]:
    """The values that were found bad where a node runs, by name."""
    line = getattr(node, "lineno", 0)
    tests = [test for test in Conditions.of(code).tests if within(line, test.when_bad)]
    return {label(check.subject) for test in tests for check in test.checks} - {""}


def _leaves_if_bad(code: Code, later: ast.stmt, asked: set[str]) -> bool:
    """Whether a later statement leaves for the same reason, before the optimizer steps."""
    for test in Conditions.of(code).tests:
        if test.node is later and leaves(test.when_bad):
            seen = {label(c.subject) for c in test.checks if "nan" in c.sees and c.bad}
            if seen & asked:
                return True
    return False


def _after_call(code: Code, training: Training, call: ast.AST, depth: int) -> bool:
    for outer in code.ancestors(call):
        if isinstance(outer, ast.If) and leaves(outer.body) and call in ast.walk(outer.test):
            return False
        if isinstance(outer, ast.stmt):
            break
    return _steps_after(code, training, call, depth - 1)


def _is_hook(function: Function) -> bool:
    if function.name not in _HOOKS or function.cls is None:
        return False
    bases = " ".join(base for cls in function.cls.line_of_descent() for base in cls.bases)
    return "Trainer" in bases or "Callback" in bases or "LightningModule" in bases
