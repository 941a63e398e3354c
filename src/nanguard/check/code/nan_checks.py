"""Questions about whether a value is finite: which value, what they see, what hangs on them."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanguard.check.code.training import Training, ValueRoles, named, within
from nanguard.check.code.values import INF, Value

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Function


@dataclass(frozen=True, slots=True)
class FiniteCheck:
    """One question about one value.

    Attributes:
        node: The expression that asks.
        subject: The value it asks about.
        sees: Which of NaN and Inf it sees.
        bad: What the condition it is part of is when the value is bad.
        exact: Whether it is one of the usual questions, not a limit or a function elsewhere.
    """

    node: ast.expr
    subject: Value
    sees: frozenset[str]
    bad: bool
    exact: bool = True


@dataclass(frozen=True, slots=True)
class Test:
    """A condition with such questions, and the function it stands in.

    Attributes:
        node: The statement or expression that has the condition.
        checks: The questions.
        function: Where it stands.
    """

    node: ast.If | ast.While | ast.Assert | ast.IfExp | ast.Return
    checks: tuple[FiniteCheck, ...]
    function: Function

    @property
    def when_bad(self) -> Sequence[ast.stmt]:
        """The statements that run when the value is bad."""
        if not isinstance(self.node, ast.If):
            return ()
        return self.node.body if self.checks[0].bad else self.node.orelse

    @property
    def when_good(self) -> Sequence[ast.stmt]:
        """The statements that run when the value is not bad."""
        if not isinstance(self.node, ast.If):
            return ()
        return self.node.orelse if self.checks[0].bad else self.node.body


BOTH = frozenset({"nan", "inf"})
_SEEN_BY = {
    "isnan": frozenset({"nan"}),
    "isinf": frozenset({"inf"}),
    "isposinf": frozenset({"inf"}),
    "isneginf": frozenset({"inf"}),
    "isfinite": BOTH,
}
# What is done with the result of a test before it decides something.
_NEGATES = frozenset({"logical_not", "bitwise_not"})
_PASSED_ON = _NEGATES | {
    "any", "all", "item", "bool", "int", "float", "sum", "max", "cpu", "detach", "cuda", "len",
    "logical_or", "logical_and", "as_tensor", "tensor", "nonzero", "numel", "count_nonzero", "to",
    "abs", "numpy", "tolist", "mean",
}  # fmt: skip
_WORDS = re.compile(r"\w+")
_ASKS = re.compile(r"is|has|have|any|all|check|contains|detect|found|not", re.IGNORECASE)
_FOR = re.compile(r"nan|finite|inf|bad_?loss", re.IGNORECASE)
_LARGE_LIMIT = 1e3


def _asks(name: str) -> bool:
    """Returns whether a function asks for numbers that are not finite, as ``has_any_nan`` does."""
    return any(
        (asks := _ASKS.search(word)) is not None and _FOR.search(word, asks.end()) is not None
        for word in _WORDS.findall(name)
    )


class Conditions:
    """The conditions of a file that ask whether a value is finite.

    Attributes:
        code: The file.
        training: How it trains.
        tests: Those conditions, in the order of their lines.
    """

    def __init__(self, code: Code) -> None:
        self.code = code
        self.training = Training.of(code)
        self.tests: list[Test] = []
        for node in code.parents:
            if isinstance(node, (ast.If, ast.While, ast.Assert, ast.IfExp, ast.Return)):
                self._look_at(node)
        self.tests.sort(key=lambda test: test.node.lineno)

    @classmethod
    def of(cls, code: Code) -> Conditions:
        """Returns the conditions of a file, worked out once."""
        known: Conditions | None = code.facts.get(cls)
        if known is None:
            known = code.facts[cls] = cls(code)
        return known

    def _look_at(self, node: ast.If | ast.While | ast.Assert | ast.IfExp | ast.Return) -> None:
        test = node.value if isinstance(node, ast.Return) else node.test
        if test is None:
            return
        checks = tuple(self.checks(test))
        if checks:
            self.tests.append(Test(node, checks, self.training.owner(node)))

    def checks(self, node: ast.expr, *, bad: bool = True, depth: int = 6) -> Iterator[FiniteCheck]:
        """Yields the questions a condition asks.

        Args:
            node: The condition.
            bad: What it counts as when it holds.
            depth: How many names and functions are followed.
        """
        if depth <= 0:
            return
        if isinstance(node, ast.Call):
            yield from self._call(node, bad=bad, depth=depth)
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from self._compare(node, bad=bad, depth=depth)
        elif isinstance(node, ast.Name):
            yield from self._name(node, bad=bad, depth=depth)
        else:
            flips = isinstance(node, ast.UnaryOp)
            for part in _parts(node):
                yield from self.checks(part, bad=bad != flips, depth=depth)

    def _call(self, node: ast.Call, *, bad: bool, depth: int) -> Iterator[FiniteCheck]:
        func = node.func
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        value = self.code.values.get(node)
        callee = self.training.callees.get(id(value))
        if callee is not None and value is not None:
            yield from self._asked_by(value, callee, bad=bad, depth=depth)
        elif name in _SEEN_BY:
            subject = self._subject(node)
            if subject is not None:
                yield FiniteCheck(node, subject, _SEEN_BY[name], bad == (name != "isfinite"))
        elif name in _PASSED_ON:
            inner = [*node.args]
            if isinstance(func, ast.Attribute) and not self.code.names.path(func):
                inner.append(func.value)
            for part in inner:
                yield from self.checks(part, bad=bad != (name in _NEGATES), depth=depth)
        elif _asks(name) and node.args and node.args[0] in self.code.values:
            good = "finite" in name and "non" not in name and "not" not in name
            subject = self.code.values[node.args[0]]
            yield FiniteCheck(node, subject, BOTH, bad != good, exact=False)

    def _subject(self, node: ast.Call) -> Value | None:
        if node.args:
            return self.code.values.get(node.args[0])
        return (
            self.code.values.get(node.func.value) if isinstance(node.func, ast.Attribute) else None
        )

    def _asked_by(
        self, call: Value, callee: Function, *, bad: bool, depth: int
    ) -> Iterator[FiniteCheck]:
        """The questions that a function of the file asks for its caller."""
        if isinstance(callee.node, (ast.Module, ast.Lambda)):
            return
        for statement in _statements(callee.node.body):
            found: list[FiniteCheck] = []
            if isinstance(statement, ast.Return) and statement.value is not None:
                found = [*self.checks(statement.value, bad=bad, depth=depth - 2)]
            elif isinstance(statement, ast.If):
                answer = _answer(statement.body)
                if answer is not None:
                    asked = self.checks(statement.test, bad=bad == answer, depth=depth - 2)
                    found = [*asked]
            for check in found:
                given = self._given(check.subject, call, callee)
                yield replace(check, subject=given)

    def _given(self, subject: Value, call: Value, callee: Function) -> Value:
        for made in subject.upstream(12):
            if made.name in callee.parameters and not made.op:
                return self.training.argument(call, callee, made.name) or subject
        return subject

    def _compare(self, node: ast.Compare, *, bad: bool, depth: int) -> Iterator[FiniteCheck]:
        left, op, right = node.left, node.ops[0], node.comparators[0]
        value = self.code.values.get(left)
        limit = self.code.values.get(right)
        if isinstance(op, (ast.NotEq, ast.Eq)) and _same(left, right) and value is not None:
            yield FiniteCheck(node, value, frozenset({"nan"}), bad == isinstance(op, ast.NotEq))
            return
        if isinstance(right, ast.Constant) and right.value in (0, 1, True, False):
            flips = isinstance(op, (ast.Eq, ast.Is, ast.Lt)) and not (
                right.value and not isinstance(op, ast.Lt)
            )
            yield from self.checks(left, bad=bad != flips, depth=depth)
            return
        number = limit.number() if limit is not None else None
        if number is None or value is None or abs(number) < _LARGE_LIMIT:
            return
        if isinstance(op, (ast.Lt, ast.LtE)):
            yield FiniteCheck(node, value, BOTH, not bad, exact=False)
        elif isinstance(op, (ast.Gt, ast.GtE)) or (abs(number) == INF and isinstance(op, ast.Eq)):
            yield FiniteCheck(node, value, frozenset({"inf"}), bad, exact=False)
        elif abs(number) == INF and isinstance(op, ast.NotEq):
            yield FiniteCheck(node, value, frozenset({"inf"}), not bad, exact=False)

    def _name(self, node: ast.Name, *, bad: bool, depth: int) -> Iterator[FiniteCheck]:
        """What a name was given, on each of the ways to here."""
        value = self.code.values.get(node)
        queue = [value] if value is not None else []
        for _ in range(4):
            if not queue:
                return
            made = queue.pop()
            if made.op == "join":
                queue += made.inputs
            elif isinstance(made.node, ast.expr) and not isinstance(made.node, ast.Name):
                yield from self.checks(made.node, bad=bad, depth=depth - 1)


def _parts(node: ast.expr) -> Sequence[ast.expr]:
    """The conditions that a condition is put together from."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.Invert)):
        return (node.operand,)
    if isinstance(node, ast.BoolOp):
        return node.values
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd, ast.Add)):
        return (node.left, node.right)
    if isinstance(node, ast.NamedExpr):
        return (node.value,)
    return (node.elt,) if isinstance(node, (ast.GeneratorExp, ast.ListComp)) else ()


