"""An eps beside 1 that float32 rounds away."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, replaced
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Finding, Fix, Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

# Half the distance from 1 to the next float32 below it, and above it.
_BELOW, _ABOVE = 2.0**-25, 2.0**-24
_DOUBLE = re.compile(rb"float64|DoubleTensor|\.double\(\)")
_BY_DEFAULT = re.compile(rb"set_default_(?:tensor_type|dtype)\([^)]*(?:Double|double|float64)")


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
            lost = next((given for given in _beside_one(value) if _is_lost(given)), None)
            if lost is None or value.node is None or not value.inputs:
                continue
            one = "1" if (lost.number() or 0.0) > 0 else "-1"
            message = (
                f"{name_of(_eps(lost))} beside {one} is lost in float32: this is exactly {one}"
            )
            fix = Fix(
                "use 1e-6 beside 1, or add the eps to the difference", edits=_edits(code, lost)
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


def _is_lost(value: Value) -> bool:
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


def _edits(code: Code, lost: Value) -> tuple[Edit, ...]:
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
