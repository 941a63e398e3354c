"""Questions about whether a value is finite, and the conditions they are part of."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.check.code.scopes import Function
    from nanguard.check.code.values import Value


@dataclass(frozen=True, slots=True)
class Check:
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
    checks: tuple[Check, ...]
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
