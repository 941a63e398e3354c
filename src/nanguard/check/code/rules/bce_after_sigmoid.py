"""Binary cross-entropy of a sigmoid's output."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.calls import LAYERS
from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.origins import origins
from nanguard.check.code.value_questions import is_open, some_module_returns
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_CALLED_LOSS = re.compile(r"loss|crit|bce|objective")
_FIX = Fix(
    "leave the sigmoid out and use binary_cross_entropy_with_logits (BCEWithLogitsLoss); "
    "apply the sigmoid only where probabilities are shown"
)


class BceAfterSigmoid(CodeRule):
    """`BCELoss` or `binary_cross_entropy` of the output of a sigmoid.

    *Why it breaks a run*: a sigmoid is exactly 0 or 1 once its input is beyond about 17 in float32
    (9 in float16). The loss is then cut off at 100 and its gradient is 0 or huge; under autocast
    the call is refused.

    Use `binary_cross_entropy_with_logits` on the sigmoid's input: the same loss, exact for any
    logit.
    """

    code = "SRC019"
    name = "bce-after-sigmoid"
    severity = Severity.WARNING
    seen_in = "https://github.com/pytorch/pytorch/issues/61098"
    examples: ClassVar = (
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef loss(x, y):\n"
            "    return F.binary_cross_entropy(torch.sigmoid(x), y)\n",
            line=6,
        ),
        Fails(
            "import torch\nfrom torch import nn\n\nnet = nn.Sequential(nn.Linear(4, 1), "
            "nn.Sigmoid())\ncriterion = nn.BCELoss()\n\n\ndef step(x, y):\n"
            "    return criterion(net(x), y)\n",
            line=9,
        ),
        Passes(
            "import torch\nimport torch.nn.functional as F\n\n\ndef loss(x, y):\n"
            "    shown = torch.sigmoid(x)\n"
            "    return F.binary_cross_entropy_with_logits(x, y), shown\n"
        ),
        Fails(
            "import torch\nfrom torch import nn\n\n\ndef loss_for(task):\n"
            "    if task == 'size':\n        return nn.MSELoss()\n    return nn.BCELoss()\n\n\n"
            "def train(net, x, y):\n    loss_fn = loss_for('kind')\n"
            "    loss_fn(torch.sigmoid(net(x)), y).backward()\n",
            line=13,
        ),
        Passes(
            "import torch.nn.functional as F\n\n\ndef loss(p, y):\n"
            "    return F.binary_cross_entropy(p, y)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        ends_in_sigmoid = _some_module_ends_in_sigmoid(code)
        for loss in code.of("binary_cross_entropy", "call"):
            handed = loss.op == "call"
            if handed and not _is_handed_in(code, loss):
                continue
            value = loss.arg(1 if handed else 0, "input")
            if value is None or value.lo > 0 or not loss.grad:
                continue
            if _is_sigmoid(code, value, ends_in_sigmoid=ends_in_sigmoid):
                yield self.at(
                    code,
                    loss.node,
                    "binary cross-entropy of a sigmoid: the loss is cut off and its gradient lost "
                    "where the sigmoid rounds to 0 or 1",
                    fixes=(_FIX,),
                )


def _is_handed_in(code: Code, call: Value) -> bool:
    """Returns whether a loss is called that some caller chose: a ``BCELoss``."""
    callee = call.inputs[0] if call.inputs else None
    if callee is None or not _CALLED_LOSS.search(callee.name.lower()):
        return False
    if not (is_open(callee.core) or callee.core.op == "new"):  # new: one of those a function makes
        return False
    return any(maker.path == "torch.nn.BCELoss" for maker in origins(code, callee).makers)


def _is_sigmoid(code: Code, value: Value, *, ends_in_sigmoid: bool) -> bool:
    """Returns whether a value is a sigmoid's, here or in the model that it comes from."""
    if value.has("sigmoid"):
        return True
    found = origins(code, value)
    if any(_ends_in_sigmoid(code, maker) for maker in found.makers):
        return True
    known = found.made_by("layer", *LAYERS.values())
    return ends_in_sigmoid and not known and _may_be_an_output(value)


def _ends_in_sigmoid(code: Code, maker: Value) -> bool:
    """Returns whether an operation is a sigmoid, or masks what one has made."""
    if maker.op == "mul":
        return any(origins(code, factor).made_by("sigmoid") for factor in maker.inputs[:2])
    return maker.op == "sigmoid"


def _some_module_ends_in_sigmoid(code: Code) -> bool:
    if some_module_returns(code, "sigmoid"):
        return True
    return any(
        layer.path == "torch.nn.Sigmoid" and layer.node is not None and _is_last(code, layer.node)
        for layer in code.of("new")
    )


def _is_last(code: Code, node: ast.AST) -> bool:
    """Returns whether a layer is the last one of a stack of layers."""
    parent = code.parents.get(node)
    if isinstance(parent, ast.List):
        return parent.elts[-1] is node and len(parent.elts) > 1
    if isinstance(parent, ast.Call):
        called = getattr(parent.func, "attr", getattr(parent.func, "id", ""))
        return called in ("Sequential", "append", "add_module") and parent.args[-1:] == [node]
    return False


def _may_be_an_output(value: Value) -> bool:
    """Returns whether a value may be what some module of the file gives back."""
    core = value.core
    while core.op in ("part", "element", "field", "call") and core.inputs:
        if core.op == "call":
            return not core.path
        core = core.inputs[0].core
    return core.op == "" and not core.path and core.const is None
