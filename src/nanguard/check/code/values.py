"""What is known about a value without running anything: its bounds, its kind, where it is from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import ast
    from collections.abc import Iterator

    from nanguard.check.code.scopes import Class, Function

INF = float("inf")
# What an eps is taken for when its value is not known.
SMALL = 1e-12
NO_KINDS: frozenset[str] = frozenset()

# Operations that move numbers about and leave them as they are.
SHAPE = frozenset(
    [
        "view",
        "reshape",
        "squeeze",
        "unsqueeze",
        "flatten",
        "unflatten",
        "transpose",
        "permute",
        "expand",
        "expand_as",
        "repeat",
        "contiguous",
        "clone",
        "detach",
        "float",
        "half",
        "double",
        "bfloat16",
        "to",
        "type",
        "type_as",
        "cpu",
        "cuda",
        "chunk",
        "split",
        "unbind",
        "gather",
        "index_select",
        "getitem",
        "item",
        "requires_grad_",
        "t",
        "T",
        "mT",
        "mH",
        "movedim",
        "swapaxes",
        "diagonal",
        "diag",
        "tile",
        "broadcast_to",
        "view_as",
        "reshape_as",
        "narrow",
        "select",
        "take",
        "take_along_dim",
        "rearrange",
        "roll",
        "flip",
        "as_tensor",
        "tensor",
        "numpy",
        "tolist",
        "squeeze_",
        "unsqueeze_",
        "repeat_interleave",
        "sort",
        "topk",
        "values",
        "indices",
        "join",
        "index",
        "masked_select",
        "unfold",
        "tril",
        "triu",
        "data",
        "stack",
        "cat",
        "concat",
        "hstack",
        "vstack",
        "to_dense",
        "real",
        "named",
        "buffer",
        "result",
        "pad",
        "interpolate",
        "grid_sample",
        "upsample",
    ]
)


@dataclass(slots=True, eq=False, repr=False)
class Value:
    """One value in the flow of a function, as far as it can be known.

    Attributes:
        lo: It is never below this.
        hi: It is never above this.
        kinds: What it is: ``softmax``, ``norm``, ``mask``, ``loss``, ``labels`` and so on.
        const: The number, text or truth value it is, where that is written down.
        op: The operation that made it, in one spelling; empty for parameters and the unknown.
        inputs: What the operation was given, by position.
        keywords: What it was given by name.
        node: The expression.
        name: The name it has, or was given last.
        half: Whether it is float16; None if not known.
        path: The dotted path of an imported thing.
        items: The parts of a tuple or list.
        cls: The class of the file it is an instance of.
        function: The function of the file it is.
        scope: The function it was made in.
        grad: Whether gradients are recorded where it was made.
        guards: The names and expressions that conditions around it have looked at.
        autocast: The type of the autocast region it was made in, if any.
    """

    lo: float = -INF
    hi: float = INF
    kinds: frozenset[str] = NO_KINDS
    const: Any = None
    op: str = ""
    inputs: tuple[Value, ...] = ()
    keywords: dict[str, Value] = field(default_factory=dict)
    node: ast.AST | None = None
    name: str = ""
    half: bool | None = None
    path: str = ""
    items: tuple[Value, ...] | None = None
    cls: Class | None = None
    function: Function | None = None
    scope: Function | None = None
    grad: bool = True
    guards: frozenset[str] = NO_KINDS
    autocast: str = ""

    def __repr__(self) -> str:
        return f"<{self.op or 'value'} {self.name!r} in line {self.line}>"

    @property
    def line(self) -> int:
        """The line it stands in."""
        return getattr(self.node, "lineno", 0)

    @property
    def core(self) -> Value:
        """The value whose numbers these are, before they were moved about."""
        value = self
        while value.op in SHAPE and value.inputs:
            value = value.inputs[0]
        return value

    def arg(self, position: int, name: str) -> Value | None:
        """Returns an argument given by position, the receiver counted, or by name."""
        if name in self.keywords:
            return self.keywords[name]
        return self.inputs[position] if position < len(self.inputs) else None

    def number(self) -> float | None:
        """Returns the number it is, where that is known."""
        if isinstance(self.const, (int, float)) and not isinstance(self.const, bool):
            try:
                return float(self.const)
            except OverflowError:
                return None  # an integer of hundreds of digits
        return None

    def has(self, *kinds: str) -> bool:
        """Returns whether it is of one of these kinds."""
        return not self.kinds.isdisjoint(kinds)

    def upstream(self, limit: int = 64) -> Iterator[Value]:
        """Yields this value and everything it was made from, nearest first."""
        seen: set[int] = set()
        queue = [self]
        while queue and len(seen) < limit:
            value = queue.pop(0)
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield value
            queue += value.inputs


def is_small(value: Value) -> bool:
    """Returns whether a value is what people add to keep away from zero."""
    number = value.number()
    if number is not None:
        return number > 0
    return value.has("eps") or (value.lo > 0 and value.hi < INF)
