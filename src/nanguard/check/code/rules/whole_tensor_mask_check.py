"""A guard for masked rows that looks at the whole tensor."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.value_questions import is_minus_inf
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value


class WholeTensorMaskCheck(CodeRule):
    """`(scores == -inf).all()` over the whole tensor as a guard for fully masked rows.

    *Why it breaks a run*: the test is true only if every row of every head of every sample is
    masked. One bad row among many, the case it was written for, passes, and its softmax is NaN.

    Ask row by row: `(scores == -inf).all(dim=-1, keepdim=True)`, and fill those rows.
    """

    code = "SRC015"
    name = "whole-tensor-mask-check"
    severity = Severity.WARNING
    seen_in = "https://github.com/pytorch/pytorch/issues/103749"
    examples: ClassVar = (
        Fails(
            'import torch\n\n\ndef f(a):\n    if (a == float("-inf")).all():\n'
            "        a = torch.zeros_like(a)\n    return a.softmax(-1)\n",
            line=5,
        ),
        Fails(
            "import torch\n\n\ndef f(a):\n    if torch.all(torch.isinf(a)):\n        return a * 0\n"
            "    return a.softmax(-1)\n",
            line=5,
        ),
        Passes(
            'import torch\n\n\ndef f(a):\n    dead = (a == float("-inf")).all(-1, keepdim=True)\n'
            "    return a.masked_fill(dead, 0.0).softmax(-1)\n"
        ),
        Passes("import torch\n\n\ndef f(y):\n    return not bool((y == -100).all())\n"),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        for test in code.of("compare"):
            if test.name == "Eq" and _asks_for_the_maximum(test) and _decides(code, test):
                yield self._told(code, test)
        for test in code.of("all", "any"):
            if len(test.inputs) != 1 or "dim" in test.keywords or "axis" in test.keywords:
                continue
            tested = test.inputs[0].core
            negated = tested.op in ("not", "invert")
            if negated and tested.inputs:
                tested = tested.inputs[0].core
            if not _asks_for_minus_inf(tested) or (test.op == "any") != _is_opposite(
                tested, negated
            ):
                continue
            if _decides(code, test):
                yield self._told(code, test)

    def _told(self, code: Code, test: Value) -> Finding:
        return self.at(
            code,
            test.node,
            "true only if every row is masked: one fully masked row passes unseen",
            fixes=(Fix("test row by row: .all(dim=-1, keepdim=True)"),),
        )


def _asks_for_the_maximum(test: Value) -> bool:
    """Returns whether the largest of all scores is compared with -inf."""
    for part in test.inputs:
        core = part.core
        whole = core.op in ("max", "amax") and len(core.inputs) == 1 and not core.keywords
        if whole and any(is_minus_inf(other) for other in test.inputs):
            return True
    return False


def _asks_for_minus_inf(tested: Value) -> bool:
    if tested.op in ("isneginf", "isinf"):
        return True
    if tested.op in ("compare", "eq", "ne", "gt"):
        return any(is_minus_inf(part) for part in tested.inputs)
    return tested.op == "isfinite"


def _is_opposite(tested: Value, negated: bool) -> bool:  # noqa: FBT001
    """Returns whether a test is true for what is *not* masked."""
    other = tested.op in ("isfinite", "ne", "gt") or tested.name in ("NotEq", "Gt")
    return other != negated


def _decides(code: Code, test: Value) -> bool:
    """Returns whether something depends on it, in a function that takes a softmax."""
    scope = test.scope
    if scope is None or test.node is None:
        return False
    about_masks = any(e.op in ("softmax", "masked_fill", "log_softmax") for e in scope.events)
    for parent in code.ancestors(test.node):
        if isinstance(parent, (ast.If, ast.IfExp, ast.While, ast.Assign, ast.Return, ast.Assert)):
            return about_masks
        if isinstance(parent, ast.stmt):
            return False
    return False
