"""Repairs that say the same thing in a form that stays finite: nothing is cut off by them."""

from __future__ import annotations

import ast
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from nanguard.diagnose.repairs import Repair, edit
from nanguard.source.edits import SourceFile, argument, called_name, is_function_of

if TYPE_CHECKING:
    from nanguard.diagnose.cause import Case
    from nanguard.replay.tracer.sites import Site

# Methods that choose or arrange elements, so that a logarithm may be taken before or after.
_ARRANGING = (
    "gather", "index_select", "take_along_dim", "select", "squeeze", "unsqueeze", "flatten",
    "reshape", "view", "transpose", "permute", "t", "contiguous",
)  # fmt: skip
# What is added to a sum only to keep it away from zero.
_NEGLIGIBLE = 1e-3
# The share of a loss that another order of operations may change.
_ROUNDING = 1e-3


def logs_without_probabilities(case: Case) -> list[Repair]:
    """Stays with logarithms where a number that may become 0 was computed on the way."""
    every = (binary_cross_entropy, log_sigmoid, log_softmax, log_determinant)
    return next((found for repairs in every if (found := repairs(case))), [])


def binary_cross_entropy(case: Case) -> list[Repair]:
    """Takes torch's own binary cross entropy instead of ``y * log(p) + (1 - y) * log(1 - p)``."""

    def make(file: SourceFile, site: Site) -> str | None:
        call = file.node_at(site, lambda node: called_name(node) == "log")
        found = None if call is None else _entropy_around(file, call)
        if found is None:
            return None
        node, chance, target, form = found
        logit = _logit_of(file, chance, node.lineno)
        given = file.text_of(chance) if logit is None else logit
        name = f"{_functional(file)}.binary_cross_entropy{'' if logit is None else '_with_logits'}"
        if form == "mean":
            return file.replaced([(node, f"{name}({given}, {file.text_of(target)})")])
        new = f'{name}({given}, {file.text_of(target)}, reduction="none")'
        return file.replaced([(node, new if form == "loss" else f"(-{new})")])

    summary = "use torch's binary cross entropy, which never takes the log of 0"
    return _exact(edit(case.origin.site, summary, make))


def _entropy_around(
    file: SourceFile, call: ast.AST
) -> tuple[ast.expr, ast.expr, ast.expr, str] | None:
    """Returns a binary cross entropy around a logarithm.

    Returns:
        What to replace, p, y, and what it is: "mean" for the mean of the loss, "loss" for the loss
        of each, "sum" for what only a minus makes a loss.
    """
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.Add, ast.Sub)):
            continue
        if not any(inner is call for inner in ast.walk(node)):
            continue
        negative = isinstance(node.op, ast.Sub)
        left = _without_minus(node.left) if negative else node.left
        for one, other in ((left, node.right), (node.right, left)):
            first, second = _weighted_log(one), _weighted_log(other)
            if first is None or second is None:
                continue
            (target, chance), (rest, against) = first, second
            if file.text_of(target) == _rest_of(file, rest) and file.text_of(chance) == _rest_of(
                file, against
            ):
                whole = _mean(file, node) if negative else _negative_mean(file, node)
                form = "loss" if negative else "sum"
                return (
                    (node, chance, target, form)
                    if whole is None
                    else (whole, chance, target, "mean")
                )
    return None


def _without_minus(node: ast.expr) -> ast.expr | None:
    """Returns ``y * log(p)`` for ``-y * log(p)`` or ``-(y * log(p))``; None without a minus."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return node.operand
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        weight = node.left
        if isinstance(weight, ast.UnaryOp) and isinstance(weight.op, ast.USub):
            return ast.BinOp(weight.operand, node.op, node.right)
    return None


def _weighted_log(node: ast.expr | None) -> tuple[ast.expr, ast.expr] | None:
    """Returns y and p of ``y * log(p)``."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Mult):
        return None
    for weight, log in ((node.left, node.right), (node.right, node.left)):
        if isinstance(log, ast.Call) and called_name(log) == "log":
            inner = argument(log)
            return None if inner is None else (weight, inner)
    return None


