"""A loss that is left out of the log when it is NaN."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.nan_checks import Conditions, FiniteCheck
from nanguard.check.code.origins import calls_of
from nanguard.check.code.training import (
    Training,
    ValueRoles,
    inner_loop,
    is_backward,
    is_step,
    names_in,
    within,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.nan_checks import Test
    from nanguard.check.code.scopes import Function
    from nanguard.check.code.values import Value

_LOGS = re.compile(r"(^|_)(log|logs|write|record|report|summar\w*|average|update_meters?)(_|$)")
_LOSSES = re.compile(r"loss(es)?(_|$)")
_EVALUATES = re.compile(r"val|eval|test")
# What is kept of the models so far.
_BEST = re.compile(r"\bbest|_best\b|early_?stop|ReduceLROnPlateau", re.IGNORECASE)
_NANMEANS = ("nanmean", "numpy.nanmean", "nansum", "numpy.nansum")
_TITLE = "log what the loss was, NaN included, and count such steps"


class NanHiddenFromLog(CodeRule):
    """A loss that is NaN is left out of what is averaged, logged, or used to choose a model.

    *Why it breaks a run*: the curve stays smooth while steps are lost, or while every weight is NaN
    already. The first sign of the fault, and the step at which it began, are what the log was for.

    Log the value as it is, count the steps that are not finite, and stop or skip on them where the
    optimizer steps, not where numbers are shown.
    """

    code = "SRC041"
    name = "nan-hidden-from-log"
    severity = Severity.WARNING
    seen_in = "https://github.com/huggingface/trl/issues/6702"
    examples: ClassVar = (
        Fails(
            "import math\nimport torch\n\n\nclass Solver:\n    def write_log(self, name, values):\n"
            "        values = {k: v for k, v in values.items() if not math.isnan(v)}\n"
            "        self.log.add_scalars(name, values, self.step)\n",
            line=7,
        ),
        Fails(
            "import numpy as np\nimport torch\n\n\ndef train(model, loader, opt):\n"
            "    losses = []\n    for x in loader:\n        loss = model(x)\n"
            "        loss.backward()\n"
            "        opt.step()\n        losses.append(loss.item())\n"
            "    return np.nanmean(losses)\n",
            line=12,
        ),
        Fails(
            "import torch\n\n\ndef train(model, loader, opt):\n    total = 0.0\n"
            "    for x in loader:\n        loss = model(x)\n        loss.backward()\n"
            "        opt.step()\n        if not torch.isnan(loss):\n"
            "            total += loss.item()\n    return total\n",
            line=10,
        ),
        Passes(
            "import torch\n\n\ndef train(model, loader, opt):\n    total = 0.0\n"
            "    for x in loader:\n        loss = model(x)\n"
            "        if not torch.isfinite(loss):\n            continue\n"
            "        loss.backward()\n        opt.step()\n        total += loss.item()\n"
            "    return total\n"
        ),
        Fails(
            "import torch\n\n\ndef validate(model, loader):\n    total, n = 0.0, 0\n"
            "    for x in loader:\n        loss = model(x)\n        if torch.isfinite(loss):\n"
            "            total += loss.item()\n            n += 1\n    return total / n\n\n\n"
            "def main(model, loader, best=9.0):\n    loss = validate(model, loader)\n"
            "    if loss < best:\n        torch.save(model.state_dict(), 'best.pt')\n",
            line=8,
        ),
        Passes(
            "import numpy as np\nimport torch\n\n\ndef evaluate(ious):\n"
            "    return np.nanmean(ious)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        yield from self._picked(code)
        yield from self._averaged(code)
        yield from self._summed(code)
        yield from self._chosen_by(code)

    def _told(self, code: Code, node: ast.AST) -> Finding:
        message = (
            "a NaN is left out of what is logged here: the log stays clean while the run breaks"
        )
        return self.at(code, node, message, fixes=(Fix(_TITLE),))

    def _picked(self, code: Code) -> Iterator[Finding]:
        """Comprehensions that keep what is finite, in functions that log."""
        conditions = Conditions.of(code)
        for node in code.parents:
            if not isinstance(node, (ast.ListComp, ast.DictComp, ast.GeneratorExp)):
                continue
            tests = [test for generator in node.generators for test in generator.ifs]
            function = Training.of(code).owner(node)
            if not tests or not _LOGS.search(function.name.lower()):
                continue
            if any(not check.bad for test in tests for check in conditions.checks(test)):
                yield self._told(code, node)

    def _averaged(self, code: Code) -> Iterator[Finding]:
        """Means that leave NaN out, of losses of a training loop."""
        for mean in code.of(*_NANMEANS):
            value = mean.inputs[0] if mean.inputs else None
            function = mean.scope or code.module
            if value is None or not _LOSSES.search(value.name.lower()):
                continue
            if mean.node is not None and _trains(code, function):
                yield self._told(code, mean.node)

    def _summed(self, code: Code) -> Iterator[Finding]:
        """Losses that are added up only if they are finite, after the step was made."""
        roles = ValueRoles.of(code)
        for test in Conditions.of(code).tests:
            if (
                not isinstance(test.node, ast.If)
                or test.when_bad
                or not _trains(code, test.function)
            ):
                continue
            asked = [check for check in test.checks if _is_loss(roles, check)]
            if asked and _only_counts(code, test):
                yield self._told(code, test.node.test)

    def _chosen_by(self, code: Code) -> Iterator[Finding]:
        """Losses of an evaluation that are added up only if finite, where the best one is kept."""
        roles = ValueRoles.of(code)
        for test in Conditions.of(code).tests:
            function = test.function
            if not isinstance(test.node, ast.If) or not _EVALUATES.search(function.name.lower()):
                continue
            if _trains(code, function) or not _is_used_to_choose(code, function):
                continue
            added = test.when_good if not test.when_bad else _after_skip(code, test)
            asked = [check for check in test.checks if roles.role(check.subject) == "loss"]
            names = {check.subject.name for check in asked}
            if any(_adds(statement, names) for statement in added):
                yield self.at(
                    code,
                    test.node.test,
                    "batches whose loss is NaN are left out of the mean by which the best model "
                    "is chosen: a broken one may win",
                    fixes=(Fix("let the mean be NaN: `new < best` is then false"),),
                )


def _is_used_to_choose(code: Code, function: Function) -> bool:
    """Returns whether a best value is kept where a function is called for what it gives back."""
    if not function.name or not function.returns:
        return False
    return any(_BEST.search(_around(home, call)) for home, call in calls_of(code, function))


def _around(code: Code, call: Value) -> str:
    """Returns the function in which a call stands, or the whole script."""
    scope = call.scope
    return code.segment(scope.node) if scope is not None and scope.name else code.text.content


def _after_skip(code: Code, test: Test) -> Iterator[ast.stmt]:
    """Yields what a turn of a loop does after a condition, if bad values skip it."""
    if len(test.when_bad) and isinstance(test.when_bad[-1], ast.Continue):
        loop = inner_loop(code, test.node)
        body = loop.body if loop is not None else []
        yield from (later for later in body if later.lineno > test.node.lineno)


def _adds(statement: ast.stmt, names: set[str]) -> bool:
    """Returns whether a statement adds one of some losses to what was there."""
    if not isinstance(statement, ast.AugAssign) and not _appends(statement):
        return False
    return not names.isdisjoint(names_in(statement))


def _is_loss(roles: ValueRoles, check: FiniteCheck) -> bool:
    return check.exact and roles.role(check.subject) == "loss"


def _trains(code: Code, function: Function) -> bool:
    training = Training.of(code)
    return any(training.does(event, is_backward) for event in function.events)


def _only_counts(code: Code, test: Test) -> bool:
    """Returns whether a good value is added to something, and neither trained on nor stepped."""
    training = Training.of(code)
    for event in test.function.events:
        if within(event.line, test.when_good) and (
            training.does(event, is_backward) or training.does(event, is_step)
        ):
            return False
    return bool(test.when_good) and all(
        isinstance(statement, ast.AugAssign) or _appends(statement) for statement in test.when_good
    )


def _appends(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    func = call.func if isinstance(call, ast.Call) else None
    return isinstance(func, ast.Attribute) and func.attr in ("append", "update", "add")
