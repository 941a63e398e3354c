"""``sqrt`` where its argument can be 0 and a gradient is wanted."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, operand, replaced
from nanguard.check.code.gradient_fate import is_only_read
from nanguard.check.code.origins import origins
from nanguard.check.code.training_path import is_about_training, is_beside_training
from nanguard.check.code.value_questions import (
    can_be_zero,
    carries_gradient,
    guarded_by,
    is_given,
    is_learned,
    is_number,
    is_of_time,
    is_only_shown,
)
from nanguard.check.code.values import SHAPE
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity
from nanguard.source import floors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

# What gives a cosine that is exactly 1, or more.
_REACH_ONE = frozenset({"svd", "clamp", "cosine_similarity"})
# Products of squares, as of a layer with noisy weights: 0 where all that came in is 0.
_PRODUCTS = frozenset({"matmul", "linear", "einsum", "conv1d", "conv2d", "conv3d"})


class SqrtAtZero(CodeRule):
    """The square root of a sum of squares, a variance or a distance, with nothing added.

    *Why it breaks a run*: the derivative of sqrt at 0 is infinite. Two equal points, a constant
    row or a perfect prediction give inf, and inf times the 0 of the chain rule is NaN: one pair
    is enough to poison every weight.

    Add a small number under the root (`(d2 + 1e-12).sqrt()`), or use `torch.linalg.norm` and
    `torch.cdist`, whose gradient at 0 is defined as 0.
    """

    code = "SRC020"
    name = "sqrt-at-zero"
    severity = Severity.WARNING
    claim = "value"
    seen_in = "https://github.com/pytorch/pytorch/issues/6394"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef dist(a, b):\n    d2 = (a - b).pow(2).sum(-1)\n"
            "    return torch.sqrt(d2)\n",
            line=6,
            fixed="import torch\n\n\ndef dist(a, b):\n    d2 = (a - b).pow(2).sum(-1)\n"
            "    return torch.sqrt(d2 + 1e-12)\n",
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef rmse(a, b):\n"
            "    return F.mse_loss(a, b) ** 0.5\n",
            line=6,
        ),
        Passes(
            "import torch\n\n\ndef dist(a, b):\n    return ((a - b) ** 2 + 1e-12).sum().sqrt()\n"
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef margin_loss(x, w):\n"
            "    cosine = F.linear(F.normalize(x), F.normalize(w))\n"
            "    return torch.sqrt(1.0 - torch.pow(cosine, 2)).mean()\n",
            line=7,
        ),
        Fails(
            "import torch\n\n\ndef penalty(d_out, x):\n"
            "    g = torch.autograd.grad(d_out.sum(), x, create_graph=True)[0]\n"
            "    return (g.pow(2).sum(1).sqrt() - 1).pow(2).mean()\n",
            line=6,
        ),
        Fails(
            "import torch\n\n\ndef noisy_linear(x, mu, sigma):\n"
            "    std = torch.sqrt(torch.mm(x.pow(2), sigma.pow(2)))\n"
            "    return torch.mm(x, mu) + std * torch.randn_like(std)\n",
            line=5,
        ),
        Fails(
            "import torch\n\n\ndef batch_hard_loss(x):\n    dots = x @ x.t()\n"
            "    norms = dots.diag().unsqueeze(1)\n"
            "    far = (norms + norms.t() - 2 * dots).clamp(min=0).sqrt()\n"
            "    return far.max(1)[0].mean()\n",
            line=7,
        ),
        Fails(
            "import torch\n\n\ndef order_loss(x, y):\n"
            "    return (y - x).clamp(min=0).pow(2).sum(-1).sqrt().mean()\n",
            line=5,
        ),
        Passes(
            "import torch\n\n\ndef batch_hard_loss(x):\n    dots = x @ x.t()\n"
            "    norms = dots.diag().unsqueeze(1)\n"
            "    far = (norms + norms.t() - 2 * dots).clamp(min=1e-12).sqrt()\n"
            "    return far.max(1)[0].mean()\n"
        ),
        Passes(
            "import torch\n\n\ndef margin_loss(cosine):\n"
            "    return torch.sqrt((1.0 - cosine**2).clamp(1e-9, 1.0))\n"
        ),
        Passes(
            "import torch\n\n\ndef noised(x, noise, alpha):\n"
            "    return alpha * x + torch.sqrt(1 - alpha**2) * noise\n"
        ),
        Passes(
            "import torch\n\n\ndef unit(x):\n"
            "    return x / torch.sqrt(x.pow(2).sum(1, keepdim=True)).expand_as(x)\n"
        ),
        Passes(
            "import torch\n\n\ndef clip(grads, limit):\n    total = 0\n    for g in grads:\n"
            "        total += g.data.norm(2) ** 2\n    return limit / (total**0.5 + 1e-6)\n"
        ),
        Passes(
            "import torch\n\n\ndef orthogonal(a, eye, limit):\n    for _ in range(9):\n"
            "        off = (a @ a.t() - eye).pow(2).sum(-1)\n        far = torch.sqrt(off)\n"
            "        if far.max().item() <= limit:\n            break\n"
            "        a = a @ (1.5 * eye - 0.5 * a.t() @ a)\n    return a\n"
        ),
        Passes(
            "import torch\n\n\n@torch.no_grad()\ndef rmse(a, b):\n"
            "    return (a - b).square().mean().sqrt()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        trains = is_about_training(code)
        for root in code.of("sqrt", "pow"):
            if not root.grad or not root.inputs or (root.op == "pow" and not is_root(root)):
                continue
            value = root.inputs[0]
            if (
                not _is_measure(root, value, trains=trains)
                or is_number(value)
                or not carries_gradient(value)
                or not can_be_zero(value)
            ):
                continue
            if guarded_by(value, root.guards) or _is_used_elsewhere(code, root):
                continue
            if is_only_read(code, root.node):
                continue  # nobody asks for its gradient
            if (root.op == "pow" and not _is_tensor(value)) or is_given(value):
                continue
            what = "variance" if value.has("var") else "distance"
            if _is_one_minus_square(value):
                what = "1 minus a square"
            if value.has("sumsq", "hypot"):
                what = "sum of squares"
            if _is_below_zero(value):
                what = "difference"
            article = "" if what[0] == "1" else "a "
            yield self.at(
                code,
                root.node,
                f"square root of {article}{what} that can be 0: its gradient there is infinite"
                + (
                    ", and below 0, where rounding takes it, it is NaN"
                    if _is_below_zero(value)
                    else ""
                ),
                fixes=_fixes(code, root),
                shown=_is_seen(code, value),
                weak=is_beside_training(code, root)
                or _is_hardly_zero(value)
                or is_only_shown(code, root),
            )


def is_root(power: Value) -> bool:
    """Returns whether a power is a square root."""
    exponent = power.arg(1, "exponent")
    return exponent is not None and exponent.number() == 0.5


def _is_seen(code: Code, value: Value) -> bool:
    """Returns whether it is seen to be 0: the sine of a cosine of 1, a distance to itself."""
    if _is_between_learned(code, value) or _is_below_zero(value) or _is_spread(code, value):
        return True
    if _is_square_minus_one(value):
        return is_learned(code, value)
    if _is_magnitude(value):
        return is_learned(code, value)
    if _is_of_gradients(value) or value.core.op in _PRODUCTS or _is_among_rows(value):
        return True
    if _is_of_excess(value):
        return True
    if _is_one_minus_square(value):
        return any(part.has("cosine") or part.op in _REACH_ONE for part in value.upstream(16))
    return any(
        part.op == "sub"
        and len(part.inputs) > 1
        and part.inputs[0].core is part.inputs[1].core
        and part.inputs[0].core.op == ""
        for part in value.upstream(12)
    )


def _is_between_learned(code: Code, value: Value) -> bool:
    """Returns whether it is the distances of pairs of things that are learned, or of one set.

    Some pairs agree sooner or later: two points of a layer that was pulled together, two views of
    one picture.
    """
    core = value.core
    if core.op not in ("sum", "mean") or not (len(core.inputs) > 1 or "dim" in core.keywords):
        return False
    square = core.inputs[0].core
    if square.op not in ("pow", "square") or not square.inputs:
        return False
    apart = square.inputs[0].core
    if apart.op != "sub" or len(apart.inputs) < 2:
        return False
    if not all(map(carries_gradient, apart.inputs[:2])):
        return False
    made = [{id(maker) for maker in origins(code, side).makers} for side in apart.inputs[:2]]
    of_one_set = made[0] == made[1] and bool(made[0])
    return of_one_set or all(is_learned(code, side) for side in apart.inputs[:2])


def _is_below_zero(value: Value) -> bool:
    """Returns whether rounding takes it below 0, where a root is NaN: ``a**2 + b**2 - 2 * a @ b``.

    So is ``2 - 2 * cos``, of a cosine that rounding takes above 1.
    """
    core = value.core
    if core.op != "sub" or len(core.inputs) < 2 or not core.inputs[1].core.inputs:
        return False
    if _is_one_minus_square(value):
        return core.inputs[1].core.inputs[0].has("norm")
    first, second = core.inputs[0], core.inputs[1].core
    factors = [*second.inputs[:2], *(p for part in second.inputs[:2] for p in part.core.inputs[:2])]
    if 2 not in [part.number() for part in factors]:
        return False
    product = next((part for part in second.inputs if part.number() != 2), second)
    if first.number() == 2:
        return second.op == "mul" and product.has("cosine")
    products = ("matmul", "einsum", "linear")
    return first.has("sumsq", "hypot") and (second.op in products or product.core.op in products)


def _is_square_minus_one(value: Value) -> bool:
    """Returns whether it is the root in an inverse cosh that is written out, 0 for equal points."""
    core = value.core
    if core.op != "sub" or len(core.inputs) < 2 or core.inputs[1].number() != 1:
        return False
    return core.inputs[0].has("square") and core.inputs[0].core.op in ("pow", "square", "mul")


def _is_spread(code: Code, value: Value) -> bool:
    """Returns whether it is the variance of what is learned, by dimension: one may collapse."""
    core = value.core
    if core.op != "var" or not core.inputs:
        return False
    if len(core.inputs) < 2 and "dim" not in core.keywords:
        return False
    return is_learned(code, core.inputs[0])


def _is_magnitude(value: Value) -> bool:
    """Returns whether it is the magnitude of a spectrum, 0 where nothing is to be heard."""
    return value.has("hypot") and any(part.op == "stft" for part in value.upstream(16))


def _is_of_excess(value: Value) -> bool:
    """Returns whether only what exceeds a bound is squared and added up: often nothing does."""
    core = value.core
    if core.op not in ("sum", "mean") or not core.inputs:
        return False
    square = core.inputs[0].core
    if square.op not in ("pow", "square") or not square.inputs:
        return False
    excess = square.inputs[0].core
    return excess.op in ("relu", "clamp", "clamp_min") and excess.lo == 0


def _is_among_rows(value: Value) -> bool:
    """Returns whether it is the distances of rows from each other, each row from itself as well.

    Written as ``a**2 + b**2 - 2 * a @ a.t()``: the diagonal is 0.
    """
    core = _unclamped(value)
    if core.op != "sub" or len(core.inputs) < 2:
        return False
    return any(
        part.op == "matmul"
        and len(part.inputs) > 1
        and part.inputs[0].core is part.inputs[1].core
        and carries_gradient(part)
        for part in core.inputs[1].upstream(6)
    )


def _unclamped(value: Value) -> Value:
    core = value.core
    while core.op in ("clamp", "clamp_min", "relu", "abs") and core.inputs:
        core = core.inputs[0].core
    return core


def _is_of_gradients(value: Value) -> bool:
    """Returns whether it is the length of a gradient in a penalty, 0 where a critic is flat."""
    return any(part.path == "torch.autograd.grad" for part in value.upstream(40))


def _is_hardly_zero(value: Value) -> bool:
    """Returns whether everything there is would have to be equal, or two sides at once."""
    core = value.core
    if _is_of_gradients(value) or core.op in _PRODUCTS or _is_of_excess(value):
        return False
    if _is_magnitude(value) or _is_below_zero(value):
        return False
    near = value.upstream(8)
    if value.has("sumsq") and not any(part.op in ("sub", "rsub") for part in near):
        return True  # the length of one thing, and no distance between two
    whole = core.op in ("sum", "mean", "mse_loss") and len(core.inputs) < 2
    return (whole and "dim" not in core.keywords) or value.has("hypot")


def _is_measure(root: Value, value: Value, *, trains: bool) -> bool:
    if value.has("sumsq", "var") or _is_one_minus_square(value) or _is_among_rows(value):
        return True
    if _is_below_zero(value) or _is_square_minus_one(value):
        return True
    if value.has("distance") and value.core.op in ("sub", "clamp", "clamp_min", "relu", "add"):
        return True
    return root.op == "sqrt" and value.has("hypot") and trains


def _is_one_minus_square(value: Value) -> bool:
    """Returns whether it is the square of a sine, got from a cosine that may be exactly 1."""
    core = _unclamped(value)
    if core.op != "sub" or core.inputs[0].number() != 1:
        return False
    square = core.inputs[1].core
    if not square.has("square") or square.op not in ("pow", "square", "mul"):
        return False
    return (carries_gradient(square) and not is_of_time(square)) or square.inputs[0].has("norm")


def _is_tensor(value: Value) -> bool:
    """Returns whether a base is a tensor for certain, and not a number or a size."""
    return any(
        part.has("tensor", "network", "loss", "var") or part.op in ("sum", "mean", "square", "norm")
        for part in value.upstream(16)
    )


def _is_used_elsewhere(code: Code, root: Value) -> bool:
    """Returns whether it is a divisor, hidden by ``where``, or turned into a number at once."""
    node = root.node
    for parent in code.ancestors(node) if node is not None else ():
        if isinstance(parent, ast.Attribute):
            if parent.attr in ("item", "detach", "tolist", "numpy"):
                return True
            node = parent
            continue
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Div):
            return parent.right is node
        if isinstance(parent, ast.Call) and _is_reshaped(parent, node):
            node = parent
            continue
        if isinstance(parent, ast.Call):
            made = code.values.get(parent)
            return made is not None and made.op == "where"
        if isinstance(parent, ast.stmt):
            return False
        node = parent
    return False


def _is_reshaped(call: ast.Call, node: ast.AST | None) -> bool:
    """Returns whether a call only gives a value another shape, as ``root.expand_as(x)`` does."""
    return node is call.func and isinstance(node, ast.Attribute) and node.attr in SHAPE


def _fixes(code: Code, root: Value) -> tuple[Fix, ...]:
    node = operand(root)
    title = "add a small number under the root"
    if node is None:
        return (Fix(title),)
    sum_of = f"{code.segment(node)} + {floors.SQUARE}"
    argument = isinstance(root.node, ast.Call) and node in root.node.args
    written = sum_of if argument else f"({sum_of})"
    return (Fix(title, edits=(replaced(code, node, written),)),)
