"""Places where bad gradients are made to look good."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nanguard.check.code.conditions import Conditions
from nanguard.check.code.reach import within
from nanguard.check.code.roles import Roles
from nanguard.check.code.training import Training, named

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_HOOKS = frozenset(
    {"register_hook", "register_full_backward_hook", "register_backward_hook"}
    | {"register_post_accumulate_grad_hook"}
)
ASKS = frozenset({"isnan", "isinf", "isfinite", "math.isnan", "math.isfinite", "numpy.isnan"})


def cleaned_gradients(code: Code) -> Iterator[tuple[ast.AST, bool]]:
    """Yields where gradients are cleaned or zeroed for being bad, and whether by a hook."""
    training = Training.of(code)
    roles = Roles.of(code)
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


def _is_of_gradient(roles: Roles, event: Value) -> bool:
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
    for test in Conditions.of(code).tests:
        if test.function is not event.scope:
            continue
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