def _same(left: ast.expr, right: ast.expr) -> bool:
    if isinstance(left, ast.NamedExpr):
        left = left.target
    if not isinstance(left, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
        return False
    if isinstance(left, ast.Name):
        return isinstance(right, ast.Name) and left.id == right.id
    return ast.dump(left) == ast.dump(right)


def _answer(body: Sequence[ast.stmt]) -> bool | None:
    last = body[-1]
    if isinstance(last, ast.Return) and isinstance(last.value, ast.Constant):
        return last.value.value if isinstance(last.value.value, bool) else None
    return None


def _statements(body: Sequence[ast.stmt], depth: int = 4) -> Iterator[ast.stmt]:
    for statement in body:
        yield statement
        if depth and not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            for block in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, block, ()), depth - 1)


_HOOKS = frozenset(
    {"register_hook", "register_full_backward_hook", "register_backward_hook"}
    | {"register_post_accumulate_grad_hook"}
)
ASKS = frozenset({"isnan", "isinf", "isfinite", "math.isnan", "math.isfinite", "numpy.isnan"})


def cleaned_gradients(code: Code) -> Iterator[tuple[ast.AST, bool]]:
    """Yields where gradients are cleaned or zeroed for being bad, and whether by a hook."""
    training = Training.of(code)
    roles = ValueRoles.of(code)
    seen: set[int] = set()
    for event in _candidates(training):
        if event.node is None or id(event.node) in seen:
            continue
        hook = named(event) in _HOOKS
        if hook or _is_of_gradient(roles, event):
            if _cleans(event) or (hook and cleaning_hook(event)):
                seen.add(id(event.node))
                yield event.node, hook
            elif _zeroes(event) and _because_bad(code, event):
                seen.add(id(event.node))
                yield event.node, False
    for event in training.called("zero_grad"):
        if _keeps_zeros(event) and _because_bad(code, event) and event.node is not None:
            yield event.node, False


