"""A standard deviation over what may be a single element."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_REGROUP = frozenset({"view", "reshape", "unflatten", "rearrange", "chunk", "split"})


class StdOfFew(CodeRule):
    """`std()` or `var()` over a dimension that can hold one element, used as a divisor.

    *Why it breaks a run*: the unbiased form divides by n - 1, so the standard deviation of one
    element is NaN, and no eps added to it helps. A group of one, an episode of one step, a mask
    that leaves one element: each is rare and legal.

    Write `std(dim, unbiased=False)` (or `correction=0`): 0 for one element, and then the eps does
    its work.
    """

    code = "SRC029"
    name = "std-of-few"
    severity = Severity.INFO
    seen_in = "https://github.com/pytorch/pytorch/issues/29372"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef advantages(r, g: int):\n    r = r.view(-1, g)\n"
            "    std = r.std(dim=1, keepdim=True)\n"
            "    return (r - r.mean(1, True)) / (std + 1e-4)\n",
            line=6,
        ),
        Fails(
            "import torch\n\n\ndef scale(episodes):\n"
            "    return [(r - r.mean()) / (r.std() + 1e-6) for r in episodes]\n",
            line=5,
            fixed="import torch\n\n\ndef scale(episodes):\n"
            "    return [(r - r.mean()) / (r.std(unbiased=False) + 1e-6) for r in episodes]\n",
        ),
        Passes(
            "import torch\n\n\ndef advantages(r, g: int):\n    r = r.view(-1, g)\n"
            "    return r / (r.std(dim=1, keepdim=True, unbiased=False) + 1e-4)\n"
        ),
        Passes("import torch\n\n\ndef norm(x):\n    return x / (x.std(-1, keepdim=True) + 1e-6)\n"),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        divisors = _divisors(code)
        for spread in code.of("std", "var"):
            if not spread.inputs or _is_biased(spread) or id(spread.node) not in divisors:
                continue
            value = spread.inputs[0]
            if not _can_hold_one(code, spread, value) or _size_is_checked(value, spread):
                continue
            if any(part.op.startswith("numpy.") for part in value.upstream(12)):
                continue
            yield self.at(
                code,
                spread.node,
                f"{spread.op} of what can be a single element is NaN, whatever is added to it",
                fixes=(Fix("use unbiased=False (correction=0)", edits=_edits(code, spread)),),
            )


def _edits(code: Code, spread: Value) -> tuple[Edit, ...]:
    """Returns the edit that adds the argument, where none says otherwise."""
    node = spread.node
    if not isinstance(node, ast.Call) or {"unbiased", "correction"} & spread.keywords.keys():
        return ()
    _, end = code.span(node)
    comma = ", " if node.args or node.keywords else ""
    return (Edit(end - 1, end - 1, f"{comma}unbiased=False"),)


def _divisors(code: Code) -> set[int]:
    """Returns the spreads that something is divided by, directly or with an eps."""
    found: set[int] = set()
    for quotient in code.of("div", "rsqrt"):
        divisor = quotient.inputs[-1] if quotient.inputs else None
        if divisor is None or (quotient.op == "div" and len(quotient.inputs) < 2):
            continue
        for part in divisor.upstream(12):
            if part.op in ("std", "var"):
                found.add(id(part.node))
    return found


def _is_biased(spread: Value) -> bool:
    unbiased = spread.keywords.get("unbiased")
    correction = spread.keywords.get("correction")
    if unbiased is not None and unbiased.const is False:
        return True
    if correction is not None and correction.number() == 0:
        return True
    return any(part.const is False for part in spread.inputs[1:])


def _can_hold_one(code: Code, spread: Value, value: Value) -> bool:
    dim = spread.arg(1, "dim")
    over_all = dim is None or dim.const is None
    if any(part.op in ("element", "enumerate", "zip") for part in value.upstream(4)):
        return over_all and _in_loop(code, spread)
    source = value
    while source.op == "named" and source.inputs:
        source = source.inputs[0]
    first = over_all or (dim is not None and dim.const == 0)
    if source.op == "getitem" and len(source.inputs) > 1:
        return first and (source.inputs[1].has("mask", "bool") or _picks(code, spread, source))
    if dim is not None and dim.const == 0 and _is_forward(spread):
        return True
    if source.op in _REGROUP and not over_all:
        return dim is not None and dim.const in (1, -1) and _grouped(source)
    return False


def _picks(code: Code, spread: Value, source: Value) -> bool:
    """Returns whether a loop picks some elements each time, by an index it is given."""
    index = source.inputs[1]
    given = any(part.op == "element" for part in index.upstream(3)) and index.const is None
    return given and _in_loop(code, spread)


def _size_is_checked(value: Value, spread: Value) -> bool:
    """Returns whether a condition around has looked at how many there are."""
    queue, guards = [value], spread.guards
    for part in queue:
        if part.name in guards and not part.has("mask", "bool"):
            return True
        # What picks elements says nothing about how many there are.
        queue += part.inputs[:1] if part.op == "getitem" else part.inputs[:4]
        if len(queue) > 24:
            return False
    return False


def _is_forward(spread: Value) -> bool:
    """Returns whether this is the forward of a module, whose first dimension is the batch."""
    scope = spread.scope
    return scope is not None and scope.name == "forward" and scope.cls is not None


def _grouped(source: Value) -> bool:
    """Returns whether rows were cut into groups of a size the caller chooses."""
    sizes = source.inputs[1:]
    if source.op in ("view", "reshape") and len(sizes) == 1 and sizes[0].items:
        sizes = sizes[0].items
    if len(sizes) == 2:
        return any(size.hi < 0 for size in sizes)
    return source.op == "rearrange"


def _in_loop(code: Code, spread: Value) -> bool:
    if spread.node is None:
        return False
    return any(
        isinstance(parent, (ast.For, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp))
        for parent in code.ancestors(spread.node)
    )
