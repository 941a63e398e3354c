"""A mask constant that float16 cannot hold."""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, replaced
from nanguard.check.code.half_precision import Halves
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Finding, Fix, Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_LARGEST_FLOAT16 = 65504.0


class MaskConstantOverflowsHalf(CodeRule):
    """-1e9, -1e10 or `finfo(torch.float32).min` written into float16 tensors.

    *Why it breaks a run*: the largest float16 is 65504. `masked_fill` refuses the constant and
    stops the run; added or chosen it becomes -inf, a row in which everything is masked becomes NaN
    in the softmax, and the NaN spreads.

    Use `torch.finfo(scores.dtype).min`, which is right for any type, or compute the scores in
    float32.
    """

    code = "SRC007"
    name = "mask-constant-overflows-half"
    severity = Severity.WARNING
    seen_in = "https://github.com/NVIDIA/apex/issues/1052"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef attend(q, k, pad):\n    s = q.half() @ k.half().mT\n"
            "    s = s.masked_fill(pad, -1e9)\n    return s.softmax(-1)\n",
            line=6,
            fixed="import torch\n\n\ndef attend(q, k, pad):\n    s = q.half() @ k.half().mT\n"
            "    s = s.masked_fill(pad, torch.finfo(s.dtype).min)\n    return s.softmax(-1)\n",
        ),
        Fails(
            "import torch\nfrom torch import nn\n\nLOWEST = torch.finfo(torch.float32).min\n\n\n"
            "class Attention(nn.Module):\n    def forward(self, q, k, pad):\n"
            "        s = q @ k.mT\n        return torch.where(pad, LOWEST, s).softmax(-1)\n\n\n"
            "def train(net, batch):\n    with torch.autocast('cuda', dtype=torch.float16):\n"
            "        return net(*batch)\n",
            line=10,
        ),
        Passes(
            "import torch\n\n\ndef attend(q, k, pad):\n    s = (q.half() @ k.half().mT).float()\n"
            "    return s.masked_fill(pad, -1e9).softmax(-1)\n"
        ),
        Passes(
            "import torch\n\n\ndef attend(q, k, pad):\n    s = q.half() @ k.half().mT\n"
            "    return s.masked_fill(pad, -1e4).softmax(-1)\n"
        ),
        Passes(
            "import torch\nfrom torch import nn\n\n\nclass Attention(nn.Module):\n"
            "    def forward(self, q, k, pad):\n"
            "        return (q @ k.mT).masked_fill(pad, -1e9).softmax(-1)\n\n\n"
            "def train(net, batch):\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n"
            "        return net(*batch)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        halves = Halves.of(code)
        if not halves.possible:
            return
        written = code.of(
            "masked_fill", "setitem", "where", "full_like", "full", "new_full", "fill", "mul",
            "add", "sub",
        )  # fmt: skip
        for value in written:
            for constant, tensor in _written(value):
                number = constant.number()
                if number is None or math.isinf(number) or abs(number) <= _LARGEST_FLOAT16:
                    continue
                if value.node is not None and halves.is_half(tensor):
                    message = f"{name_of(number)} does not fit into float16 (largest: 65504)"
                    fix = Fix("use torch.finfo(tensor.dtype).min", edits=_edits(code, value))
                    yield self.at(code, value.node, message, fixes=(fix,))
                    break


def _written(value: Value) -> Iterator[tuple[Value, Value]]:
    """The constants an operation writes, each with the tensor it writes into."""
    inputs = value.inputs
    if value.op == "masked_fill":
        fill = value.arg(2, "value")
        if fill is not None:
            yield fill, inputs[0]
    elif value.op == "setitem":
        yield inputs[2], inputs[0]
    elif value.op == "where" and len(inputs) == 3:
        yield inputs[1], inputs[2]
        yield inputs[2], inputs[1]
    elif value.op in ("full_like", "full", "new_full", "fill"):
        fill = value.arg(2 if value.op == "new_full" else 1, "fill_value")
        if fill is not None and value.half is not False:
            yield fill, value if value.half or value.op == "full" else inputs[0]
    elif value.op in ("mul", "add", "sub") and len(inputs) == 2:
        yield inputs[1], inputs[0]
        yield inputs[0], inputs[1]


def _edits(code: Code, value: Value) -> tuple[Edit, ...]:
    node = value.node
    if value.op != "masked_fill" or not isinstance(node, ast.Call):
        return ()
    tensor = (
        node.func.value if isinstance(node.func, ast.Attribute) and not value.path else node.args[0]
    )
    fill = [k.value for k in node.keywords if k.arg == "value"] or node.args[-1:]
    if (
        not isinstance(tensor, (ast.Name, ast.Attribute))
        or code.names.imports.get("torch") != "torch"
    ):
        return ()
    return (replaced(code, fill[0], f"torch.finfo({code.segment(tensor)}.dtype).min"),)
