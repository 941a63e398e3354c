"""An attention scale from the width of the model where heads split it."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Class, Function
    from nanguard.check.code.values import Value

_QUERIES = ("q", "query", "queries", "attn", "scores", "energy", "dots", "att", "sim")


class ScaleFromWrongDim(CodeRule):
    """Attention scores scaled by the width of the model where heads split it.

    *Why it breaks a run*: the scores of a head are sums over head_dim products, so their spread is
    sqrt(head_dim). Scaled by sqrt(embed_dim) they are too small by sqrt(heads): attention is flat,
    the model makes up for it with large weights, and those overflow in half precision later.

    Use the size that is summed over: `head_dim ** -0.5`, `q.size(-1) ** -0.5`.
    """

    code = "SRC030"
    name = "scale-from-wrong-dim"
    severity = Severity.WARNING
    seen_in = "https://github.com/lucidrains/vit-pytorch/issues/65"
    examples: ClassVar = (
        Fails(
            "import torch\nfrom torch import nn\n\n\nclass A(nn.Module):\n"
            "    def __init__(self, dim, heads):\n        super().__init__()\n"
            "        self.heads, self.hd = heads, dim // heads\n        self.scale = dim**-0.5\n\n"
            "    def forward(self, q, k):\n        return (q @ k.mT) * self.scale\n",
            line=9,
        ),
        Passes(
            "import torch\nfrom torch import nn\n\n\nclass A(nn.Module):\n"
            "    def __init__(self, dim, heads):\n        super().__init__()\n"
            "        self.heads, self.hd = heads, dim // heads\n"
            "        self.scale = self.hd**-0.5\n\n"
            "    def forward(self, q, k):\n        return (q @ k.mT) * self.scale\n"
        ),
        Passes(
            "import torch\nfrom torch import nn\n\n\nclass A(nn.Module):\n"
            "    def __init__(self, c):\n        super().__init__()\n"
            "        self.heads, self.size = c.heads, c.dim // c.heads\n"
            "        self.hd = c.dim // c.heads\n        self.out = nn.Linear(self.hd, c.dim)\n"
            "        self.scale = self.hd**-0.5\n\n    def forward(self, q, k):\n"
            "        q = q.view(1, 2, self.heads, self.hd)\n"
            "        return (q @ k.mT) * self.scale\n"
        ),
        Passes(
            "import math\nimport torch\nfrom torch import nn\n\n\nclass E(nn.Module):\n"
            "    def __init__(self, dim, heads):\n        super().__init__()\n"
            "        self.hd, self.dim = dim // heads, dim\n"
            "        self.emb = nn.Embedding(9, dim)\n"
            "\n    def forward(self, x):\n        return self.emb(x) * math.sqrt(self.dim)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        seen: set[int] = set()
        for product in code.of("mul", "div"):
            if len(product.inputs) < 2:
                continue
            for scores, scale in (product.inputs[:2], product.inputs[1::-1]):
                divides = product.op == "div" and scale is product.inputs[1]
                root = _root(scale, divides=divides)
                if root is None or id(root.node) in seen or scores.core.op == "softmax":
                    continue
                if _is_scores(scores) or _becomes_query(code, product):
                    seen.add(id(root.node))
                    yield from self._judged(code, root, product)
        for attention in code.of("scaled_dot_product_attention"):
            given = attention.keywords.get("scale")
            found = None if given is None else _root(given, divides=False)
            if found is not None:
                yield from self._judged(code, found, attention)

    def _judged(self, code: Code, root: Value, place: Value) -> Iterator[Finding]:
        width = root.inputs[0]
        names = split_widths(code, place.scope)
        if root.node is not None and (_name(width) in names or _is_input_width(width, names)):
            yield self.at(
                code,
                root.node,
                f"attention scaled by {_name(width)}, which the heads split: the scores are sums "
                "over head_dim products",
                fixes=(Fix("scale by the size of a head"),),
            )


def _root(scale: Value, *, divides: bool) -> Value | None:
    """Returns the root in a scale that makes scores smaller."""
    core = scale.core
    if core.op == "div" and len(core.inputs) > 1 and core.inputs[0].number() == 1:
        return _root(core.inputs[1], divides=True)
    if core.op == "pow" and core.inputs:
        exponent = core.arg(1, "exponent")
        number = None if exponent is None else exponent.number()
        return core if number == (0.5 if divides else -0.5) else None
    if core.op in ("math.sqrt", "sqrt", "numpy.sqrt") and divides:
        return core
    return core if core.op in ("rsqrt", "math.rsqrt") and not divides else None


def _becomes_query(code: Code, product: Value) -> bool:
    """Returns whether a product is given the name of a query."""
    statement = code.statement_of(product.node) if product.node is not None else None
    if not isinstance(statement, ast.Assign) or statement.value is not product.node:
        return False
    return any(terminal(target).lower() in _QUERIES for target in statement.targets)


def _is_input_width(value: Value, names: set[str]) -> bool:
    """Returns whether a value is the last size of what came in, before heads split it."""
    core = value.core
    while core.op == "getitem" and core.inputs:
        core = core.inputs[0].core
    if not names or core.op not in ("shape", "size") or not core.inputs:
        return False
    source = core.inputs[0]
    whole = value.name.lower() in ("c", "d", "e", "dim", "embed_dim", "d_model", "hidden", "width")
    return whole and source.op == "" and source.name.lower() not in (*_QUERIES, "k", "key", "keys")


def _name(value: Value) -> str:
    core = value
    while core.op in ("named", "item", "getitem", "tensor") and core.inputs and not core.name:
        core = core.inputs[0]
    return core.name


def _is_scores(value: Value) -> bool:
    """Returns whether a value is a product of queries and keys, or a query."""
    core = value.core
    if core.op in ("matmul", "einsum", "baddbmm", "bmm"):
        return True
    if core.op in ("mul", "div", "add", "sub"):
        return any(_is_scores(part) for part in core.inputs)
    return value.name.lower() in _QUERIES


_HEADS = re.compile(r"(n|num|nb)?_?(attention_|attn_)?heads?$|n?h$|nheads?$|heads_count$")


def split_widths(code: Code, scope: Function | None) -> set[str]:
    """Returns the names of sizes that heads split, in the class or function of a place."""
    if scope is None:
        return set()
    family = scope.cls.line_of_descent() if scope.cls else []
    functions = [f for f in code.functions if f.cls in family] if family else [scope]
    widths: set[str] = set()
    for function in functions:
        for node in ast.walk(function.node):
            if isinstance(node, ast.BinOp) and _divides_by_heads(node):
                widths.add(terminal(node.left))
    if any(_views_heads(cls) for cls in family):
        for cls in family:
            widths |= _linear_widths(cls) - _head_sizes(cls)
    return widths - {""}


def terminal(node: ast.expr) -> str:
    """Returns the last name of an expression."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _views_heads(cls: Class) -> bool:
    """Returns whether a class reshapes something to (..., heads, size of a head)."""
    return any(isinstance(node, ast.Call) and _splits_heads(node) for node in ast.walk(cls.node))