def _candidates(training: Training) -> Iterator[Value]:
    yield from training.called(
        "setattr", "setitem", "nan_to_num", "zero", "fill", "mul", "masked_fill", "copy",
        "_foreach_zero", "_foreach_mul", *_HOOKS,
    )  # fmt: skip


def _is_of_gradient(roles: ValueRoles, event: Value) -> bool:
    if not event.inputs:
        return False
    if event.op == "setattr":
        return event.name == "grad" or (event.name == "data" and roles.is_gradient(event.inputs[0]))
    target = event.keywords.get("out") or event.inputs[0]
    in_place = event.name.endswith("_") or event.path.endswith("_") or event.op == "setitem"
    in_place = in_place or "out" in event.keywords
    return in_place and any(roles.is_gradient(made) for made in (target, target.core))


def _cleans(event: Value) -> bool:
    """Whether NaN is looked for and replaced, element by element."""
    if event.op == "nan_to_num":
        return True
    written = event.inputs[1:2] if event.op in ("setattr", "copy") else ()
    for value in written:
        for made in value.upstream(6):
            if made.op == "nan_to_num" or chooses(made):
                return True
    return event.op in ("setitem", "masked_fill") and asks(event.inputs[1])


def chooses(value: Value) -> bool:
    """Returns whether an operation takes one value or another by whether one is finite."""
    return value.op in ("where", "masked_fill") and any(asks(part) for part in value.inputs[:2])


