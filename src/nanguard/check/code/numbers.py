"""Questions about values that several rules ask."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from nanguard.check.code.values import INF, Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code

# What an expression may be made of and still be a table: numbers known before training.
_TABLE = frozenset(
    {
        "linspace", "arange", "cumprod", "cumsum", "ones", "zeros", "logspace", "flip", "tensor",
        "as_tensor", "full", "neg", "add", "sub", "mul", "div", "pow", "sqrt", "log", "exp", "cos",
        "clamp", "named", "getitem", "cat", "float", "double", "to", "stack", "view", "eye",
        "type_as", "norm", "sum", "mean", "sin", "setitem", "unsqueeze", "reshape", "std", "var",
        "max", "min", "abs", "meshgrid", "expand", "repeat", "floor", "join", "squeeze",
        "math.log", "math.sqrt", "math.exp", "math.cos", "math.sin", "outer", "floordiv", "mod",
    }
)  # fmt: skip
_PICKS = frozenset({"getitem", "setitem"})
# What people call sizes and other whole numbers that a table is made from.
_SIZES = re.compile(
    r"(d|n|q|t|h|w|num|dim|len|max|min|in|out|embed\w*|hidden|head|base|theta|steps?|size|length)"
    r"(_\w+)?|\w+_(dim|len|size|length|steps|model|channels|features)|temperature|exponential"
)
_MADE = frozenset(
    {"tensor", "randint", "rand", "randn", "ones", "zeros", "full", "arange", "linspace", "eye"}
)
_TRUTH = re.compile(r"(^|_)(gt|truth|target|label|true|ref)(s|_|$)|groundtruth")
_SHOW = re.compile(
    r"metrics|eval|visual|plot|draw|accuracy|psnr|nmse|distortion_ratio|confusion|meter$|evaluator"
    r"|_(mae|rmse|fid|ssim|iou|auc)$"
)
_SAFE_LEAVES = frozenset({"linspace", "arange", "ones", "zeros", "logspace", "full", "eye"})


def can_be_zero(value: Value) -> bool:
    """Returns whether nothing keeps a value away from zero."""
    if value.lo > 0 or value.hi < 0 or value.has("padded", "chosen", "bounded-below"):
        return False
    return not (is_guarded(value) or is_table(value) or is_made_here(value))


def is_guarded(value: Value) -> bool:
    """Returns whether a condition around a place has looked at a value."""
    guards = value.guards
    return bool(guards) and any(name in guards for name in names_of(value))


def guarded_by(value: Value, guards: frozenset[str]) -> bool:
    """Returns whether one of these conditions has looked at a value."""
    return bool(guards) and any(name in guards for name in names_of(value))


def names_of(value: Value, limit: int = 12) -> Iterator[str]:
    """Yields the names a value has, and those of what it was made from directly."""
    for step, part in enumerate(value.upstream(limit)):
        if part.name and (
            part.op in ("named", "", "attribute", "field", "join", "getitem") or step == 0
        ):
            yield part.name


def is_table(value: Value) -> bool:
    """Returns whether a value is computed from constants alone, such as a noise schedule."""
    leaves = 0
    seen: set[int] = set()
    queue = [value]
    while queue and len(seen) < 60:
        part = queue.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        if part.op in _SAFE_LEAVES:
            leaves += 1  # how many there are is no matter
        elif part.inputs:
            if part.op not in _TABLE:
                return False
            # What picks elements has no part in their numbers.
            queue += [part.inputs[0], *part.inputs[2:]] if part.op in _PICKS else part.inputs
        elif part.number() is None and not _SIZES.fullmatch(part.name.lower()):
            return False
    return leaves > 0


def is_made_here(value: Value) -> bool:
    """Returns whether a value is made from literals and random numbers alone, as tests do it."""
    leaves = 0
    for part in value.upstream(40):
        if part.op in _MADE:
            leaves += 1
        elif not part.inputs and part.number() is None and not (part.path or part.items):
            return False
    return leaves > 0


def is_bounded(value: Value) -> bool:
    """Returns whether a value has an upper bound."""
    return value.hi < INF or value.has("shifted", "bounded-above")


def is_minus_inf(value: Value | None) -> bool:
    """Returns whether a value is minus infinity."""
    return value is not None and value.number() == -INF


def is_number(value: Value) -> bool:
    """Returns whether a value is a Python number, through which no gradient flows."""
    return any(part.op in ("item", "tolist", "numpy", "total") for part in value.upstream(16))


def is_given(value: Value) -> bool:
    """Returns whether a value is made from ground truth alone, which needs no gradient."""
    leaves = [part for part in value.upstream(24) if not part.inputs and part.number() is None]
    return bool(leaves) and all(_TRUTH.search(part.name.lower()) for part in leaves)


def is_for_show(value: Value) -> bool:
    """Returns whether a place is about measuring or showing, going by names around it."""
    scope = value.scope
    if scope is None:
        return False
    around = scope.name + (f" {scope.cls.name}" if scope.cls is not None else "")
    return bool(_SHOW.search(around.lower()))


def is_about_training(code: Code) -> bool:
    """Returns whether gradients flow in a file, as far as it says: a module, a loss, a step."""
    return "backward" in code.operations or any(
        "loss" in function.name.lower() or (function.cls is not None and function.cls.is_module())
        for function in code.functions
    )


def ends_as_number(code: Code, node: ast.AST | None) -> bool:
    """Returns whether an expression is turned into a Python number where it stands."""
    for parent in code.ancestors(node) if node is not None else ():
        if isinstance(parent, ast.stmt):
            return False
        if isinstance(parent, ast.Attribute) and parent.attr in ("item", "tolist"):
            return True
        if isinstance(parent, ast.Call) and getattr(parent.func, "id", "") in ("float", "int"):
            return True
    return False
