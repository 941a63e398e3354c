"""Questions that let through what they are asked about: Inf by a guard, NaN by a comparison."""

from __future__ import annotations

import ast
import re
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, replaced
from nanguard.check.code.nan_checks import Conditions
from nanguard.check.code.training import (
    Training,
    ValueRoles,
    after,
    is_backward,
    is_step,
    is_test,
    label,
    leaves,
    within,
)
from nanguard.check.code.training_path import is_evaluation
from nanguard.check.code.values import INF
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.nan_checks import FiniteCheck, Test
    from nanguard.check.code.scopes import Function
    from nanguard.check.code.values import Value

_COUNTS = frozenset({"sum", "mean", "count_nonzero", "item", "float"})
_SEES_INF = ("isinf", "isfinite", "isposinf")
# Methods whose loss a framework trains on.
_HOOKS = re.compile(r"training_step|compute_loss|train_step")
_EVALUATED = re.compile(r"(^|_)(v|val|vali?d?|validat\w*|dev|test|eval\w*)(_|$)")
_SAYS = re.compile(r"print|warn|error|info|log|verbose|critical|write|debug|exit")
_TITLE = "ask for both: not isfinite(...)"


class NanCheckMissesInf(CodeRule):
    """`isnan` alone, or `x != x`, guards a loss, a gradient or its norm.

    *Why it breaks a run*: an overflow is Inf first. The guard lets it through, the step is taken,
    Inf minus Inf makes the weights NaN, and from then on the guard skips every step of a run that
    is already lost.

    Ask `isfinite` instead: it is false for NaN and for both infinities.
    """

    code = "SRC008"
    name = "nan-check-misses-inf"
    severity = Severity.WARNING
    seen_in = "https://github.com/netket/netket/pull/1259"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef step(model, x, opt):\n    loss = model(x)\n"
            "    if torch.isnan(loss):\n        return\n    loss.backward()\n    opt.step()\n",
            line=6,
            fixed="import torch\n\n\ndef step(model, x, opt):\n    loss = model(x)\n"
            "    if not torch.isfinite(loss):\n        return\n"
            "    loss.backward()\n    opt.step()\n",
        ),
        Fails(
            "import torch\n\n\ndef bad(model):\n"
            "    return any(p.grad.isnan().any() for p in model.parameters())\n",
            line=5,
            fixed="import torch\n\n\ndef bad(model):\n"
            "    return any((~p.grad.isfinite()).any() for p in model.parameters())\n",
        ),
        Fails(
            "import math\nimport torch\n\n\ndef step(loss, opt):\n    value = loss.item()\n"
            '    if math.isnan(value):\n        raise RuntimeError("nan")\n    loss.backward()\n',
            line=7,
            fixed="import math\nimport torch\n\n\ndef step(loss, opt):\n    value = loss.item()\n"
            '    if not math.isfinite(value):\n        raise RuntimeError("nan")\n'
            "    loss.backward()\n",
        ),
        Passes(
            "import torch\n\n\ndef step(loss, opt):\n"
            "    if torch.isnan(loss) or torch.isinf(loss):\n        return\n    loss.backward()\n"
        ),
        Passes(
            "import torch\n\n\ndef step(model, a, b, opt):\n"
            "    loss = 1 - torch.exp(-torch.norm(model(a) - b, dim=-1)).mean()\n"
            "    if torch.isnan(loss):\n        return\n    loss.backward()\n    opt.step()\n"
        ),
        Passes(
            "import math\nimport torch\n\n\ndef told(loss):\n"
            '    return "nan" if math.isnan(loss) else "inf"\n'
        ),
        Passes(
            "import torch\n\n\ndef masked(pred, target):\n    known = ~torch.isnan(target)\n"
            "    if torch.isnan(target).all():\n        return pred.sum() * 0\n"
            "    return (pred - target)[known].pow(2).mean()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        if not code.relevant or is_test(code) or is_evaluation(code):
            return
        conditions = Conditions.of(code)
        roles = ValueRoles.of(code)
        seen: set[ast.AST] = set()
        for test in conditions.tests:
            for check in _alone(test, conditions):
                role = roles.role(check.subject)
                if not role or check.node in seen or _asked_elsewhere(code, check, test):
                    continue
                if _is_always_finite(check.subject):
                    continue
                if _only_names(code, check.node) or _only_shows(roles, test):
                    continue
                seen.add(check.node)
                yield self._told(code, test, check, role)

    def _told(self, code: Code, test: Test, check: FiniteCheck, role: str) -> Finding:
        what = {"norm": "gradient norm"}.get(role, role)
        trained = role != "loss" or (
            _is_where_trained(code, test.function) and not _is_of_evaluation(check.subject)
        )
        passes = "Inf passes and reaches the weights" if trained else "Inf passes"
        ends = _raises(test)
        return self.at(
            code,
            check.node,
            f"this asks a {what} for NaN only: {passes}",
            fixes=(
                Fix(_TITLE, safe=trained and (ends or _says(test)), edits=_edits(code, check.node)),
            ),
            # A loss that is not trained on still ends a broken run, or does not.
            weak=_decides_nothing(code, test) or not (trained or ends),
        )


def _is_always_finite(value: Value) -> bool:
    """Whether a value has bounds on both sides, so that a number of it is never infinite."""
    # What a parameter is by default, or a name before a loop, bounds nothing that comes later.
    starts = value.lo == value.hi or any(part.has("default") for part in value.upstream(24))
    return value.lo > -INF and value.hi < INF and not starts


def _decides_nothing(code: Code, test: Test) -> bool:
    """Whether the answer decides neither about the step nor about anything for a bad value."""
    if not isinstance(test.node, ast.If) or test.when_bad:
        return False
    training = Training.of(code)
    return not any(
        within(event.line, test.when_good)
        for event in test.function.events
        if training.does(event, is_backward) or training.does(event, is_step)
    )


def _is_where_trained(code: Code, function: Function) -> bool:
    """Whether a function starts a backward pass with its loss, or a caller in the file does."""
    if _HOOKS.fullmatch(function.name):
        return True
    training = Training.of(code)
    scopes = [function, *(call.scope or code.module for call in training.callers(function))]
    return any(training.does(e, is_backward) for scope in scopes for e in scope.events)


def _is_of_evaluation(value: Value) -> bool:
    """Whether a loss is that of a validation, by its name or by the function that gives it."""
    return any(_EVALUATED.search(part.name.lower()) for part in value.upstream(6))


def _alone(test: Test, conditions: Conditions) -> Iterator[FiniteCheck]:
    """The questions for NaN that come without one for Inf about the same value."""
    if isinstance(test.node, ast.Return) and _counts(test.node.value):
        return
    seen = {label(check.subject) for check in test.checks if "inf" in check.sees}
    for other in conditions.tests:
        if other.function is test.function:
            seen |= {label(c.subject) for c in other.checks if "inf" in c.sees and _bounds(c)}
    for check in test.checks:
        if check.sees == {"nan"} and label(check.subject) not in seen:
            yield check


def _bounds(check: FiniteCheck) -> bool:
    """Whether a question would find Inf: not if it only asks which of two values is smaller."""
    node = check.node
    return not isinstance(node, ast.Compare) or isinstance(node.comparators[0], ast.Constant)


def _counts(node: ast.expr | None) -> bool:
    func = node.func if isinstance(node, ast.Call) else None
    name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
    return name in _COUNTS


def _only_names(code: Code, node: ast.expr) -> bool:
    """Whether the answer only decides what something is called: nan or inf."""
    parent = code.parents.get(node)
    return isinstance(parent, ast.IfExp) and all(
        isinstance(branch, ast.Constant) and isinstance(branch.value, str)
        for branch in (parent.body, parent.orelse)
    )


def _only_shows(roles: ValueRoles, test: Test) -> bool:
    """Whether a number that is only shown is written in place of a NaN."""
    for statement in test.when_bad:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Constant):
            return False
        value = roles.code.values.get(statement.value)
        names = {target.id for target in statement.targets if isinstance(target, ast.Name)}
        trained = names & roles.trained.get(id(test.function), set())
        if not names or trained or (value is not None and roles.is_trained_on(value)):
            return False
    return bool(test.when_bad)