def _splits_heads(call: ast.Call) -> bool:
    called = getattr(call.func, "attr", getattr(call.func, "id", ""))
    if called == "rearrange":
        return any(_HEADS.fullmatch(terminal(given.value).lower()) for given in call.keywords)
    sizes = list(call.args)
    if called == "unflatten" and len(sizes) == 2 and isinstance(sizes[1], (ast.Tuple, ast.List)):
        sizes = sizes[1].elts
    elif called not in ("view", "reshape"):
        return False
    if len(sizes) < 2 or terminal(sizes[-1]).lower() in ("w", "width", "wp", "ww"):
        return False
    return _HEADS.fullmatch(terminal(sizes[-2]).lower()) is not None


def _head_sizes(cls: Class) -> set[str]:
    """Returns the names that a class gives to a width divided by the number of heads."""
    found: set[str] = set()
    for node in ast.walk(cls.node):
        if isinstance(node, ast.Assign) and any(map(_divides_by_heads, ast.walk(node.value))):
            found |= {terminal(target) for target in node.targets}
    return found


def _divides_by_heads(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, (ast.FloorDiv, ast.Div)):
        return False
    return _HEADS.fullmatch(terminal(node.right).lower()) is not None


def _linear_widths(cls: Class) -> set[str]:
    """Returns the names of the widths of a class's square projections."""
    found: set[str] = set()
    for node in ast.walk(cls.node):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "Linear" and node.args:
            found.add(terminal(node.args[0]))
    return found
