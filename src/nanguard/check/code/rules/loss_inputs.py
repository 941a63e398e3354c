"""What losses are given: logits, probabilities or their logarithms, and along which dimension."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.calls import LAYERS
from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.origins import argument_of, calls_of, origins
from nanguard.check.code.value_questions import is_layer, is_open, some_module_returns
from nanguard.check.code.values import SHAPE
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
        told: set[tuple[int, str]] = set()
        for loss in code.of("binary_cross_entropy", "call"):
            key = (id(loss.scope), _criterion(loss))
            if key in told:
                continue  # the same criterion again, in evaluation as a rule
            handed = loss.op == "call"
            if handed and not _is_handed_in(code, loss):
                continue
            value = loss.arg(1 if handed else 0, "input")
            if value is None or value.lo > 0 or not loss.grad:
                continue
            if _is_sigmoid(code, value, ends_in_sigmoid=ends_in_sigmoid):
                if key[1]:
                    told.add(key)
                yield self.at(
                    code,
                    loss.node,
                    "binary cross-entropy of a sigmoid: the loss is cut off and its gradient lost "
                    "where the sigmoid rounds to 0 or 1",
                    fixes=(_FIX,),
                )


def _criterion(loss: Value) -> str:
    """Returns the name of the object that is called as a loss; nothing for a function of torch."""
    called = loss.node.func if isinstance(loss.node, ast.Call) else None
    return called.id if isinstance(called, ast.Name) else ""


def _is_handed_in(code: Code, call: Value) -> bool:
    """Returns whether a loss is called that some caller chose: a ``BCELoss``."""
    callee = call.inputs[0] if call.inputs else None
    if callee is None or not _CALLED_LOSS.search(callee.name.lower()):
        return False
    if not (is_open(callee.core) or callee.core.op == "new"):  # new: one of those a function makes
        return False
    return "BCELoss" in _losses_made(code, callee)


def _losses_made(code: Code, callee: Value) -> set[str]:
    """Returns the names of the losses of torch that a value may be."""
    paths = (maker.path for maker in origins(code, callee).makers)
    return {path.rpartition(".")[2] for path in paths if path.startswith("torch.nn.")}


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


# What makes probabilities, and what makes numbers of any size.
_CHANCES = frozenset({"softmax", "sigmoid"})
_LOG_CHANCES = frozenset({"log_softmax", "logsigmoid"})
_ANY_SIZE = frozenset({"layer", "relu", "tanh", "softplus", "gelu", "silu", "elu"})
_OF_LOSS = {name: LAYERS[name] for name in (
    "CrossEntropyLoss", "NLLLoss", "KLDivLoss", "BCELoss", "BCEWithLogitsLoss"
)}  # fmt: skip
_TOLD: dict[tuple[str, str], str] = {
    ("cross_entropy", "softmax"): "cross_entropy of a softmax takes the softmax twice: between "
    "the best and the worst answer the loss differs by 1 at most, and gradients all but vanish",
    ("nll_loss", "softmax"): "nll_loss of probabilities: it wants their logarithms, and this is "
    "minus a probability, whose gradient vanishes for wrong answers",
    ("nll_loss", "logits"): "nll_loss of raw outputs: it wants log-probabilities, and what nothing "
    "normalises is driven to -inf",
    ("kl_div", "softmax"): "kl_div of probabilities: its first argument is log-probabilities",
    ("kl_div", "sigmoid"): "kl_div of probabilities: its first argument is log-probabilities",
    ("kl_div", "target"): "kl_div to log-probabilities takes their logarithm, NaN for all below 0: "
    "it wants log_target=True",
    ("binary_cross_entropy", "logits"): "binary cross-entropy of raw outputs: it wants "
    "probabilities, and raises an error for anything below 0 or above 1",
    ("binary_cross_entropy_with_logits", "sigmoid"): "binary cross-entropy with logits of a "
    "sigmoid takes the sigmoid twice: no probability is below 0.5 or above 0.73",
    ("log_softmax", "softmax"): "log_softmax of a softmax: between the best and the worst answer "
    "they differ by 1 at most, and gradients all but vanish",
}  # fmt: skip
_REPAIR = {
    "cross_entropy": "hand the raw outputs to it, without the softmax",
    "nll_loss": "take log_softmax of the raw outputs, or cross_entropy of them",
    "kl_div": "hand log_softmax of the outputs to it, and probabilities as the target",
    "binary_cross_entropy": "use binary_cross_entropy_with_logits",
    "binary_cross_entropy_with_logits": "hand the raw outputs to it, without the sigmoid",
    "log_softmax": "take log_softmax of the raw outputs",
}


class LossOfWrongInput(CodeRule):
    """A loss or a distribution that is handed probabilities for logits, or the other way round.

    `cross_entropy` and `binary_cross_entropy_with_logits` want raw outputs, `nll_loss` and `kl_div`
    log-probabilities, `binary_cross_entropy` probabilities. What the model gives back is followed
    into the file where it is defined; something is said only if it gives that back in every case.

    *Why it breaks a run*: nothing fails. A softmax that is taken twice leaves a gradient of almost
    nothing, and the loss stays at a high value for ever; `nll_loss` of raw outputs goes to -inf,
    and the weights with it; `kl_div` to log-probabilities is NaN.

    Take the last softmax or sigmoid out of the model, and apply it where probabilities are shown.
    """

    code = "SRC057"
    name = "loss-of-wrong-input"
    severity = Severity.WARNING
    seen_in = "https://github.com/jindongwang/Deep-learning-activity-recognition/issues/10"
    examples: ClassVar = (
        Fails(
            "import torch.nn.functional as F\nfrom torch import nn\n\n\n"
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.fc = nn.Linear(4, 3)\n\n    def forward(self, x):\n"
            "        return F.softmax(self.fc(x), dim=1)\n\n\ndef train(loader):\n"
            "    net, criterion = Net(), nn.CrossEntropyLoss()\n    for x, y in loader:\n"
            "        criterion(net(x), y).backward()\n",
            line=17,
        ),
        Passes(
            "import torch.nn.functional as F\nfrom torch import nn\n\n\n"
            "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.fc = nn.Linear(4, 3)\n\n    def forward(self, x):\n"
            "        x = self.fc(x)\n        return x if self.training else F.softmax(x, dim=1)\n"
            "\n\ndef train(loader):\n    net, criterion = Net(), nn.CrossEntropyLoss()\n"
            "    for x, y in loader:\n        criterion(net(x), y).backward()\n"
        ),
        Fails(
            "import torch.nn.functional as F\nfrom torch import nn\n\nnet = nn.Linear(4, 3)\n\n\n"
            "def loss(x, y):\n    return F.nll_loss(net(x), y)\n",
            line=8,
        ),
        Passes(
            "import torch.nn.functional as F\nfrom torch import nn\n\nnet = nn.Linear(4, 3)\n\n\n"
            "def loss(x, y):\n    return F.nll_loss(F.log_softmax(net(x), -1), y)\n"
        ),
        Fails(
            "import torch.nn.functional as F\n\n\ndef distill(a, b):\n"
            "    return F.kl_div(F.log_softmax(a, -1), F.log_softmax(b, -1))\n",
            line=5,
        ),
        Passes(
            "import torch.nn.functional as F\n\n\ndef distill(a, b):\n"
            "    p = F.log_softmax(b, -1)\n"
            "    return F.kl_div(F.log_softmax(a, -1), p, log_target=True)\n"
        ),
        Passes(
            "import torch.nn.functional as F\n\n\ndef contrast(a, b, y, t):\n"
            "    return F.cross_entropy(F.softmax(a @ b.t(), -1) / t, y)\n"
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef loss(x, y):\n"
            "    return F.binary_cross_entropy_with_logits(torch.sigmoid(x), y)\n",
            line=6,
        ),
        Fails(
            "import torch\nfrom torch.distributions import Categorical\n\n\ndef loss(x, a):\n"
            "    return -Categorical(logits=torch.softmax(x, -1)).log_prob(a).mean()\n",
            line=6,
        ),
        Passes(
            "import torch\nfrom torch.distributions import Categorical\n\n\ndef loss(x, a):\n"
            "    return -Categorical(probs=torch.softmax(x, -1)).log_prob(a).mean()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        losses = {op for op, _ in _TOLD}
        for loss in code.of(*losses, "call"):
            op = loss.op if loss.op != "call" else _loss_handed_in(code, loss)
            value = loss.arg(0 if loss.op != "call" else 1, "input")
            if not op or value is None or not loss.grad:
                continue
            message = _TOLD.get((op, _made_of(code, value)))
            if op == "kl_div" and message is None:
                message = _to_logarithms(code, loss)
            if message is not None:
                yield self.at(code, loss.node, message, fixes=(Fix(_REPAIR[op]),))
        for made in code.of("new"):
            logits = made.keywords.get("logits")
            if logits is None or not made.path.startswith("torch.distributions"):
                continue
            if made.grad and _made_of(code, logits) == "softmax":
                message = "logits that are probabilities: no choice is e times as likely as another"
                fix = Fix("hand them over as probs, or the raw outputs as logits")
                yield self.at(code, made.node, message, fixes=(fix,))


def _loss_handed_in(code: Code, call: Value) -> str:
    """Returns what is computed where a loss is called that some caller chose; else nothing."""
    callee = call.inputs[0] if call.inputs else None
    if callee is None or not _CALLED_LOSS.search(callee.name.lower()):
        return ""
    if not (is_open(callee.core) or callee.core.op == "new"):
        return ""
    made = _losses_made(code, callee)
    return _OF_LOSS.get(next(iter(made)), "") if len(made) == 1 else ""


def _made_of(code: Code, value: Value) -> str:
    """Returns what a loss is given wherever it comes from: a softmax, a sigmoid, raw outputs."""
    made = origins(code, value).makers
    if made and all(maker.op in _ANY_SIZE or is_layer(maker) for maker in made):
        return "logits"
    operations = {maker.op for maker in made}
    return operations.pop() if len(operations) == 1 else ""


def _to_logarithms(code: Code, loss: Value) -> str | None:
    """Returns what is wrong with the target of a divergence, if that is log-probabilities."""
    target = loss.arg(1 if loss.op != "call" else 2, "target")
    if target is None or "log_target" in loss.keywords or loss.op == "call":
        return None
    made = origins(code, target).makers
    logs = bool(made) and all(maker.op in _LOG_CHANCES for maker in made)
    return _TOLD["kl_div", "target"] if logs else None


_LAST = (-1.0, 3.0, 4.0)
_IMAGES = re.compile(r"torch\.nn\.((Conv|ConvTranspose|BatchNorm)[23]d|Upsample\w*)$")
_MOVES_DIMENSIONS = frozenset(
    {"permute", "view", "reshape", "flatten", "unflatten", "transpose", "movedim", "swapaxes",
     "rearrange", "T", "mT", "t", "squeeze", "unsqueeze", "getitem", "view_as", "reshape_as"}
)  # fmt: skip


class SoftmaxOverWrongDim(CodeRule):
    """A softmax over the last dimension of images whose classes are dimension 1.

    That the classes are there is seen beside it, or where its function is called: a `cross_entropy`
    or a softmax along dimension 1 of the same outputs, which a convolution made.

    *Why it breaks a run*: the softmax then runs along the rows of the image. It raises no error,
    what comes out sums to 1 over the columns, and the loss that is made of it teaches the model
    something else than the one beside it.

    Write `softmax(logits, dim=1)`.
    """

    code = "SRC058"
    name = "softmax-over-wrong-dim"
    severity = Severity.WARNING
    seen_in = "https://github.com/leofansq/CPCL/issues/1"
    examples: ClassVar = (
        Fails(
            "import torch.nn.functional as F\nfrom torch import nn\n\nnet = nn.Conv2d(3, 5, 3)\n"
            "\n\n"
            "def loss(x, y):\n    out = net(x)\n    p = F.softmax(out, dim=-1)\n"
            "    return F.cross_entropy(out, y) - (p * p).mean()\n",
            line=9,
        ),
        Passes(
            "import torch.nn.functional as F\nfrom torch import nn\n\nnet = nn.Linear(3, 5)\n\n\n"
            "def loss(x, y):\n    out = net(x)\n    p = F.softmax(out, dim=-1)\n"
            "    return F.cross_entropy(out, y) - (p * p).mean()\n"
        ),
        Passes(
            "import torch.nn.functional as F\nfrom torch import nn\n\nnet = nn.Conv2d(3, 5, 3)\n"
            "\n\n"
            "def loss(x, y):\n    out = net(x)\n"
            "    p = F.softmax(out.permute(0, 2, 3, 1), dim=-1)\n"
            "    return F.cross_entropy(out, y) - (p * p).mean()\n"
        ),
        Passes(
            "import torch.nn.functional as F\nfrom torch import nn\n\nnet = nn.Conv2d(3, 5, 3)\n"
            "\n\n"
            "def along_rows(x):\n    return F.softmax(net(x), dim=-1)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        told: set[int] = set()
        for softmax in code.of("softmax", "log_softmax"):
            dim = softmax.arg(1, "dim")
            given = softmax.inputs[0] if softmax.inputs else None
            if (
                given is None
                or id(softmax.scope) in told
                or dim is None
                or dim.number() not in _LAST
            ):
                continue
            if not is_open(given.core) or _is_moved(given):
                continue
            first = any(_are_classes_first(home, handed) for home, handed in _handed(code, given))
            if first and _is_of_images(code, given):
                told.add(id(softmax.scope))
                message = (
                    f"{softmax.op} over the last dimension of images: their classes are dimension "
                    "1, as they are where the same outputs are used beside it"
                )
                yield self.at(code, softmax.node, message, fixes=(Fix("take it along dim=1"),))


def _handed(code: Code, given: Value) -> Iterator[tuple[Code, Value]]:
    """Yields what a function is given, each with the file in which that stands."""
    yield code, given
    scope = given.core.scope
    if scope is None or given.core.op:
        return
    for home, call in calls_of(code, scope):
        handed = argument_of(home, call, scope, given.core)
        if handed is not None:
            yield home, handed


def _are_classes_first(code: Code, given: Value) -> bool:
    """Returns whether a file takes the classes of some outputs along dimension 1."""
    return any(_is_along_classes(other, given) for other in _others(code))


def _others(code: Code) -> Iterator[Value]:
    """Yields what takes classes along dimension 1."""
    yield from code.of("cross_entropy", "nll_loss")
    for softmax in code.of("softmax", "log_softmax"):
        dim = softmax.arg(1, "dim")
        if dim is not None and dim.number() == 1.0:
            yield softmax


def _is_along_classes(other: Value, given: Value) -> bool:
    """Returns whether another operation is given the same outputs, as they are."""
    value = other.inputs[0] if other.inputs else None
    if value is None or _is_moved(value):
        return False
    return value.core is given.core


def _is_moved(value: Value) -> bool:
    """Returns whether dimensions were moved about, since what makes a value."""
    while value.op in SHAPE and value.inputs:
        rows = value.op == "getitem" and isinstance(value.inputs[-1].node, ast.Slice)
        if value.op in _MOVES_DIMENSIONS and not rows:
            return True
        value = value.inputs[0]
    return False


def _is_of_images(code: Code, value: Value) -> bool:
    """Returns whether convolutions over images make a value, and no other layer does."""
    layers = [path for maker in origins(code, value).makers if (path := _layer_of(maker))]
    return bool(layers) and all(map(_IMAGES.search, layers))


def _layer_of(maker: Value) -> str:
    """Returns the layer of torch that makes a value; empty if that is not known."""
    if maker.op in ("conv2d", "conv3d", "conv_transpose2d", "conv_transpose3d"):
        return "torch.nn.Conv2d"
    path = maker.inputs[0].core.path if maker.op == "call" and maker.inputs else maker.path
    return path if maker.op in ("call", "layer") and path.startswith("torch.nn.") else ""