def _raises(test: Test) -> bool:
    """Whether a run ends there: to see Inf as well then hides nothing that was seen before."""
    if isinstance(test.node, ast.Assert):
        return True
    return any(isinstance(statement, ast.Raise) for statement in test.when_bad)


def _says(test: Test) -> bool:
    """Whether what is found is said: to see Inf as well then is no less honest than before."""
    calls = [
        statement.value.func
        for statement in test.when_bad
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
    ]
    return any(_SAYS.search(getattr(f, "attr", getattr(f, "id", ""))) for f in calls)


def _asked_elsewhere(code: Code, check: FiniteCheck, test: Test) -> bool:
    prefixes = ("", "math.", "numpy.")
    for asked in code.of(*(prefix + name for name in _SEES_INF for prefix in prefixes)):
        here = asked.scope is test.function and bool(asked.inputs)
        if here and label(asked.inputs[0]) == label(check.subject):
            return True
    return False


def _edits(code: Code, node: ast.expr) -> tuple[Edit, ...]:
    func = node.func if isinstance(node, ast.Call) else None
    if not isinstance(func, ast.Attribute) or func.attr != "isnan":
        return ()
    start, end = code.span(func)
    attribute = Edit(end - len("isnan"), end, "isfinite")
    parent = code.parents.get(node)
    if isinstance(parent, ast.UnaryOp) and isinstance(parent.op, (ast.Not, ast.Invert)):
        outside, _ = code.span(parent)
        if code.text.content[outside:start].strip() in ("not", "~"):
            return (Edit(outside, start, ""), attribute)
    asked = isinstance(parent, (ast.If, ast.While, ast.Assert, ast.IfExp)) and parent.test is node
    mark = "not " if asked or code.names.path(func).startswith("math.") else "~"
    plain = (ast.If, ast.While, ast.Assert, ast.BoolOp, ast.Return, ast.Assign, ast.IfExp)
    if isinstance(parent, plain) or (mark == "~" and isinstance(parent, ast.Call)):
        return (Edit(start, start, mark), attribute)
    return (replaced(code, node, f"({mark}{_finite(code, node, func)})"),)


