"""What rules about code have in common: naming a place, and changing it."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any, ClassVar

from nanguard.check.code.code import Code
from nanguard.check.code.places import is_aside, is_evaluation
from nanguard.check.code.training import is_test
from nanguard.check.rule import Reads, Rule
from nanguard.findings import Edit, Finding, Severity

if TYPE_CHECKING:
    from nanguard.check.code.values import Value


class CodeRule(Rule[Code]):
    """A rule that reads training code."""

    reads: ClassVar[Reads] = "code"

    def at(
        self, code: Code, node: ast.AST | None, message: str, *, weak: bool = False, **more: Any
    ) -> Finding:
        """Returns a finding about an expression or a statement.

        Args:
            code: The file.
            node: What the finding is about.
            message: What was found.
            weak: Whether little speaks for it; it is then no more than a remark. So is
                everything about test files, whose data is known, about files that only
                evaluate or use a model, and about functions that no training calls.
            more: Further fields of the finding, such as its fixes.
        """
        if weak or is_test(code) or is_evaluation(code) or is_aside(code, node):
            more["severity"] = Severity.INFO
        line = column = None
        if node is not None:
            line, column = code.text.position(code.span(node)[0])
        return self.finding(message, path=code.text.path, line=line, column=column, **more)


def replaced(code: Code, node: ast.AST, text: str) -> Edit:
    """Returns the edit that writes something else in place of an expression."""
    start, end = code.span(node)
    return Edit(start, end, text)


def operand(value: Value, place: int = 0) -> ast.expr | None:
    """Returns an operand of an operation as it is written there."""
    node = value.node
    if isinstance(node, ast.BinOp):
        written = [node.left, node.right]
    elif isinstance(node, ast.Call):
        is_method = isinstance(node.func, ast.Attribute) and not value.path
        receiver = [node.func.value] if is_method else []  # type: ignore[attr-defined]
        written = [*receiver, *node.args]
    else:
        return None
    return written[place] if place < len(written) else None


def bare(code: Code, node: ast.expr) -> str:
    """Returns an expression so that a method can be called on it.

    Its own parentheses are no part of it: one it begins with belongs to its left side.
    """
    text = code.segment(node)
    simple = isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
    return text if simple else f"({text})"
