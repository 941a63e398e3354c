"""A recurrent network trained without gradient clipping."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.calls import RECURRENT
from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.training import Training, ValueRoles
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_CLIP = re.compile(
    r"clip_?grad|grad\w{0,30}clip|clip_?norm|max_grad_norm|clip_gradients", re.IGNORECASE
)
_FIX = Fix("clip before the step: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)")


class UnclippedRecurrentTraining(CodeRule):
    """An RNN, LSTM or GRU that is trained in a file where nothing clips gradients.

    *Why it breaks a run*: through time the same weights are multiplied again and again, so a
    gradient grows with the length of the sequence; one long or unusual sequence makes it explode,
    and the weights are gone after that step.

    Clip the norm of the gradients before the step (`clip_grad_norm_(model.parameters(), 1.0)`, or
    `Trainer(gradient_clip_val=1.0)`).
    """

    code = "SRC032"
    name = "unclipped-recurrent-training"
    severity = Severity.INFO
    seen_in = "https://github.com/Marcovaldong/lstmp.pytorch/issues/2"
    examples: ClassVar = (
        Fails(
            "import torch\nfrom torch import nn\n\nrnn = nn.LSTM(8, 8)\n"
            "opt = torch.optim.Adam(rnn.parameters())\n\n\ndef step(x, y):\n"
            "    loss = (rnn(x)[0] - y).pow(2).mean()\n    opt.zero_grad()\n    loss.backward()\n"
            "    opt.step()\n",
            line=4,
        ),
        Fails(
            "import lightning as L\nimport torch\nfrom torch import nn\n\n\n"
            "class Tagger(L.LightningModule):\n    def __init__(self):\n"
            "        super().__init__()\n        self.rnn = nn.GRU(8, 8)\n\n"
            "    def training_step(self, batch, i):\n        return self.rnn(batch)[0].mean()\n\n\n"
            "L.Trainer(max_epochs=3).fit(Tagger())\n",
            line=9,
        ),
        Passes(
            "import torch\nfrom torch import nn\n\nrnn = nn.LSTM(8, 8)\n"
            "opt = torch.optim.Adam(rnn.parameters())\n\n\ndef step(x, y):\n"
            "    loss = (rnn(x)[0] - y).pow(2).mean()\n    loss.backward()\n"
            "    for p in rnn.parameters():\n        p.grad.clamp_(-1, 1)\n    opt.step()\n"
        ),
        Passes(
            "import lightning as L\nfrom torch import nn\n\n\nclass Tagger(L.LightningModule):\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.rnn = nn.GRU(8, 8)\n\n"
            "    def training_step(self, batch, i):\n        return self.rnn(batch)[0].mean()\n\n\n"
            "L.Trainer(gradient_clip_val=1.0).fit(Tagger())\n"
        ),
        Passes("from torch import nn\n\n\ndef encoder():\n    return nn.GRU(8, 8)\n"),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        place = first_recurrent(code)
        if place is None:
            return
        training = Training.of(code)
        if (training.trains or _fits(code, training)) and not _clips(code, training):
            message = "a recurrent network is trained and nothing in the file clips its gradients"
            yield self.at(code, place, message, fixes=(_FIX,))


def _fits(code: Code, training: Training) -> bool:
    """Whether a Lightning module of the file is trained by a trainer of the file."""
    steps = any("training_step" in cls.methods for cls in code.classes.values())
    trainers = [t for t in training.called("Trainer") if t.path.startswith("lightning.")]
    return steps and bool(trainers) and not any("**" in trainer.keywords for trainer in trainers)


def _clips(code: Code, training: Training) -> bool:
    if training.clips or any(_CLIP.search(name) for name in training.calls):
        return True
    for calls in training.calls.values():
        for call in calls:
            if any(_CLIP.search(key) and not _is_none(call.keywords[key]) for key in call.keywords):
                return True
    if any(_CLIP.search(function.name) for function in code.functions):
        return True
    roles = ValueRoles.of(code)
    for value in code.of("clamp", "mul", "div"):
        scales = value.op == "clamp" or value.name.endswith("_")
        if scales and value.inputs and roles.is_gradient(value.inputs[0].core):
            return True
    if any(training.called("register_hook")):
        return True
    return any(
        isinstance(node, ast.Dict)
        and any(isinstance(k, ast.Constant) and _CLIP.search(str(k.value)) for k in node.keys)
        for node in code.values
    )


def _is_none(value: Value) -> bool:
    return value.name == "None" or value.number() == 0.0


def first_recurrent(code: Code) -> ast.AST | None:
    """Returns the first place where a recurrent layer is made, if there is one."""
    layers = (value.node for value in code.of("new") if _is_layer(value.path))
    made: list[ast.AST] = [node for node in layers if node is not None]
    derived = (cls for cls in code.classes.values() if any(map(_is_layer, cls.bases)))
    made += [cls.node for cls in derived]
    made = made or [*_chosen(code)]
    return min(made, key=lambda node: getattr(node, "lineno", 0)) if made else None


def _is_layer(path: str) -> bool:
    return path.startswith("torch.nn.") and path.rpartition(".")[2] in RECURRENT


def _chosen(code: Code) -> Iterator[ast.AST]:
    """Calls of a recurrent layer that is looked up: in a table, by name, by a condition."""
    for value in code.of("call"):
        func = value.node.func if isinstance(value.node, ast.Call) else None
        if not isinstance(func, (ast.Subscript, ast.Call, ast.IfExp, ast.Name)):
            continue
        callee = value.inputs[0] if value.inputs else None
        for made in callee.upstream(8) if callee is not None else ():
            nodes = ast.walk(made.node) if isinstance(made.node, (ast.Dict, ast.IfExp)) else ()
            if any(_is_recurrent(code, node) for node in nodes):
                yield value.node  # type: ignore[misc]
                break
        if isinstance(func, ast.Call) and getattr(func.func, "id", "") == "getattr" and func.args:
            is_nn = code.names.path(func.args[0]) == "torch.nn"
            if is_nn and any(f'"{name}"' in code.text.content for name in RECURRENT):
                yield value.node  # type: ignore[misc]


def _is_recurrent(code: Code, node: ast.AST) -> bool:
    if not isinstance(node, (ast.Attribute, ast.Name)):
        return False
    return _is_layer(code.names.path(node))