def _finite(code: Code, node: ast.expr, func: ast.Attribute) -> str:
    offset = code.span(func)[1] - code.span(node)[0]
    text = code.segment(node)
    return text[: offset - len("isnan")] + "isfinite" + text[offset:]


_BETTER = re.compile(r"best|lowest|highest|(^|_)(min|max)_(loss|score|metric|val)")
_SAVES = re.compile(r"save|checkpoint|ckpt|dump|state_dict|deepcopy|export")
_LOSS_LIKE = re.compile(
    r"loss|(^|_)(nll|mse|rmse|mae|err(or)?|elbo|kld?|ppl|perplexity|objective)(_|$)"
)
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


class NanTakenForImprovement(CodeRule):
    """The best checkpoint is saved in the `else` of `if score < best:`, where NaN ends up as well.

    *Why it breaks a run*: every comparison with NaN is false. A loss that is NaN is not worse, so
    it counts as an improvement: the good checkpoint is overwritten by the broken model, the best
    score is NaN from then on, nothing is worse than that, and early stopping never stops.

    Ask the other way round, so that NaN is no improvement: `if score > best: save`. Or raise where
    the score is not finite.
    """

    code = "SRC045"
    name = "nan-taken-for-improvement"
    severity = Severity.WARNING
    seen_in = "https://github.com/Bjarten/early-stopping-pytorch/issues/16"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\nclass EarlyStopping:\n    def __init__(self):\n"
            "        self.best, self.count = None, 0\n\n    def __call__(self, val_loss, model):\n"
            "        score = -val_loss\n        if self.best is None:\n"
            "            self.best = score\n"
            "        elif score < self.best:\n            self.count += 1\n        else:\n"
            "            self.best = score\n            torch.save(model.state_dict(), 'best.pt')\n"
            "            self.count = 0\n",
            line=12,
        ),
        Fails(
            "import torch\n\n\ndef fit(model, epochs, best_loss):\n    for val_loss in epochs:\n"
            "        if val_loss >= best_loss - 1e-4:\n            continue\n"
            "        best_loss = val_loss\n        torch.save(model.state_dict(), 'best.pt')\n",
            line=6,
        ),
        Passes(
            "import torch\n\n\ndef fit(model, epochs, best_loss):\n    for val_loss in epochs:\n"
            "        if val_loss < best_loss:\n            best_loss = val_loss\n"
            "            torch.save(model.state_dict(), 'best.pt')\n"
        ),
        Passes(
            "import math\nimport torch\n\n\ndef fit(model, epochs, best_loss, count):\n"
            "    for val_loss in epochs:\n        if not math.isfinite(val_loss):\n"
            "            raise RuntimeError(val_loss)\n        if val_loss > best_loss:\n"
            "            count += 1\n        else:\n            best_loss = val_loss\n"
            "            torch.save(model.state_dict(), 'best.pt')\n"
        ),
        Passes(
            "import torch\n\n\ndef longest(rows, best_length):\n    for length in map(len, rows):\n"
            "        if length < best_length:\n            continue\n"
            "        best_length = length\n    return best_length\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        if not code.relevant or is_test(code):
            return
        for node in code.parents:
            if not isinstance(node, ast.If):
                continue
            asked = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
            if any(not isinstance(test, ast.Compare) for test in asked) or (
                isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
            ):
                continue
            scores = [pair for test in asked for pair in _scores(test)]  # type: ignore[arg-type]
            taken = _taken_otherwise(code, node)
            improved = next((s for s, best in scores if _becomes(taken, best, s)), None)
            if improved is None or _becomes_any(node.body, scores):
                continue
            if not any(_saves(statement) for statement in taken) or _asks_finite(code, node):
                continue
            yield self.at(
                code,
                node.test,
                "NaN is not worse, so it counts as an improvement: it is saved as the best",
                fixes=(Fix("ask the other way round, or raise where it is not finite"),),
                weak=not _is_loss_like(code, improved),
            )


def _scores(test: ast.Compare) -> list[tuple[ast.expr, str]]:
    """Returns what is compared with the best there was, and what that is called."""
    if len(test.ops) != 1 or not isinstance(test.ops[0], _ORDERS):
        return []
    sides = (test.left, test.comparators[0])
    found = []
    for score, other in (sides, sides[::-1]):
        if isinstance(other, ast.BinOp) and isinstance(other.op, (ast.Add, ast.Sub, ast.Mult)):
            other = other.left
        if isinstance(other, (ast.Name, ast.Attribute, ast.Subscript)):
            written = ast.unparse(other)
            if _BETTER.search(written.lower()):
                found.append((score, written))
    return found


def _taken_otherwise(code: Code, node: ast.If) -> list[ast.stmt]:
    """Returns what is done where a condition does not hold, and nothing else is asked."""
    if node.orelse:
        return [] if isinstance(node.orelse[0], ast.If) else node.orelse
    if not leaves(node.body):
        return []
    return list(after(code, node))


def _becomes(statements: list[ast.stmt], best: str, score: ast.expr) -> bool:
    """Returns whether the best becomes what was compared with it."""
    written = ast.unparse(score)
    return any(
        isinstance(statement, ast.Assign)
        and any(ast.unparse(target) == best for target in statement.targets)
        and (written in ast.unparse(statement.value) or ast.unparse(statement.value) in written)
        for statement in statements
    )


def _becomes_any(statements: list[ast.stmt], scores: list[tuple[ast.expr, str]]) -> bool:
    return any(_becomes(statements, best, score) for score, best in scores)


def _saves(statement: ast.stmt) -> bool:
    """Returns whether a statement keeps a model."""
    return any(
        isinstance(call, ast.Call)
        and _SAVES.search(getattr(call.func, "attr", getattr(call.func, "id", "")).lower())
        for call in ast.walk(statement)
    )


def _asks_finite(code: Code, node: ast.If) -> bool:
    """Returns whether the function around a condition asks for NaN, or stops at it."""
    for outer in code.ancestors(node):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return (
                re.search(r"is_?nan|is_?finite|nan_to_num", ast.unparse(outer).lower()) is not None
            )
    return False


def _is_loss_like(code: Code, score: ast.expr) -> bool:
    """Returns whether a score is made from a loss or an error, by their names."""
    value = code.values.get(score)
    names = [ast.unparse(score), *(p.name for p in value.upstream(12))] if value else []
    return any(_LOSS_LIKE.search(name.lower()) for name in names)


_NANS = frozenset({"numpy.nan", "numpy.NaN", "numpy.NAN", "math.nan", "torch.nan"})


class ComparedWithNan(CodeRule):
    """`x == float("nan")`, `x != np.nan`, `x in (0.0, float("nan"))`.

    *Why it breaks a run*: NaN is unlike everything, itself too. `==` is always False and `!=` is
    always True, so that what was to be done about a NaN is never done, and training goes on with
    it.

    Ask `torch.isnan(x)` or `math.isnan(x)`; `isfinite` sees Inf as well.
    """

    code = "SRC059"
    name = "compared-with-nan"
    severity = Severity.ERROR
    seen_in = "https://github.com/microsoft/qlib/issues/2044"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef step(model, x, opt):\n    loss = model(x)\n"
            '    if loss == float("nan"):\n        return\n    loss.backward()\n    opt.step()\n',
            line=6,
        ),
        Fails(
            "import numpy as np\nimport torch\n\n\ndef known(labels):\n"
            "    return labels[labels != np.nan]\n",
            line=6,
        ),
        Fails(
            "import torch\nfrom math import inf, nan\n\n\ndef bad(loss):\n"
            "    return loss == inf or nan == loss\n",
            line=6,
        ),
        Fails(
            "import torch\n\n\ndef bad(loss):\n"
            '    return loss.item() in (float("inf"), float("nan"))\n',
            line=5,
        ),
        Passes("import torch\n\n\ndef is_nan(x):\n    return x != x\n"),
        Passes('import torch\n\n\ndef is_inf(x):\n    return x == float("inf")\n'),
        Passes('import torch\n\n\ndef is_nan(text):\n    return text.lower() == "nan"\n'),
        Passes(
            "import math\nimport torch\n\n\ndef fill(missing):\n"
            "    return missing is math.nan or missing in (None, math.nan)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        for node in code.parents if code.relevant else ():
            if not isinstance(node, ast.Compare):
                continue
            for operation, sides in zip(
                node.ops, pairwise([node.left, *node.comparators]), strict=True
            ):
                result = _with_nan(code, operation, *sides)
                if result:
                    yield self.at(
                        code,
                        node,
                        f"a comparison with NaN is always {result}",
                        fixes=(Fix("ask isnan, or isfinite, which sees Inf as well"),),
                    )
                    break


def _with_nan(code: Code, operation: ast.cmpop, left: ast.expr, right: ast.expr) -> str:
    """Returns what a comparison with NaN always says; nothing if it is none.

    What lies in a list is asked for its identity first, so that only a NaN made there counts.
    """
    if isinstance(operation, (ast.In, ast.NotIn)):
        items = right.elts if isinstance(right, (ast.Tuple, ast.List, ast.Set)) else []
        numbers = [item for item in items if isinstance(item, ast.Call) and _is_nan(code, item)]
        return "False for it" if numbers else ""
    if not _is_nan(code, left) and not _is_nan(code, right):
        return ""
    return "True" if isinstance(operation, ast.NotEq) else "False" if _is_order(operation) else ""


def _is_order(operation: ast.cmpop) -> bool:
    return isinstance(operation, (ast.Eq, ast.Lt, ast.LtE, ast.Gt, ast.GtE))


def _is_nan(code: Code, node: ast.expr) -> bool:
    """Returns whether an expression is written as NaN."""
    if code.names.path(node) in _NANS:
        return True
    if not isinstance(node, ast.Call) or getattr(node.func, "id", "") != "float":
        return False
    given = node.args[0] if len(node.args) == 1 else None
    text = given.value if isinstance(given, ast.Constant) else None
    return isinstance(text, str) and text.strip().lower().lstrip("+-") == "nan"
