"""What does not fit into float16: a mask constant, the sums of a Fourier transform."""

from __future__ import annotations

import ast
import math
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, bare, replaced
from nanguard.check.code.half_precision import Halves
from nanguard.check.code.origins import calls_through, origins
from nanguard.check.code.values import SHAPE
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


_TRANSFORMS = ("rfft", "fft", "fft2", "rfft2", "fftn", "rfftn", "hfft")
_LAYERS = re.compile(r"torch\.nn\.(Linear|Conv\d?d?|ConvTranspose\dd|Bilinear)$")
# Training in float16 with a loss scale. Mixed precision in bfloat16 needs none.
_SCALES = re.compile(rb"\bGradScaler\(")
_CASTS = re.compile(rb"\bautocast\(")
_BFLOAT16 = re.compile(rb"autocast\([^)\n]*bfloat16|dtype *= *torch\.bfloat16")
_OFF = re.compile(r"autocast\([^)]*(False|float32)|custom_fwd\([^)]*float32")


class FftInHalf(CodeRule):
    """A Fourier transform of what a layer has made under float16 autocast, without `.float()`.

    *Why it breaks a run*: autocast does not turn `torch.fft` to float32 on CUDA. In float16, cuFFT
    takes only lengths that are powers of two and stops the run at others; and the first number of a
    transform is the sum of all that went in, which passes 65504 soon: inf, and NaN after the way
    back.

    Write `torch.fft.rfft(x.float())`, or turn autocast off around it.
    """

    code = "SRC046"
    name = "fft-in-half"
    severity = Severity.WARNING
    seen_in = "https://github.com/thuml/Time-Series-Library/issues/761"
    examples: ClassVar = (
        Fails(
            "import torch\nfrom torch import nn\n\n\nclass Mix(nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.go = nn.Linear(36, 36)\n\n"
            "    def forward(self, x):\n"
            "        return torch.fft.rfft(self.go(x), dim=-1).abs()\n\n\n"
            "def train(net, x, opt):\n    scaler = torch.cuda.amp.GradScaler()\n"
            "    with torch.cuda.amp.autocast():\n        loss = net(x).mean()\n"
            "    scaler.scale(loss).backward()\n    scaler.step(opt)\n",
            line=11,
            fixed="import torch\nfrom torch import nn\n\n\nclass Mix(nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.go = nn.Linear(36, 36)\n\n"
            "    def forward(self, x):\n"
            "        return torch.fft.rfft(self.go(x).float(), dim=-1).abs()\n\n\n"
            "def train(net, x, opt):\n    scaler = torch.cuda.amp.GradScaler()\n"
            "    with torch.cuda.amp.autocast():\n        loss = net(x).mean()\n"
            "    scaler.scale(loss).backward()\n    scaler.step(opt)\n",
        ),
        Passes(
            "import torch\nfrom torch import nn\n\n\nclass Mix(nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.go = nn.Linear(36, 36)\n\n"
            "    def forward(self, x):\n"
            "        return torch.fft.rfft(self.go(x).float(), dim=-1).abs()\n\n\n"
            "def train(net, x, opt):\n    scaler = torch.cuda.amp.GradScaler()\n"
            "    with torch.cuda.amp.autocast():\n        loss = net(x).mean()\n"
            "    scaler.scale(loss).backward()\n    scaler.step(opt)\n"
        ),
        Passes(
            "import torch\nfrom torch import nn\n\n\nclass Mix(nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.go = nn.Linear(36, 36)\n\n"
            "    def forward(self, x):\n"
            "        return torch.fft.rfft(self.go(x), dim=-1).abs()\n\n\n"
            "def train(net, x, opt):\n    with torch.autocast('cuda', dtype=torch.bfloat16):\n"
            "        loss = net(x.bfloat16()).mean()\n    loss.backward()\n    opt.step()\n"
        ),
        Passes(
            "import torch\nfrom torch import nn\n\n\nclass Mix(nn.Module):\n"
            "    def forward(self, wave):\n        return torch.fft.rfft(wave, dim=-1).abs()\n\n\n"
            "def train(net, x, opt):\n    scaler = torch.cuda.amp.GradScaler()\n"
            "    with torch.cuda.amp.autocast():\n        loss = net(x).mean()\n"
            "    scaler.scale(loss).backward()\n    scaler.step(opt)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        if not any(_some_file_has(code, pattern) for pattern in (_SCALES, _CASTS)):
            return
        told: set[int] = set()
        for transform in code.of(*_TRANSFORMS):
            scope = transform.scope
            if not transform.path or not transform.inputs or id(scope) in told:
                continue
            if _is_cast(transform.inputs[0]) or _is_switched_off(code, transform):
                continue
            if not _is_made_by_layer(code, transform.inputs[0]):
                continue
            if not all(_some_file_has(code, pattern) for pattern in (_SCALES, _CASTS)):
                continue
            told.add(id(scope))
            node = transform.node
            given = node.args[0] if isinstance(node, ast.Call) and node.args else None
            edits = (replaced(code, given, f"{bare(code, given)}.float()"),) if given else ()
            yield self.at(
                code,
                node,
                "a Fourier transform in float16: autocast leaves it there, only lengths that are "
                "powers of two are taken, and its sums pass 65504",
                fixes=(Fix("compute it in float32", edits=edits),),
                weak=_some_file_has(code, _BFLOAT16),
            )


def _some_file_has(code: Code, pattern: re.Pattern[bytes]) -> bool:
    if code.project is not None:
        return code.project.some_file_has(pattern)
    return pattern.search(code.text.content.encode()) is not None


def _is_cast(value: Value) -> bool:
    """Returns whether a value is turned into another type on its way from where it was made."""
    while value.op in SHAPE and value.inputs:
        if value.op in ("float", "double", "to", "type", "type_as", "bfloat16"):
            return value.op != "to" or "dtype" in value.keywords or _names_type(value)
        value = value.inputs[0]
    return value.half is False


def _names_type(value: Value) -> bool:
    return any("float" in part.path or part.name == "dtype" for part in value.inputs[1:])


def _is_made_by_layer(code: Code, value: Value, depth: int = 2) -> bool:
    """Returns whether a layer makes a value that autocast computes in float16."""
    makers = origins(code, value).makers
    if any(map(_is_layer, makers)):
        return True
    return depth > 0 and any(
        _is_made_by_layer(code, given, depth - 1)
        for maker in makers
        if maker.op == "" and maker.scope is not None and maker.scope.name == "forward"
        for given in _handed(code, maker)
    )


def _is_layer(maker: Value) -> bool:
    path = maker.path
    if maker.op == "call" and maker.inputs:
        path = maker.inputs[0].core.path
    return maker.op in ("call", "layer") and _LAYERS.match(path) is not None


def _handed(code: Code, parameter: Value) -> Iterator[Value]:
    """Yields what a parameter is given where its module was handed in to another one."""
    function = parameter.scope
    names = [name for name in function.parameters if name != "self"] if function else []
    for call in calls_through(code, function) if function is not None else ():
        if parameter.name not in names or not isinstance(call.node, ast.Call):
            continue
        place = names.index(parameter.name)
        if place < len(call.node.args):
            given = code.values.get(call.node.args[place])
            if given is not None and not _is_cast(given):
                yield given


def _is_switched_off(code: Code, transform: Value) -> bool:
    """Returns whether a region or a decorator keeps a place out of float16."""
    for outer in code.ancestors(transform.node) if transform.node is not None else ():
        if isinstance(outer, (ast.With, ast.AsyncWith)):
            around = [item.context_expr for item in outer.items]
        elif isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            around = outer.decorator_list
        else:
            continue
        if any(_OFF.search(ast.unparse(node)) for node in around):
            return True
    return False
