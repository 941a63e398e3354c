"""What the syntax of training code shows: conditions, assertions, and what is logged."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from nanguard.advice.checklist.code_traces import FINITE
from nanguard.advice.checklist.facts import Trace
from nanguard.check.code.hints import kinds_of
from nanguard.check.code.training import Training

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code

_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_LEAVES = (ast.Continue, ast.Return, ast.Raise, ast.Break)
_LOGS = frozenset(
    ("log", "log_dict", "info", "print", "add_scalar", "add_scalars", "write", "set_postfix",
     "writerow", "log_metrics")
)  # fmt: skip
_WHOLE = re.compile(
    r"(?:(?:total|train|training|val|valid|validation|eval|test|epoch|running|avg|mean|best|sum"
    r"|cum|step|batch|final|loss)_?)*(?:loss(?:es)?)(?:_?(?:sum|total|val|value|item|avg|mean))?"
)
_NO_TERM = re.compile(r"scale|meter|weight|mask|coef|_fn$|func|dict|hist|type|name|log_|best|avg")
_WARM = re.compile(r"warm_?up", re.IGNORECASE)
_TERM = re.compile(r"[A-Za-z_]\w*")
_TRIAL = re.compile(
    r"^(limit_train_batches|overfit_batches|fast_dev_run|max_train_samples|max_samples"
    r"|data_fraction|subset_ratio|train_fraction|debug_samples|num_debug_samples|subset_size)$"
)


def syntax_traces(code: Code) -> Iterator[Trace]:
    """Yields what the syntax of a file shows."""
    training = Training.of(code)
    steps = {id(step.node) for step in training.steps}
    for node in ast.walk(code.tree):
        if isinstance(node, (ast.Assert, ast.If)):
            yield from _label_check(code, node)
        if isinstance(node, ast.If) and training.trains:
            yield from _skip(code, node, steps)
        if isinstance(node, ast.Call):
            yield from _logged(code, node)
        if isinstance(node, ast.Compare) and any(_WARM.search(name) for name in _names(node)):
            yield Trace("warmup", code.text.path, node.lineno, "the rate is warmed up by hand")
        yield from _trial(code, node)


def _label_check(code: Code, node: ast.Assert | ast.If) -> Iterator[Trace]:
    if isinstance(node, ast.If) and not any(isinstance(s, ast.Raise) for s in node.body):
        return
    for compare in ast.walk(node.test):
        ordered = isinstance(compare, ast.Compare) and isinstance(compare.ops[0], _ORDERED)
        if ordered and any("labels" in kinds_of(name) for name in _names(compare)):
            yield Trace(
                "label-check", code.text.path, node.lineno, "labels are compared and refused"
            )
            return


def _skip(code: Code, node: ast.If, steps: set[int]) -> Iterator[Trace]:
    """Yields a condition on finite numbers that leaves a step out."""
    if not any(name in FINITE for name in _names(node.test)) and not _asks(code, node.test):
        return
    leaves = any(isinstance(inner, _LEAVES) for inner in node.body)
    holds = any(id(inner) in steps for part in node.body for inner in ast.walk(part))
    if leaves or holds:
        yield Trace("skip", code.text.path, node.lineno, "a bad step is left out here")


def _asks(code: Code, test: ast.expr) -> bool:
    """Returns whether a condition is one on a value that was made by asking for finite numbers."""
    for node in ast.walk(test):
        value = code.values.get(node)
        if value is not None and any(part.op in FINITE for part in value.upstream(16)):
            return True
    return False


def _logged(code: Code, call: ast.Call) -> Iterator[Trace]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "loss" and len(call.keywords) > 1:
        terms = [k.arg for k in call.keywords if k.arg]
    elif name in _LOGS:
        terms = _terms(call)
    else:
        return
    if len(terms) > 1:
        listed = ", ".join(terms[:4])
        yield Trace("loss-terms", code.text.path, call.lineno, f"reports {listed}")


def _terms(call: ast.Call) -> list[str]:
    """Returns the names of single terms of a loss that a call mentions."""
    found: dict[str, None] = {}
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        for name in _names(argument):
            low = name.lower()
            if "loss" in kinds_of(name) and not (_WHOLE.fullmatch(low) or _NO_TERM.search(low)):
                found[name] = None
    return list(found)


def _trial(code: Code, node: ast.AST) -> Iterator[Trace]:
    name = node.arg if isinstance(node, (ast.keyword, ast.arg)) else ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 40:
        name = node.value.lstrip("-").replace("-", "_")
    if name and _TRIAL.match(name):
        words = f"{name}: a part of the data can be tried"
        yield Trace("small-trial", code.text.path, getattr(node, "lineno", None), words)


def _names(node: ast.AST) -> Iterator[str]:
    """Yields the names and the keys that an expression mentions."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            for word in inner.value[:200].replace("/", " ").split():
                if _TERM.fullmatch(word):
                    yield word
