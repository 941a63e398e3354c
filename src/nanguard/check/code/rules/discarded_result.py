"""A result that is computed and thrown away."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.training import is_test
from nanguard.check.code.value_questions import is_number
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

# Functions of torch that leave what they are given as it is. What is slow is not among them: it is
# called to warm up, or to be timed.
_FUNCTIONS = frozenset(
    {"clamp", "clip", "clamp_min", "clamp_max", "nan_to_num", "where", "masked_fill", "maximum",
     "minimum", "fmax", "fmin", "relu", "sigmoid", "tanh", "softplus", "softmax", "log_softmax",
     "logsigmoid", "exp", "log", "sqrt", "rsqrt", "abs", "square", "pow", "neg", "add", "sub",
     "mul", "div", "normalize", "dropout", "leaky_relu", "elu", "gelu", "silu", "squeeze",
     "unsqueeze", "permute", "transpose", "reshape", "flatten", "cat", "stack", "round", "floor",
     "ceil", "masked_select", "index_fill", "index_add", "scatter_add", "roll", "flip", "tril",
     "triu"}
)  # fmt: skip
# Methods that only a tensor has.
_OF_TENSORS = frozenset(
    {"clamp", "clamp_min", "clamp_max", "nan_to_num", "masked_fill", "masked_scatter", "index_fill",
     "index_copy", "index_add", "scatter_add", "log_softmax", "unsqueeze"}
)  # fmt: skip
# Methods of a tensor that other objects have as well, and that change those.
_METHODS = _OF_TENSORS | {
    "to", "float", "half", "double", "bfloat16", "long", "type", "type_as", "detach", "contiguous",
    "view", "reshape", "permute", "transpose", "squeeze", "expand", "repeat", "flatten", "sigmoid",
    "tanh", "relu", "softmax", "exp", "log", "sqrt", "abs", "square", "pow", "neg", "add", "sub",
    "mul", "div", "round", "floor", "ceil", "clip",
}  # fmt: skip
# Operations of torch that make tensors, whatever they are given.
_MAKE_TENSORS = frozenset(
    {"parameter", "buffer", "tensor", "zeros", "ones", "full", "zeros_like", "ones_like", "rand",
     "randn", "rand_like", "randn_like", "empty", "empty_like", "arange", "linspace", "eye",
     "softmax", "log_softmax", "sigmoid", "relu", "matmul", "einsum", "linear", "conv1d", "conv2d",
     "where", "masked_fill", "clamp", "cat", "stack", "normalize", "layer_norm", "cross_entropy",
     "mse_loss", "l1_loss", "nll_loss", "binary_cross_entropy_with_logits", "detach", "unsqueeze"}
)  # fmt: skip
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.MatMult)
# Where an expression is tried out, timed, or expected to fail.
_TRIED = re.compile(
    r"raises|warn|assert|prof|timer|time_|bench|record|suppress|catch|patch|capture"
)
_TIMED = re.compile(r"bench|prof(il|_)|warm_?up|timeit|speed|latency|throughput|flops")


class DiscardedResult(CodeRule):
    """A statement computes a tensor and throws it away: `torch.clamp(w, 1e-6)`, `x * 0.1`.

    *Why it breaks a run*: these functions leave their operands as they are. The bound is not there,
    the scale is not applied, the term is missing from the loss, and nothing says so: what the line
    was written against happens after all.

    Use the result, `w = torch.clamp(w, 1e-6)`, or take the line out. A line that begins with `+` or
    `-` is a sum that was to be continued: put brackets around it.
    """

    code = "SRC044"
    name = "discarded-result"
    severity = Severity.WARNING
    seen_in = "https://github.com/pytorch/tutorials/pull/30"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\nclass Scale(torch.nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n        self.w = torch.nn.Parameter(torch.ones(1))\n\n"
            "    def forward(self, x):\n        torch.clamp(self.w, 1e-6)\n"
            "        return x * self.w\n",
            line=10,
        ),
        Fails(
            "import torch\n\n\ndef energy(x, g):\n    x.detach() + g * (x - x.detach())\n"
            "    return x\n",
            line=5,
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef loss_of(x, y, w):\n"
            "    loss = F.mse_loss(x, y)\n    + 0.1 * w.abs().sum()\n    return loss\n",
            line=7,
        ),
        Fails(
            "import torch\n\n\ndef step(net, loss, opt):\n    loss.backward()\n"
            "    for p in net.parameters():\n        p.grad.data.clamp(-1, 1)\n    opt.step()\n",
            line=7,
        ),
        Passes(
            "import torch\n\n\ndef step(net, loss, opt):\n    loss.backward()\n"
            "    for p in net.parameters():\n        p.grad.data.clamp_(-1, 1)\n    opt.step()\n"
        ),
        Passes(
            "import torch\n\n\ndef bound(w, into):\n    torch.clamp(w, min=1e-6, out=into)\n"
            "    torch.nn.functional.relu(w, inplace=True)\n    w.add_(1)\n    return into\n"
        ),
        Passes(
            "import torch\n\n\nclass Camera:\n    def clamp(self, near):\n"
            "        self.near = near\n\n\ndef show(camera: Camera, model, batch):\n"
            "    camera.clamp(0.1)\n    model.float()\n    batch.to('cuda')\n"
            "    model.detach()\n    return model(batch)\n"
        ),
        Passes(
            "import torch\n\n\ndef can_add(x, y):\n    try:\n        x + y\n"
            "    except RuntimeError:\n        return False\n    return True\n"
        ),
        Passes('import torch\n\n\ndef f(x):\n    """x + 1"""\n    ...\n    return x\n'),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        if not code.relevant or is_test(code) or _TIMED.search(code.text.path.lower()):
            return
        for statement in code.parents:
            if not isinstance(statement, ast.Expr):
                continue
            what = _thrown_away(code, statement.value)
            if what and not _is_tried(code, statement):
                yield self.at(
                    code,
                    statement,
                    f"the result of {what} is thrown away: nothing else changes",
                    fixes=(Fix("use the result, or take the line out"),),
                    weak=_is_of_numbers(code.values.get(statement.value)),
                )


def _thrown_away(code: Code, node: ast.expr) -> str:
    """Returns what computes a tensor and does nothing else, in words; nothing if it may not."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        return "" if _is_plain(node.operand) else "this line, which continues nothing,"
    if isinstance(node, ast.BinOp) and isinstance(node.op, _ARITHMETIC):
        return "" if _is_plain(node) else "this arithmetic"
    if not isinstance(node, ast.Call) or not isinstance(node.func, (ast.Attribute, ast.Name)):
        return ""
    if any(given.arg in ("out", "inplace", None) for given in node.keywords):
        return ""
    path = code.names.path(node.func)
    if path:
        last = path.removeprefix("torch.")
        inplace = last in ("dropout", "relu", "leaky_relu", "elu") and len(node.args) > 2
        called = path.startswith("torch.") and last in _FUNCTIONS and bool(node.args)
        return f"`{code.segment(node.func)}`" if called and not inplace else ""
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in _METHODS:
        return ""
    receiver = code.values.get(node.func.value)
    method = node.func.attr
    if receiver is None or receiver.cls is not None or receiver.function is not None:
        return ""
    known = _is_tensor(receiver) or _is_reckoned_with(code, node.func.value)
    if known or (method in _OF_TENSORS and _is_no_method(code, node.func)):
        return f"`.{method}()`"
    return ""


