"""A part of a model that is put into evaluation mode once, and back into training mode by all."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.origins import origins
from nanguard.check.code.scopes import absolute
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Class
    from nanguard.check.code.values import Value

# Models of torchvision and timm that hold a BatchNorm.
_NORMALISED = re.compile(
    r"(wide_)?resne(t|xt|st)|densenet|mobilenet|inception|efficientnet|googlenet|vgg\w*_bn|shufflenet"
    r"|mnasnet|regnet|xception"
)
# Models of transformers whose default has dropout.
_WITH_DROPOUT = re.compile(
    r"^transformers\.(Bert|Roberta|DistilBert|Electra|Hubert|Wav2Vec2|T5)\w+"
)
_MODES = re.compile(r"BatchNorm|Dropout|bn\d?\s*=|InstanceNorm\w*\([^)]*track_running_stats=True")
_TRAINS = re.compile(rb"\.train\((True|mode=True)?\)")
_MOST_FILES = 12  # in which a model is put into training mode


class EvalUndoneByTrain(CodeRule):
    """`self.backbone.eval()` in a constructor, of a model that a loop calls `train()` on.

    It is said of a part that holds a BatchNorm or dropout, unless the model has a `train` of its
    own, or puts the part back into evaluation mode elsewhere.

    *Why it breaks a run*: `train()` goes through all parts of a model. The BatchNorms of the part
    that was to stay frozen then normalise with the statistics of each batch, and overwrite the
    running ones they were trained with: features drift, a teacher's targets get noisy, and what
    comes out in evaluation is another function.

    Override `train`: `super().train(mode)`, and then `self.backbone.eval()`.
    """

    code = "SRC052"
    name = "eval-undone-by-train"
    severity = Severity.WARNING
    seen_in = "https://github.com/Lightning-AI/pytorch-lightning/issues/18930"
    examples: ClassVar = (
        Fails(
            "import torch\nimport torchvision\n\n\nclass Net(torch.nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.backbone = torchvision.models.resnet18(pretrained=True)\n"
            "        self.backbone.eval()\n\n    def forward(self, x):\n"
            "        return self.backbone(x)\n\n\ndef train(loader, opt):\n    net = Net()\n"
            "    net.train()\n    for x in loader:\n        net(x).mean().backward()\n",
            line=9,
        ),
        Passes(
            "import torch\nimport torchvision\n\n\nclass Net(torch.nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.backbone = torchvision.models.resnet18(pretrained=True)\n"
            "        self.backbone.eval()\n\n    def train(self, mode=True):\n"
            "        super().train(mode)\n        self.backbone.eval()\n\n"
            "    def forward(self, x):\n        return self.backbone(x)\n\n\n"
            "def train(loader, opt):\n    net = Net()\n    net.train()\n"
            "    for x in loader:\n        net(x).mean().backward()\n"
        ),
        Passes(
            "import torch\nimport torchvision\n\n\nclass Net(torch.nn.Module):\n"
            "    def __init__(self):\n        super().__init__()\n"
            "        self.vgg = torchvision.models.vgg19(pretrained=True).features\n"
            "        self.vgg.eval()\n\n    def forward(self, x):\n"
            "        return self.vgg(x)\n\n\ndef train(loader, opt):\n    net = Net()\n"
            "    net.train()\n    for x in loader:\n        net(x).mean().backward()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        for call in code.of("eval", "call"):
            scope = call.scope
            if scope is None or scope.name != "__init__" or scope.cls is None:
                continue
            if call.op == "call" and call.name != "eval":
                continue
            part = _part_of_self(code, call)
            cls = scope.cls
            if not part or not cls.is_module() or not _has_modes(code, cls, call, part):
                continue
            if cls.method("train") is not None or _is_put_back(code, cls, part):
                continue
            if any("Lightning" in base for one in cls.line_of_descent() for base in one.bases):
                continue
            if _is_trained_as_a_whole(code, cls):
                message = (
                    f"self.{part} is put into evaluation mode once, and train() of the whole model "
                    "puts it back: its BatchNorm or dropout is in training mode"
                )
                fix = Fix(f"override train: super().train(mode), then self.{part}.eval()")
                yield self.at(code, call.node, message, fixes=(fix,))


def _part_of_self(code: Code, call: Value) -> str:
    """Returns the attribute that is put into evaluation mode: the receiver, or what it becomes."""
    node = call.node
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return ""
    if part := _own(node.func.value):
        return part
    statement = code.statement_of(node)
    if not isinstance(statement, ast.Assign) or statement.value is not node:
        return ""
    return _own(statement.targets[0])


def _own(node: ast.expr) -> str:
    """Returns the name of an attribute of ``self``."""
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
        return node.attr
    return ""


def _has_modes(code: Code, cls: Class, call: Value, part: str) -> bool:
    """Returns whether a part of a model computes something else in training mode."""
    held = [*cls.attributes.get(part, ()), *call.inputs[:1]]
    for value in held:
        for made in origins(code, value).makers:
            if made.cls is not None and _holds_modes(made.cls):
                return True
            path = made.path or (made.inputs[0].path if made.op == "from_pretrained" else "")
            if path.startswith(("torchvision.models", "timm.")) and _NORMALISED.search(
                path.lower() + "".join(str(i.const) for i in made.inputs if i.const)
            ):
                return True
            if _WITH_DROPOUT.search(path):
                return True
    return False


def _holds_modes(cls: Class) -> bool:
    """Returns whether a module, or another of its file that it names, has two modes."""
    if cls.home is None:
        return False
    home, queue, seen = cls.home, [cls], {cls.name}
    while queue:
        text = home.segment(queue.pop().node)
        if _MODES.search(text):
            return True
        for name, other in home.classes.items():
            if name not in seen and re.search(rf"\b{name}\b", text):
                seen.add(name)
                queue.append(other)
    return False


def _is_put_back(code: Code, cls: Class, part: str) -> bool:
    """Returns whether a part is put into evaluation mode again, in its class or elsewhere."""
    again = rf"\.{re.escape(part)}(\.\w+)*\.eval\("
    if len(re.findall(again, code.segment(cls.node))) > 1:
        return True
    if code.project is None:
        return False
    own, sought = absolute(code.text.path), re.compile(again.encode())
    others = [path for key, path in code.project.paths.items() if key != own]
    return any(code.project.holds(path, sought) for path in others)


def _is_trained_as_a_whole(code: Code, cls: Class) -> bool:
    """Returns whether ``train()`` is called on an object of a class, or on what holds one."""
    files = [code]
    if code.project is not None:
        own = absolute(code.text.path)
        paths = [key for key, path in code.project.paths.items() if key != own]
        paths = [key for key in paths if code.project.holds(code.project.paths[key], _TRAINS)]
        for key in paths[:_MOST_FILES]:
            other = code.project.outline(key)
            if other is not None:
                other.read_mentions("train")
                files.append(other)
    return any(
        _holds(maker.cls, cls)
        for one in files
        for call in one.operations.get("train", ())
        if call.inputs and (len(call.inputs) < 2 or call.inputs[1].const is True)
        for maker in (*origins(one, call.inputs[0]).makers, call.inputs[0])
        if maker.cls is not None
    )


def _holds(outer: Class, cls: Class, depth: int = 2) -> bool:
    """Returns whether a class is another one, inherits from it, or has it for an attribute."""
    if any(_is_same(one, cls) for one in outer.line_of_descent()):
        return True
    return depth > 0 and any(
        value.cls is not None and value.cls is not outer and _holds(value.cls, cls, depth - 1)
        for values in outer.attributes.values()
        for value in values
    )


def _is_same(one: Class, other: Class) -> bool:
    if one is other:
        return True
    if one.name != other.name or one.home is None or other.home is None:
        return False
    return absolute(one.home.text.path) == absolute(other.home.text.path)
