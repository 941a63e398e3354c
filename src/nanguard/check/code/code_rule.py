"""What rules about code share: naming and changing a place; masks; forms of probabilities."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any, ClassVar

from nanguard.check.code.code import Code
from nanguard.check.code.training_path import Claim, may_warn
from nanguard.check.code.values import INF
from nanguard.check.rule import Reads, Rule
from nanguard.findings import Edit, Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.values import Value


class CodeRule(Rule[Code]):
    """A rule that reads training code.

    Attributes:
        claim: What it says: what the code does, or what a value in it can become.
    """

    reads: ClassVar[Reads] = "code"
    claim: ClassVar[Claim] = "code"

    def at(
        self,
        code: Code,
        node: ast.AST | None,
        message: str,
        *,
        weak: bool = False,
        shown: bool = False,
        claim: Claim | None = None,
        **more: Any,
    ) -> Finding:
        """Returns a finding about an expression or a statement.

        Whether it is more than a remark is decided by ``training_path.may_warn``.

        Args:
            code: The file.
            node: What the finding is about.
            message: What was found.
            weak: Whether something speaks against it; it is then no more than a remark.
            shown: Of a rule about values, whether the code that was read brings the value there;
                otherwise it is no more than a remark.
            claim: What this finding says, where that is not what the rule says in general.
            more: Further fields of the finding, such as its fixes.
        """
        if weak or not may_warn(code, node, claim or self.claim, shown=shown):
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


# Masks that leave something in every row.
_LEAVES_ONE = frozenset(
    {"tril", "triu", "tril_indices", "eye", "topk", "kthvalue", "cumsum", "sort", "argsort",
     "generate_square_subsequent_mask", "create_causal_mask", "multinomial"}
)  # fmt: skip
_CAUSAL = re.compile(r"causal|future|subsequent|look_?ahead|^tri$|triangular|autoregressive|^bias$")
# What deals with the NaN of such a row afterwards, well or badly.
_MENDS = frozenset({"nan_to_num", "isnan", "isfinite", "isneginf"})
_FILLS = frozenset({"masked_fill", "setitem", "index_fill", "scatter"})
_COMPARISONS = frozenset({"compare", "le", "lt", "gt", "ge"})
_STOP = frozenset({"matmul", "einsum", "call", "conv1d", "conv2d", "linear", "softmax", "bmm"})


def fills_with_minus_inf(value: Value) -> Iterator[Value]:
    """Yields the operations that wrote -inf into a value."""
    queue: list[Value] = [value]
    seen: set[int] = set()
    while queue and len(seen) < 60:
        part = queue.pop(0)
        if id(part) in seen or part.op in _STOP:
            continue
        seen.add(id(part))
        by_mask = part.op in _FILLS and _last_is_minus_inf(part)
        by_choice = part.op == "where" and any(p.lo == p.hi == -INF for p in part.inputs[1:3])
        if by_mask or by_choice:
            yield part
        queue += part.inputs


def _last_is_minus_inf(part: Value) -> bool:
    fill = part.keywords.get("value") or (part.inputs[-1] if len(part.inputs) > 2 else None)
    return fill is not None and fill.lo == fill.hi == -INF


def mask_of(masking: Value) -> Value | None:
    """Returns the mask of an operation that fills by one."""
    if masking.op == "where":
        return masking.inputs[0]
    return masking.arg(1, "mask")


def _is_lengths(part: Value) -> bool:
    """Returns whether a value is a tensor that was handed in, such as the lengths of rows."""
    if part.op != "getitem" or not part.inputs:
        return False
    core = part.core
    return core.op == "" and core.const is None and not core.path


def finite_fill(code: Code, masking: Value, fill: str) -> tuple[Edit, ...]:
    """Returns the edit that fills with something else; ``SCORES`` stands for what is filled."""
    node = masking.node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ()
    written = next((k.value for k in node.keywords if k.arg == "value"), None)
    if written is None and len(node.args) == 2:
        written = node.args[1]
    simple = isinstance(node.func.value, ast.Name)
    if written is None or ("SCORES" in fill and not simple):
        return ()
    return (replaced(code, written, fill.replace("SCORES", code.segment(node.func.value))),)


def keeps_one_per_row(masking: Value) -> bool:
    """Returns whether a mask always leaves something in every row."""
    mask = mask_of(masking)
    if mask is None:
        return True
    if is_end_of_rows(mask):
        return True
    scores = masking.inputs[0] if masking.op != "where" else masking.inputs[1]
    given = False
    positions = False
    for part in mask.upstream(30):
        if part.op in _LEAVES_ONE or _CAUSAL.search(part.name.lower()):
            return True
        if part.op in _COMPARISONS and any(p.core is scores.core for p in part.inputs):
            return True
        if part.op == "setitem" and isinstance(part.inputs[-1].const, bool):
            return True
        given = given or (not part.inputs and part.has("mask")) or _is_lengths(part)
        positions = positions or part.op == "arange"
    return positions and not given


def is_end_of_rows(index: Value) -> bool:
    """Returns whether what is filled is the end of each row, as in ``x[:, n:] = -inf``."""
    last = index.items[-1] if index.items else index
    node = last.node
    return isinstance(node, ast.Slice) and node.lower is not None and node.upper is None


def _is_used_to_spare_rows(code: Code, rows: Value, softmax: Value) -> bool:
    """Returns whether rows that are masked as a whole are treated in a way of their own."""
    for used in code.of("where", "masked_fill", "setitem", "mul", "and", "or", "invert", "getitem"):
        if used.scope is not rows.scope or used.line < rows.line or len(used.inputs) < 1:
            continue
        if used.op == "masked_fill" and _last_is_minus_inf(used):
            continue
        around = [part.node for given in used.inputs for part in given.upstream(8)]
        if rows.node in around and (rows.line <= softmax.line or softmax.node in around):
            return True
    return False


def rows_are_kept_apart(code: Code, softmax: Value) -> bool:
    """Returns whether the function looks after rows that are masked as a whole."""
    scope = softmax.scope
    if scope is None:
        return False
    for event in scope.events:
        by_row = event.op in ("all", "any") and (len(event.inputs) > 1 or bool(event.keywords))
        if by_row and _is_used_to_spare_rows(code, event, softmax):
            return True
        if event.op in _MENDS and event.line >= softmax.line:
            return True
    return False


_SHARES = re.compile(r"([pq]|prob\w*|assign\w*)_?\d*|\w+_probs?")


def is_ratio_of_chances(core: Value) -> bool:
    """Returns whether one softmax is divided by another, either of which underflows."""
    return all(part.core.op in ("softmax", "sigmoid") for part in core.inputs[:2])


def is_chance_of_truth(core: Value) -> bool:
    """Returns whether it is the probability given to what is true, ``p`` or ``1 - p``.

    Written as ``torch.where(y == 1, p, 1 - p)`` or as ``y * p + (1 - y) * (1 - p)``.
    """
    sides: list[list[Value]] = []
    if core.op == "where":
        sides = [[part.core] for part in core.inputs[1:3]]
    elif core.op == "add" and not core.has("padded"):
        products = [part.core for part in core.inputs[:2] if part.core.op == "mul"]
        sides = [[part.core for part in product.inputs[:2]] for product in products]
    if len(sides) < 2:
        return False
    here, there = (
        {part.op for part in side if part.op in ("sigmoid", "softmax") and part.lo <= 0}
        for side in sides
    )
    missed = [{_missing(part) for part in side} for side in sides]
    return bool(here & missed[1]) or bool(there & missed[0])


def _missing(core: Value) -> str | None:
    """Returns the operation that makes ``p`` in ``1 - p``; None if it is written otherwise."""
    if core.op != "sub" or len(core.inputs) < 2 or core.inputs[0].number() != 1:
        return None
    taken = core.inputs[1].core
    return taken.op if core.lo <= 0 else None


def is_overlap(core: Value) -> bool:
    """Returns whether it is the sum of products of two learned things, such as two assignments."""
    along = len(core.inputs) > 1 or "dim" in core.keywords
    product = core.inputs[0].core if core.op == "sum" and core.inputs and along else core
    if product is core or product.op != "mul" or len(product.inputs) < 2:
        return False
    sides = [part.core for part in product.inputs[:2]]
    if sides[0] is sides[1] or any(side.lo > 0 or side.op == "exp" for side in sides):
        return False
    return all(part.op == "" and _SHARES.fullmatch(part.name.lower()) for part in sides)