def _is_of_numbers(value: Value | None) -> bool:
    """Returns whether it is arithmetic with numbers of Python's own: a line that was left over."""
    if value is None:
        return False
    return is_number(value) or any(part.op.startswith("math.") for part in value.upstream(16))


def _is_plain(node: ast.expr) -> bool:
    """Returns whether an expression is put together from names and numbers of nobody knows what.

    What begins with a text is a message, and one number is a line of a table.
    """
    return all(
        isinstance(part, (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop))
        for part in ast.walk(node)
    ) or any(
        isinstance(part, ast.Constant) and isinstance(part.value, (str, bytes))
        for part in (node, getattr(node, "left", node), getattr(node, "right", node))
    )


def _is_tensor(value: Value) -> bool:
    """Returns whether a value is a tensor for certain."""
    for part in (value, value.core):
        if part.has("tensor") or part.op in _MAKE_TENSORS:
            return part.op != "detach" or part.name != "detach_"
    inner = value
    for _ in range(6):
        if inner.op == "grad" or (inner.op == "data" and inner.inputs):
            return inner.op == "grad" or _is_tensor(inner.inputs[0]) or "p" in inner.inputs[0].name
        if inner.op != "named" or not inner.inputs:
            return False
        inner = inner.inputs[0]
    return False


def _is_reckoned_with(code: Code, node: ast.expr) -> bool:
    """Returns whether the same function multiplies or divides what an expression stands for.

    Tensors and arrays can be, and modules, batches and devices cannot.
    """
    if not isinstance(node, ast.Name):
        return False
    for outer in code.ancestors(node):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return any(
                isinstance(product, ast.BinOp)
                and isinstance(product.op, (ast.Mult, ast.Div, ast.MatMult))
                and any(
                    getattr(part, "id", "") == node.id for part in (product.left, product.right)
                )
                for product in ast.walk(outer)
            )
    return False


def _is_no_method(code: Code, func: ast.Attribute) -> bool:
    """Returns whether no class of the project has a method of this name."""
    if isinstance(func.value, ast.Name) and func.value.id in ("self", "cls"):
        return False
    defined = re.compile(rb"def[ \t]+%s\b" % func.attr.encode())
    if code.project is not None:
        return not code.project.some_file_has(defined)
    return defined.search(code.text.content.encode()) is None


def _is_tried(code: Code, statement: ast.stmt) -> bool:
    """Returns whether something else is wanted of a statement: its error, its time, its display."""
    inner: ast.AST = statement
    looped = False
    for outer in code.ancestors(statement):
        if isinstance(outer, ast.Try) and inner in outer.body and len(outer.body) <= 2:
            return True
        if isinstance(outer, (ast.With, ast.AsyncWith)):
            texts = [ast.unparse(item.context_expr).lower() for item in outer.items]
            if any(_TRIED.search(text) for text in texts):
                return True
        looped = looped or isinstance(outer, (ast.For, ast.AsyncFor, ast.While))
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return _TIMED.search(outer.name.lower()) is not None
        inner = outer
    # Between functions it is shown in a notebook, and tried out in a script.
    return code.text.path.endswith(".ipynb") or not looped