def asks(value: Value, questions: frozenset[str] = ASKS) -> bool:
    """Returns whether a mask says where a value is not finite."""
    for made in value.upstream(5):
        if made.op in questions:
            return True
        same = made.op == "compare" and len(made.inputs) == 2
        if same and made.name == "NotEq" and made.inputs[0] is made.inputs[1]:
            return True
    return False


def asks_nan(value: Value) -> bool:
    """Returns whether a mask says where a value is NaN."""
    return asks(value, ASKS - {"isinf"})


def cleaning_hook(event: Value) -> bool:
    """Returns whether a hook is registered that gives back its tensor without NaN."""
    for value in (*event.inputs[1:], *event.keywords.values()):
        function = value.function
        results = function.returns if function is not None else ()
        for result in results:
            if any(made.op == "nan_to_num" or chooses(made) for made in result.upstream(6)):
                return True
    return False


def _zeroes(event: Value) -> bool:
    if event.op in ("zero", "_foreach_zero"):
        return True
    if event.op == "setattr":
        value = event.inputs[1]
        return value.lo == value.hi == 0.0 or _by_zero(value)
    return event.op in ("fill", "mul", "_foreach_mul") and event.inputs[-1].number() == 0.0


def _by_zero(value: Value) -> bool:
    return value.op == "mul" and any(part.number() == 0.0 for part in value.inputs)


def _keeps_zeros(event: Value) -> bool:
    given = event.keywords.get("set_to_none") or (
        event.inputs[1] if len(event.inputs) > 1 else None
    )
    return given is None or given.const is False


def _because_bad(code: Code, event: Value) -> bool:
    """Whether it happens in the branch of a test that found something not finite."""
    flags = set()
    roles = ValueRoles.of(code)
    for test in Conditions.of(code).tests:
        if test.function is not event.scope:
            continue
        if not any(check.exact or roles.role(check.subject) for check in test.checks):
            continue  # a limit on something else, such as the size of a buffer
        if within(event.line, test.when_bad):
            return True
        flags |= {name for statement in test.when_bad for name in _raised(statement)}
    around = list(code.ancestors(event.node)) if event.node is not None else []
    return any(
        isinstance(outer, ast.If) and isinstance(outer.test, ast.Name) and outer.test.id in flags
        for outer in around
    ) or any(isinstance(outer, ast.For) and _picks_bad(code, outer) for outer in around)


def _picks_bad(code: Code, loop: ast.For) -> bool:
    """Whether a loop goes over what a comprehension has picked for not being finite."""
    source = code.values.get(loop.iter)
    node = source.core.node if source is not None else None
    if not isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp)):
        return False
    tests = [test for generator in node.generators for test in generator.ifs]
    parts = [p for test in tests if test in code.values for p in code.values[test].upstream(16)]
    return any(part.op in ASKS for part in parts)


def _raised(statement: ast.stmt) -> Iterator[str]:
    """Yields the flags that a statement sets."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Constant):
        return
    if statement.value.value is True:
        yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
