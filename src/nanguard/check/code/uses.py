"""What becomes of a value: whether it goes on into the training step, or is only looked at."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

# Methods that give a Python number or an array, through which no gradient flows.
_LEAVES = frozenset({"item", "tolist", "numpy", "cpu", "detach", "round", "long", "int"})
# What keeps a value as it is on its way there.
_KEEPS = frozenset(
    {"float", "mean", "sum", "squeeze", "view", "reshape", "double", "to", "max", "min", "clone"}
)
_SHOWS = re.compile(
    r"print|log|log_dict|log_metrics|logger|info|debug|warning|write|add_scalars?|add_histogram"
    r"|add_image|set_postfix(_str)?|set_description|report|display|imshow|plot|record|format|tqdm"
    r"|save_image|imsave|imwrite|update_meter|str"
)
_MEASURES = re.compile(
    r"(.*_)?(acc|accuracy|accs|prec|precision|recall|f1|iou|miou|dice_?score|psnr|ssim|mae|rmse|metrics?"
    r"|top\d|ppl|perplexity|correct|wer|cer|auc|ndcg|mrr)(_.*|\d*)|m?ap"
)
_NAN_EXPECTED = frozenset({"nan_to_num", "nan_to_num_", "nanmean", "nansum", "nanmedian"})
_NO_GRADIENT = frozenset({"round", "floor", "ceil", "trunc", "argmax", "argmin", "int", "long"})


def is_only_shown(code: Code, value: Value) -> bool:
    """Returns whether a value goes nowhere but to a log, a screen or a measure of quality."""
    if value.node is None:
        return False
    end = _end(code, value.node)
    if end == "shown":
        return True
    name = _given_name(code, value.node)
    if name is None or value.scope is None:
        return False
    if _MEASURES.fullmatch(name.lower()):
        return True
    uses = [*_uses(code, value, name)]
    return bool(uses) and all(_end(code, use) == "shown" for use in uses)


def is_repaired_at_once(code: Code, node: ast.AST | None) -> bool:
    """Returns whether NaN in what an expression gives is replaced where it stands."""
    for parent in code.ancestors(node) if node is not None else ():
        if isinstance(parent, ast.stmt):
            return False
        called = _called(parent)
        if called in _NAN_EXPECTED:
            return True
        if isinstance(parent, ast.Attribute) and parent.attr in _NAN_EXPECTED:
            return True
    return False


def is_repaired_below(code: Code, node: ast.AST | None) -> bool:
    """Returns whether the next statement replaces NaN in what the one of an expression assigns."""
    statement = code.statement_of(node) if node is not None else None
    if statement is None:
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    body = getattr(code.parents.get(statement), "body", None)
    below = body[body.index(statement) + 1 :][:1] if isinstance(body, list) and names else []
    return any(
        _called(node) in _NAN_EXPECTED and any(getattr(a, "id", "") in names for a in node.args)
        for after in below
        for node in ast.walk(after)
        if isinstance(node, ast.Call)
    )


def is_rounded(code: Code, node: ast.AST | None) -> bool:
    """Returns whether what an expression gives is rounded, which stops its gradient."""
    for parent in code.ancestors(node) if node is not None else ():
        if isinstance(parent, ast.stmt):
            return False
        if _called(parent) in _NO_GRADIENT or (
            isinstance(parent, ast.Attribute) and parent.attr in _NO_GRADIENT
        ):
            return True
    return False


def _end(code: Code, node: ast.AST) -> str:
    """Returns ``shown`` if an expression ends in something that is only looked at."""
    for parent in code.ancestors(node):
        if isinstance(parent, (ast.FormattedValue, ast.JoinedStr)):
            return "shown"
        if isinstance(parent, ast.Call):
            called = _called(parent)
            if called in _LEAVES or _SHOWS.fullmatch(called):
                return "shown"
            if called in ("int", "len", "isinstance"):
                return "shown"
            if node is not parent.func and called not in _KEEPS and called != "float":
                return "used"
        elif isinstance(parent, ast.stmt):
            return "used"
        node = parent
    return "used"


def _given_name(code: Code, node: ast.AST) -> str | None:
    """Returns the name that a statement gives what an expression is the whole value of."""
    statement = code.statement_of(node)
    if isinstance(statement, ast.AugAssign):
        target: ast.expr | None = statement.target
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    else:
        return None
    if isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        return str(target.slice.value)
    return target.id if isinstance(target, ast.Name) else None


def _uses(code: Code, value: Value, name: str) -> Iterator[ast.Name]:
    """Yields where a name is read after a value was given to it, in the same function."""
    scope = value.scope.node if value.scope is not None else None
    if scope is None:
        return
    for node in ast.walk(scope):
        if (
            isinstance(node, ast.Name)
            and node.id == name
            and isinstance(node.ctx, ast.Load)
            and node.lineno > value.line
        ):
            yield node


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))