def _rest_of(file: SourceFile, node: ast.expr) -> str | None:
    """Returns ``p`` for ``1 - p``."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
        return None
    one = isinstance(node.left, ast.Constant) and node.left.value == 1
    return file.text_of(node.right) if one else None


def _negative_mean(file: SourceFile, node: ast.expr) -> ast.expr | None:
    """Returns ``-(...).mean()`` or ``-torch.mean(...)`` around an expression, if it stands so."""
    mean = _mean(file, node)
    for outer in ast.walk(file.tree) if mean is not None else ():
        if not isinstance(outer, ast.UnaryOp) or not isinstance(outer.op, ast.USub):
            continue
        if outer.operand is mean:
            return outer
    return None


def _mean(file: SourceFile, node: ast.expr) -> ast.expr | None:
    """Returns ``(...).mean()`` or ``torch.mean(...)`` around an expression, if it stands so."""
    for call in ast.walk(file.tree):
        if not isinstance(call, ast.Call) or called_name(call) != "mean" or call.keywords:
            continue
        extra = [arg for arg in call.args if arg is not node]
        if argument(call) is node and not extra:
            return call
    return None


def log_sigmoid(case: Case) -> list[Repair]:
    """Takes ``logsigmoid`` instead of the logarithm of a sigmoid, or of 1 minus it."""

    def make(file: SourceFile, site: Site) -> str | None:
        call = file.node_at(site, lambda node: called_name(node) == "log")
        inner = argument(call) if isinstance(call, ast.Call) else None
        if call is None or inner is None:
            return None
        rest = _rest_of(file, inner)
        chance = inner.right if rest is not None and isinstance(inner, ast.BinOp) else inner
        logit = _logit_of(file, chance, call.lineno)
        if logit is None:
            return None
        given = logit if rest is None else f"-({logit})"
        return file.replaced([(call, f"{_functional(file)}.logsigmoid({given})")])

    return _exact(edit(case.origin.site, "use logsigmoid instead of the log of a sigmoid", make))


def _logit_of(file: SourceFile, node: ast.expr, line: int) -> str | None:
    """Returns what the sigmoid that an expression stands for is taken of."""
    if isinstance(node, ast.Name):
        value = _value_of(file, node.id, line)
        return None if value is None else _logit_of(file, value, 0)
    if not isinstance(node, ast.Call) or called_name(node) != "sigmoid" or node.keywords:
        return None
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    if owner is None or (isinstance(owner, ast.Name) and owner.id == "self"):
        return None  # a function or a module of the user's
    inner = argument(node)
    return None if inner is None else file.text_of(inner)


def _functional(file: SourceFile) -> str:
    """Returns what a file calls ``torch.nn.functional``."""
    for node in file.tree.body:
        if isinstance(node, ast.Import):
            for name in node.names:
                if name.name == "torch.nn.functional" and name.asname:
                    return name.asname
        if isinstance(node, ast.ImportFrom) and node.module == "torch.nn":
            for name in node.names:
                if name.name == "functional":
                    return name.asname or "functional"
    return "torch.nn.functional"


def log_softmax(case: Case) -> list[Repair]:
    """Takes ``log_softmax`` instead of the logarithm of a softmax, which may be 0."""

    def make(file: SourceFile, site: Site) -> str | None:
        call = file.node_at(site, lambda node: called_name(node) == "log")
        inner = argument(call) if isinstance(call, ast.Call) else None
        if call is None or inner is None:
            return None
        new = _log_of(file, inner, call.lineno)
        return None if new is None else file.replaced([(call, new)])

    return _exact(edit(case.origin.site, "use log_softmax instead of the log of a softmax", make))


def _log_of(file: SourceFile, node: ast.expr, line: int) -> str | None:
    """Returns the logarithm of elements of a softmax, by ``log_softmax``."""
    base = _arranged(node)
    softmax = _softmax_of(file, base, line)
    if softmax is None and isinstance(base, ast.Name) and line:
        # The elements were chosen before: p = softmax(z); q = p.gather(1, y); log(q)
        chosen = _value_of(file, base.id, line)
        softmax = None if chosen is None else _log_of(file, chosen, line)
    text, start = file.text_of(node), file.text_of(base)
    return softmax + text[len(start) :] if softmax and text.startswith(start) else None


def log_determinant(case: Case) -> list[Repair]:
    """Takes ``slogdet`` instead of the logarithm of a determinant, which soon leaves its type."""

    def make(file: SourceFile, site: Site) -> str | None:
        call = file.node_at(site, lambda node: called_name(node) == "log")
        inner = argument(call) if isinstance(call, ast.Call) else None
        if call is None or inner is None:
            return None
        name = _determinant(file, inner, call.lineno)
        return None if name is None else file.replaced([(call, f"{name}[1]")])

    summary = "use slogdet instead of the log of a determinant, which is too small or too large"
    return _exact(edit(case.origin.site, summary, make))


def _determinant(file: SourceFile, node: ast.expr, line: int) -> str | None:
    """Returns the determinant that an expression stands for, or its size, as a ``slogdet``."""
    if isinstance(node, ast.Name):
        value = _value_of(file, node.id, line) if line else None
        return None if value is None else _determinant(file, value, 0)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return None
    name, inner = called_name(node), argument(node)
    if name in ("abs", "absolute"):
        return None if inner is None else _determinant(file, inner, line)
    owner = node.func.value
    if name != "det" or (isinstance(owner, ast.Name) and owner.id == "self"):
        return None  # a function or a method of the user's
    called = file.text_of(node.func)
    return called.removesuffix("det") + "slogdet" + file.text_of(node)[len(called) :]


def _is_same(plain: float, changed: float) -> bool:
    """Returns whether two losses differ by rounding only."""
    return abs(changed - plain) <= _ROUNDING * max(abs(plain), 1e-3)


def _exact(repairs: list[Repair]) -> list[Repair]:
    return [replace(repair, exact=True) for repair in repairs]


def _arranged(node: ast.expr) -> ast.expr:
    """Returns what elements are chosen from: ``p`` for ``p[rows, y]`` and ``p.gather(1, y)``."""
    while True:
        if isinstance(node, ast.Subscript):
            node = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in _ARRANGING
            and not is_function_of(node.func.value)
        ):
            node = node.func.value
        else:
            return node


def _softmax_of(file: SourceFile, node: ast.expr, line: int) -> str | None:
    """Returns the softmax that an expression stands for as a ``log_softmax``."""
    if isinstance(node, ast.Name):
        value = _value_of(file, node.id, line)
        return None if value is None else _softmax_of(file, value, 0)
    if not isinstance(node, ast.Call) or called_name(node) != "softmax":
        return None
    owner = node.func.value if isinstance(node.func, ast.Attribute) else None
    own = isinstance(owner, ast.Attribute) or (isinstance(owner, ast.Name) and owner.id == "self")
    if owner is None or (own and not is_function_of(owner)):
        return None  # a function or a module of the user's
    name = file.text_of(node.func)
    rest = file.text_of(node)[len(name) :]
    return f"{name.removesuffix('softmax')}log_softmax{rest}"


def _value_of(file: SourceFile, name: str, line: int) -> ast.expr | None:
    """Returns what a name was set to before a line, if it would be the same on that line."""
    scope = file.scope_of(line)
    made = [(node, target) for node in ast.walk(scope) for target in _targets(node)]
    mine = [node for node, target in made if target == name]
    if len(mine) != 1 or not isinstance(mine[0], ast.Assign) or len(mine[0].targets) != 1:
        return None
    value, start = mine[0].value, mine[0].lineno
    used = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    changed = {target for node, target in made if start <= getattr(node, "lineno", 0) <= line}
    return value if start < line and not used & changed else None


def _targets(node: ast.AST) -> list[str]:
    """Returns the names that a statement sets."""
    if isinstance(node, ast.Assign):
        targets: list[ast.expr] = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For, ast.NamedExpr)):
        targets = [node.target]
    else:
        return []
    return [n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)]


def shifted_exp(case: Case) -> list[Repair]:
    """Subtracts the maximum before exp where the result is divided by its own sum."""

    def make(file: SourceFile, site: Site) -> str | None:
        call = file.node_at(site, lambda node: called_name(node) == "exp")
        inner = argument(call) if isinstance(call, ast.Call) else None
        if call is None or inner is None or any(isinstance(n, ast.Call) for n in ast.walk(inner)):
            return None  # a call might give something else the second time
        over = _normalised_over(file, call)
        if over is None:
            return None
        text = file.text_of(inner)
        text = text if isinstance(inner, (ast.Name, ast.Attribute)) else f"({text})"
        shifted = f"{text} - {text}.amax({over}, keepdim=True)"
        first = isinstance(call, ast.Call) and inner in call.args
        return file.replaced([(inner, shifted if first else f"({shifted})")])

    return _exact(edit(case.origin.site, "subtract the maximum before exp: a / sum(a) stays", make))


def shifted_by_largest(case: Case) -> list[Repair]:
    """Subtracts the largest exponent of all, if what follows only compares what exp gives.

    Whether it does is tried on a good step, which has to stay what it was.
    """

    def make(file: SourceFile, site: Site, more: str = "") -> str | None:
        call = file.node_at(site, lambda node: called_name(node) == "exp")
        inner = argument(call) if isinstance(call, ast.Call) else None
        if not isinstance(call, ast.Call) or inner is None:
            return None
        text = file.text_of(inner)
        if isinstance(inner, ast.Name):
            shifted = f"{text} - {text}.max().detach(){more}"
        else:
            shifted = f"(exponent := {text}) - exponent.max().detach(){more}"
            if "exponent" in {n.id for n in ast.walk(file.tree) if isinstance(n, ast.Name)}:
                return None
        return file.replaced([(inner, shifted if inner in call.args else f"({shifted})")])

    summary = "subtract the largest exponent before exp"
    found = edit(case.origin.site, summary, make)
    # The largest one of a good step may be 0: 1 less shows whether it counts.
    less = edit(case.origin.site, summary, partial(make, more=" - 1.0"))
    for repair in (*found, *less):
        assert repair.source is not None  # noqa: S101 - a change of text has one
        path, text = repair.source
        repair.on_good = case.lab.good_step_with(source={path: text})
    same = [r.on_good is not None and _is_same(*r.on_good) for r in (*found, *less)]
    return _exact(found) if all(same) else []


def _normalised_over(file: SourceFile, call: ast.AST) -> str | None:
    """Returns the dimension over which a result is divided by its sum, if nobody else reads it."""
    scope = file.scope_of(getattr(call, "lineno", 0))
    made = [node for node in ast.walk(scope) if isinstance(node, ast.Assign) and node.value is call]
    if len(made) != 1 or len(made[0].targets) != 1 or not isinstance(made[0].targets[0], ast.Name):
        return None
    name = made[0].targets[0].id
    reads = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == name]
    sets = [node for node in ast.walk(scope) if name in _targets(node)]
    # Once where it is set, twice in the quotient.
    if len(sets) != 1 or len(reads) != 3:
        return None
    for node in ast.walk(scope):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and _is(node.left, name):
            return _summed_over(file, node.right, name, node.lineno)
    return None


def _summed_over(file: SourceFile, node: ast.expr, name: str, line: int) -> str | None:
    if isinstance(node, ast.Name):
        value = _value_of(file, node.id, line)
        return None if value is None else _summed_over(file, value, name, 0)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        small = node.right.value if isinstance(node.right, ast.Constant) else None
        negligible = isinstance(small, float) and small <= _NEGLIGIBLE
        return _summed_over(file, node.left, name, line) if negligible else None
    if not isinstance(node, ast.Call) or called_name(node) != "sum":
        return None
    summed = argument(node)
    if summed is None or not _is(summed, name):
        return None
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    rest = [arg for arg in node.args if arg is not summed]
    kept = keywords.get("keepdim", rest[1] if len(rest) > 1 else None)
    over = keywords.get("dim", rest[0] if rest else None)
    if over is None or not isinstance(kept, ast.Constant) or kept.value is not True:
        return None
    return file.text_of(over)


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
