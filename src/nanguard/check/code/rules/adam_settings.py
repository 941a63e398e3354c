"""Settings of Adam: its eps in float16, and its two betas."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, replaced
from nanguard.check.code.half_precision import HalfModels
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Finding, Fix, Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

# Optimizers with an eps in the divisor: its place among the arguments, and its default.
_OPTIMIZERS = {
    "Adam": (3, 1e-8),
    "AdamW": (3, 1e-8),
    "NAdam": (3, 1e-8),
    "RAdam": (3, 1e-8),
    "Adamax": (3, 1e-8),
    "SparseAdam": (3, 1e-8),
    "RMSprop": (3, 1e-8),
    "Adagrad": (5, 1e-10),
}
_SMALLEST = 5.96e-8


class HalfPrecisionOptimizerState(CodeRule):
    """Adam, AdamW, RMSprop … over float16 parameters, with an eps that is zero in float16.

    *Why it breaks a run*: the optimizer's state takes the type of the parameters. The square of a
    gradient below 2e-4 is zero in float16, and so is an eps of 1e-8: the first step divides zero by
    zero, and the weights are NaN or Inf from then on.

    Keep the parameters in float32 and use autocast with a GradScaler, or bfloat16. If they must be
    float16, pass `eps=1e-4`.
    """

    code = "SRC005"
    name = "half-precision-optimizer-state"
    severity = Severity.ERROR
    seen_in = "https://github.com/afiaka87/glide-finetune/issues/5"
    examples: ClassVar = (
        Fails(
            "import torch\nfrom torch import nn\n\nmodel = nn.Linear(4, 4).cuda().half()\n"
            "opt = torch.optim.AdamW(model.parameters(), lr=1e-4)\n",
            line=5,
            fixed="import torch\nfrom torch import nn\n\nmodel = nn.Linear(4, 4).cuda().half()\n"
            "opt = torch.optim.AdamW(model.parameters(), lr=1e-4, eps=1e-4)\n",
        ),
        Fails(
            "import torch\nfrom transformers import AutoModelForCausalLM\n\n\n"
            "def optimizer(model):\n"
            "    groups = [p for p in model.parameters() if p.requires_grad]\n"
            "    return torch.optim.Adam(groups, eps=1e-8)\n\n\ndef main(name):\n"
            "    model = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.float16)\n"
            "    opt = optimizer(model)\n    model(1).loss.backward()\n    opt.step()\n",
            line=7,
        ),
        Passes(
            "import torch\nfrom torch import nn\n\nmodel = nn.Linear(4, 4).half()\n"
            "opt = torch.optim.Adam(model.parameters(), eps=1e-4)\n"
        ),
        Passes(
            "import torch\nfrom torch import nn\n\nmodel = nn.Linear(4, 4).half()\n"
            "masters = [p.detach().clone().float() for p in model.parameters()]\n"
            "opt = torch.optim.Adam(masters)\n"
        ),
        Passes(
            "import torch\nfrom torch import nn\n\nmodel = nn.Linear(4, 4).half()\n"
            "opt = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        models = HalfModels(code)
        for optimizer in code.of("new"):
            name = optimizer.path.rpartition(".")[2]
            if name not in _OPTIMIZERS or not re.match(r"torch\.|transformers\.", optimizer.path):
                continue
            eps = _eps(optimizer, *_OPTIMIZERS[name])
            parameters = optimizer.arg(0, "params")
            if optimizer.node is None or eps is None or parameters is None or eps >= _SMALLEST:
                continue
            if models.holds(parameters):
                message = f"{name} divides by an eps of {name_of(eps)}, which is 0 in float16"
                edits = _edits(code, optimizer)
                fix = Fix("keep float32 parameters and use autocast; else eps=1e-4", edits=edits)
                yield self.at(code, optimizer.node, message, fixes=(fix,))


def _eps(optimizer: Value, position: int, default: float) -> float | None:
    given = optimizer.arg(position, "eps")
    if given is not None:
        return given.number()
    return None if "**" in optimizer.keywords else default


def _edits(code: Code, optimizer: Value) -> tuple[Edit, ...]:
    node = optimizer.node
    if not isinstance(node, ast.Call) or len(node.args) > 1:
        return ()
    for keyword in node.keywords:
        if keyword.arg == "eps":
            return (replaced(code, keyword.value, "1e-4"),)
    last = max((*node.args, *(k.value for k in node.keywords)), key=lambda n: code.span(n)[1])
    _, end = code.span(last)
    return (Edit(end, end, ", eps=1e-4"),)


class RepeatedBeta(CodeRule):
    """`betas=(beta1, beta1)`, in a file that has a `beta2` as well.

    *Why it breaks a run*: the mean of squares that Adam divides by then forgets within some ten
    steps, where it was to remember a thousand. After a few small gradients the divisor is next to
    nothing, and the next ordinary one makes a step that is many times too long.

    Write `betas=(beta1, beta2)`.
    """

    code = "SRC055"
    name = "repeated-beta"
    severity = Severity.WARNING
    seen_in = "https://github.com/mila-iqia/blocks/issues/1159"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef make(model, beta1=0.9, beta2=0.999):\n"
            "    return torch.optim.Adam(model.parameters(), betas=(beta1, beta1))\n",
            line=5,
            fixed="import torch\n\n\ndef make(model, beta1=0.9, beta2=0.999):\n"
            "    return torch.optim.Adam(model.parameters(), betas=(beta1, beta2))\n",
        ),
        Passes(
            "import torch\n\n\ndef make(model, beta1=0.9, beta2=0.999):\n"
            "    return torch.optim.Adam(model.parameters(), betas=(beta1, beta2))\n"
        ),
        Passes(
            "import torch\n\n\ndef make(model, beta1=0.9):\n"
            "    return torch.optim.Adam(model.parameters(), betas=(beta1, beta1))\n"
        ),
        Passes(
            "import torch\n\n\ndef make(model):\n"
            "    return torch.optim.Adam(model.parameters(), betas=(0.9, 0.9))\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        for optimizer in code.of("new"):
            betas = optimizer.keywords.get("betas")
            node = betas.node if betas is not None else None
            if not isinstance(node, (ast.Tuple, ast.List)) or len(node.elts) != 2:
                continue
            first, second = map(code.segment, node.elts)
            other = _SECOND.sub("2", second)
            if first != second or other == second or not _is_known(code, other):
                continue
            message = f"{second} is both betas, and {other} is none: a slip of the pen"
            fix = Fix(f"write {other}", edits=(replaced(code, node.elts[1], other),))
            yield self.at(code, node, message, fixes=(fix,))


# The number at the end of a name, as in `args.beta1` or `config["b1"]`.
_SECOND = re.compile(r"1(?=\W*$)")


def _is_known(code: Code, expression: str) -> bool:
    """Returns whether the file or its project has something of the name an expression ends in."""
    name = re.findall(r"\w+", expression)[-1]
    if re.search(rf"\b{name}\b", code.text.content):
        return True
    word = re.compile(rf"\b{name}\b".encode())
    return code.project is not None and code.project.some_file_has(word)
