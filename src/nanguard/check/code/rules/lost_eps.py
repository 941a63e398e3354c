"""An eps that protects nothing: beside the wrong thing, or rounded away."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, replaced
from nanguard.check.code.half_precision import Halves
from nanguard.check.code.value_questions import can_be_zero, is_eps
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Finding, Fix, Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value


class EpsOutsideRsqrt(CodeRule):
    """An eps that is added after `rsqrt`, or to the quotient.

    *Why it breaks a run*: `rsqrt(0)` and `x / 0` are infinite before the eps arrives, and infinity
    plus 1e-6 is infinity. The line looks protected, so nobody looks at it again.

    Add it inside: `torch.rsqrt(var + eps)`, `x / (norm + eps)`.
    """

    code = "SRC026"
    name = "eps-outside-rsqrt"
    severity = Severity.INFO
    seen_in = "https://github.com/tile-ai/tilelang/pull/1243"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef f(x, eps):\n    ms = x.pow(2).mean(-1, keepdim=True)\n"
            "    return x * (torch.rsqrt(ms) + eps)\n",
            line=6,
        ),
        Fails(
            "import torch\n\n\ndef f(x):\n    return (x - x.mean()) / x.std() + 1e-6\n",
            line=5,
        ),
        Passes("import torch\n\n\ndef f(ms, eps):\n    return torch.rsqrt(ms + eps)\n"),
        Passes("import torch\n\n\ndef f(x, eps):\n    return x / (x.norm() + eps)\n"),
        Passes("import torch\n\n\ndef f(x, n):\n    return x / n + 1e-6\n"),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        for total in code.of("add"):
            if len(total.inputs) < 2:
                continue
            for quotient, eps in (total.inputs[:2], total.inputs[1::-1]):
                if _is_protecting(code, total):
                    break
                if _is_meant_as_eps(eps) and not is_eps(quotient) and _is_unprotected(quotient):
                    yield self.at(
                        code,
                        total.node,
                        "the eps is added after the division, which is infinite by then",
                        fixes=(Fix("add the eps to the divisor, under the root"),),
                    )
                    break


def _is_meant_as_eps(value: Value) -> bool:
    """Returns whether it is written as an eps; the small default of a parameter may be anything."""
    return is_eps(value) and (value.has("eps") or "default" not in value.kinds)


def _is_protecting(code: Code, total: Value) -> bool:
    """Returns whether the sum is itself what something is divided by, or the root of."""
    parent = code.parents.get(total.node) if total.node is not None else None
    if isinstance(parent, ast.BinOp):
        return isinstance(parent.op, (ast.Div, ast.Pow)) and (
            parent.right is total.node or isinstance(parent.op, ast.Pow)
        )
    if isinstance(parent, ast.Attribute):
        return parent.attr in ("sqrt", "rsqrt", "log", "reciprocal", "pow")
    made = code.values.get(parent) if isinstance(parent, ast.Call) else None
    return made is not None and made.op in ("sqrt", "rsqrt", "log", "reciprocal", "pow")


def _is_unprotected(value: Value) -> bool:
    core = value.core
    if core.op == "mul":
        return any(_is_unprotected(part) for part in core.inputs)
    if core.op == "rsqrt" and core.inputs:
        return can_be_zero(core.inputs[0]) and _is_measure(core.inputs[0])
    if core.op == "pow" and core.inputs:
        exponent = core.arg(1, "exponent")
        number = None if exponent is None else exponent.number()
        if number is not None and number < 0:
            return can_be_zero(core.inputs[0]) and _is_measure(core.inputs[0])
    if core.op in ("div", "reciprocal") and core.inputs:
        divisor = core.inputs[-1]
        total = divisor.core
        if total.op == "sum" and total.inputs and total.inputs[0].core is core.inputs[0].core:
            return False  # shares of a whole; the eps is for what comes next, such as a log
        return divisor.number() is None and can_be_zero(divisor) and _is_measure(divisor)
    return False


def _is_measure(value: Value) -> bool:
    """Returns whether a value is a norm, a spread or a count: something meant to be divided by."""
    core = value.core
    if core.op == "mul":
        return any(_is_measure(part) for part in core.inputs)
    if core.op == "add":
        return any(_is_measure(part) for part in core.inputs)
    return core.has("sumsq", "var", "std", "norm", "masksum", "weightsum", "minmax", "sum")


# The smallest float16 above zero, and half the step below one.
_SMALLEST = 5.96e-8
_STEP = 2.4e-4
_WITH_EPS = {"normalize": 1e-12, "cosine_similarity": 1e-8, "pairwise_distance": 1e-6}


class EpsTooSmallForHalf(CodeRule):
    """An eps below what float16 can hold, used on float16 tensors.

    *Why it breaks a run*: the smallest float16 above zero is 6e-8. An eps of 1e-8 added to it, or
    used as a lower bound, is exactly zero: the division or the logarithm it was to protect gives
    Inf or NaN at the first zero. In the same way `1 - 1e-6` is exactly 1.

    Use 1e-4 or so in float16, or do this part in float32 (`x.float()`).
    """

    code = "SRC006"
    name = "eps-too-small-for-half"
    severity = Severity.WARNING
    seen_in = "https://github.com/pytorch/pytorch/issues/32137"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef entropy(logits):\n    p = logits.half().softmax(-1)\n"
            "    return -(p * torch.log(p + 1e-8)).sum(-1)\n",
            line=6,
            fixed="import torch\n\n\ndef entropy(logits):\n    p = logits.half().softmax(-1)\n"
            "    return -(p * torch.log(p + 1e-4)).sum(-1)\n",
        ),
        Fails(
            "import torch\n\nEPS = 1e-12\n\n\ndef unit(x):\n    x = x.to(torch.float16)\n"
            "    return x / x.norm(dim=-1, keepdim=True).clamp(min=EPS)\n",
            line=8,
        ),
        Passes(
            "import torch\n\n\ndef entropy(logits):\n    p = logits.half().float().softmax(-1)\n"
            "    return -(p * torch.log(p + 1e-8)).sum(-1)\n"
        ),
        Passes(
            "import torch\n\n\ndef unit(x):\n    x = x.half()\n"
            "    return x / (x.norm(dim=-1, keepdim=True) + 1e-4)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        halves = Halves.of(code)
        if not halves.possible:
            return
        for value in code.of("add", "clamp", "clamp_min", "maximum", "max", *_WITH_EPS):
            for eps, tensor in _small(value):
                if value.node is not None and halves.is_half(tensor):
                    number = name_of(eps.number() or 0.0)
                    message = f"{number} is lost in float16: it protects nothing here"
                    fix = Fix(
                        "use an eps of 1e-4, or compute this in float32", edits=_edits(code, eps)
                    )
                    yield self.at(code, value.node, message, fixes=(fix,))
                    break


def _small(value: Value) -> Iterator[tuple[Value, Value]]:
    """The constants of an operation that float16 loses, each with the tensor they are used on."""
    inputs = value.inputs
    if not inputs:
        return
    if value.op in _WITH_EPS:
        eps = value.keywords.get("eps")
        if eps is not None and _is_lost(eps):
            yield eps, inputs[0]
    elif value.op in ("clamp", "clamp_min"):
        for bound in (value.arg(1, "min"), value.arg(2, "max")):
            if bound is not None and (_is_lost(bound) or _is_one(bound)):
                yield bound, inputs[0]
    elif len(inputs) == 2:
        for eps, tensor in ((inputs[1], inputs[0]), (inputs[0], inputs[1])):
            if _is_lost(eps):
                yield eps, tensor


def _is_one(bound: Value) -> bool:
    number = bound.number()
    return number is not None and 0 < 1.0 - number < _STEP


def _is_lost(eps: Value) -> bool:
    number = eps.number()
    return number is not None and 0.0 < number < _SMALLEST


def _edits(code: Code, eps: Value) -> tuple[Edit, ...]:
    if isinstance(eps.node, ast.Constant) and _is_lost(eps) and not eps.name:
        return (replaced(code, eps.node, "1e-4"),)
    return ()


# Half the distance from 1 to the next float32 below it, and above it.
_BELOW, _ABOVE = 2.0**-25, 2.0**-24
_DOUBLE = re.compile(rb"float64|DoubleTensor")
# At the margin of a script or of a function; below a condition it is an option.
_BY_DEFAULT = re.compile(
    rb"(?m)^(?: {4})?torch\.set_default_(?:tensor_type|dtype)\([^)\n]*(?:Double|double|float64)"
)


class EpsLostInFloat32(CodeRule):
    """A bound such as `1 - 1e-8`, or a sum `1 + 1e-9 - x`, in float32.

    *Why it breaks a run*: float32 has no number between 1 and 1 - 6e-8. A bound of `1 - 1e-8` is
    exactly 1, and `1 + 1e-9 - x` is exactly `1 - x`: the logarithm, the arc cosine or the division
    it was to protect is inf or 0 / 0 at the first saturated value.

    Use 1e-6 or 1e-7 beside 1, or add the eps to the difference: `(1 - x) + 1e-9` keeps it.
    """

    code = "SRC039"
    name = "eps-lost-in-float32"
    severity = Severity.WARNING
    seen_in = "https://github.com/snipsco/ntm-lasagne/issues/20"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef bce(p, y):\n    p = p.clamp(1e-8, 1 - 1e-8)\n"
            "    return -(y * p.log() + (1 - y) * (1 - p).log()).mean()\n",
            line=5,
            fixed="import torch\n\n\ndef bce(p, y):\n    p = p.clamp(1e-8, 1 - 1e-6)\n"
            "    return -(y * p.log() + (1 - y) * (1 - p).log()).mean()\n",
        ),
        Fails(
            "import torch\n\n\ndef alpha(v, iou, eps=1e-9):\n"
            "    return v / ((1 + eps) - iou + v)\n",
            line=5,
        ),
        Fails(
            "import torch\n\nEPS = 1e-10\n\n\ndef angle(c):\n"
            "    return torch.acos(torch.clamp(c, -1 + EPS, 1 - EPS))\n",
            line=7,
        ),
        Passes("import torch\n\n\ndef f(p):\n    return p.clamp(1e-7, 1 - 1e-7).log()\n"),
        Passes("import torch\n\n\ndef f(p):\n    return torch.log(1 - p + 1e-8)\n"),
        Passes("import torch\n\n\ndef f(p):\n    return p.double().clamp(1e-8, 1 - 1e-8).log()\n"),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        if _DOUBLE.search(code.text.content.encode()):
            return
        if code.project is not None and code.project.some_file_has(_BY_DEFAULT):
            return
        for value in code.of("clamp", "clamp_max", "clamp_min", "minimum", "min", "sub", "add"):
            lost = next((given for given in _beside_one(value) if _is_exactly_one(given)), None)
            if lost is None or value.node is None or not value.inputs:
                continue
            if any(part.op == "double" for part in value.inputs[0].upstream(12)):
                continue
            one = "1" if (lost.number() or 0.0) > 0 else "-1"
            message = (
                f"{name_of(_eps(lost))} beside {one} is lost in float32: this is exactly {one}"
            )
            fix = Fix(
                "use 1e-6 beside 1, or add the eps to the difference",
                edits=_edits_beside_one(code, lost),
            )
            yield self.at(code, value.node, message, fixes=(fix,))


def _beside_one(value: Value) -> Iterator[Value]:
    """Yields the numbers that an operation on a tensor is given."""
    if value.op in ("sub", "add"):
        numbers = [part for part in value.inputs[:2] if part.number() is not None]
        others = [part for part in value.inputs[:2] if part.number() is None]
        if len(numbers) == 1 and not any(map(_is_double, others)):
            yield numbers[0]
        return
    yield from value.inputs[1:3]
    yield from (value.keywords[key] for key in ("min", "max") if key in value.keywords)


def _is_double(value: Value) -> bool:
    """Returns whether a value is a number of Python: taken out of a tensor, a size, from math."""
    return value.op in ("item", "len") or value.has("size") or value.op.startswith("math.")


def _is_exactly_one(value: Value) -> bool:
    """Returns whether a number is next to 1 or -1, and equal to it in float32."""
    number = value.number()
    if number is None or value.core.op not in ("add", "sub", "neg"):
        return False
    away = abs(number) - 1.0
    if away == 0.0:  # lost in double precision already
        parts = [part.number() for part in value.core.inputs]
        return any(part is not None and 0 < abs(part) < _ABOVE for part in parts)
    return 0 < away < _ABOVE or 0 < -away < _BELOW


def _eps(lost: Value) -> float:
    """Returns the small number that is lost."""
    parts = [abs(part.number() or 0.0) for part in lost.core.inputs]
    small = [part for part in parts if 0 < part < _ABOVE]
    return small[0] if small else abs(1.0 - abs(lost.number() or 0.0))


def _edits_beside_one(code: Code, lost: Value) -> tuple[Edit, ...]:
    """Returns the edit of an eps that is written where it is used."""
    for part in lost.core.inputs:
        number = part.number()
        if (
            number is not None
            and 0 < abs(number) < _ABOVE
            and not part.name
            and part.node is not None
        ):
            return (replaced(code, part.node, "1e-6"),)
    return ()
