"""A parameter made of memory that nothing was written to."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, replaced
from nanguard.check.code.filling import Filled, names_of
from nanguard.check.code.training import is_test
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Class
    from nanguard.check.code.values import Value

_EMPTY = ("empty", "empty_like", "new_empty", "empty_strided")
_SIZED = ("Tensor", "FloatTensor")
_SIZE = re.compile(
    r"dim|size|n_|num|hidden|features|channels|width|heads|length|^[dnkchm]$|^d_|rank"
)
_DATA = re.compile(
    r"weight|init|value|data|arr|vec|embed|mean|std|prior|table|matrix|points|anchor"
)


class UninitialisedParameter(CodeRule):
    """`nn.Parameter(torch.empty(...))` or `torch.Tensor(n)` that is never filled.

    *Why it breaks a run*: the memory holds whatever was there before: often zeros, sometimes 1e38
    or NaN. The same script trains on one day and starts with a NaN loss on the next, on another
    machine, or after an import was added.

    Fill it: `nn.init.normal_(self.w, std=0.02)`, or start from `torch.zeros` or `torch.randn`.
    """

    code = "SRC004"
    name = "uninitialised-parameter"
    severity = Severity.ERROR
    seen_in = "https://github.com/tail-unica/hopwise/issues/271"
    examples: ClassVar = (
        Fails(
            "import torch\nfrom torch import nn\n\n\nclass Gate(nn.Module):\n"
            "    def __init__(self, dim):\n        super().__init__()\n"
            "        self.gate = nn.Parameter(torch.empty(dim))\n",
            line=8,
            fixed="import torch\nfrom torch import nn\n\n\nclass Gate(nn.Module):\n"
            "    def __init__(self, dim):\n        super().__init__()\n"
            "        self.gate = nn.Parameter(torch.zeros(dim))\n",
        ),
        Fails(
            "import torch\nfrom torch import nn\n\n\nclass Mix(nn.Module):\n"
            "    def __init__(self, dim):\n        super().__init__()\n"
            "        w = torch.Tensor(dim, dim)\n        self.a = nn.Parameter(w)\n"
            "        self.b = nn.Parameter(torch.empty(dim))\n        nn.init.zeros_(self.b)\n",
            line=9,
        ),
        Passes(
            "import torch\nfrom torch import nn\n\n\nclass Gate(nn.Module):\n"
            "    def __init__(self, dim):\n        super().__init__()\n"
            "        self.gate = nn.Parameter(torch.empty(dim))\n        self.reset()\n\n"
            "    def reset(self):\n        self.gate.data.uniform_(-0.1, 0.1)\n"
        ),
        Passes(
            "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n"
            "    def __init__(self, dim):\n        super().__init__()\n"
            "        self.w = nn.Parameter(torch.empty(dim, dim))\n"
            "        for p in self.parameters():\n            nn.init.normal_(p)\n"
        ),
        Passes(
            "import torch\nfrom torch import nn\n\nw = nn.Parameter(torch.Tensor([1.0, 2.0]))\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        empty = [value for value in code.of("parameter") if _is_empty(value)]
        if not empty or is_test(code):
            return
        filled = Filled(code)
        for value in empty:
            names = names_of(code, value)
            cls = value.scope.cls if value.scope is not None else None
            if value.node is None or not names or (cls is not None and cls.inherits_elsewhere()):
                continue
            if any(filled.has(name, cls) for name in names):
                continue
            message = f"the parameter {names[0]!r} is made of memory that is never written to"
            fix = Fix("give it first values", edits=_edits(code, value))
            loaded = cls is not None and _is_loaded(code, cls)
            yield self.at(code, value.node, message, fixes=(fix,), weak=loaded)


def _is_loaded(code: Code, cls: Class) -> bool:
    """Returns whether every other file that makes such an object loads weights into something."""
    if code.project is None:
        return False
    others = [path for path in code.project.callers(cls.name) if path != code.text.path]
    return bool(others) and all(code.project.holds(path, "load_state_dict") for path in others)


def _is_empty(value: Value) -> bool:
    data = value.arg(0, "data")
    wanted = value.arg(1, "requires_grad")
    if data is None or (wanted is not None and wanted.const is False):
        return False
    made = data.core
    while made.op in ("mul", "div") and any(p.number() is not None for p in made.inputs):
        made = next((p for p in made.inputs if p.number() is None), made.inputs[0]).core
    device = made.keywords.get("device")
    if device is not None and device.const == "meta":
        return False
    if made.op in _EMPTY:
        return not any(size.number() == 0.0 for size in made.inputs)
    return made.op in _SIZED and _takes_sizes(made)


def _takes_sizes(made: Value) -> bool:
    """Whether the arguments are sizes; one that is not a number can be data as well."""
    if len(made.inputs) > 1:
        return True
    only = made.inputs[0] if made.inputs else None
    if only is None or only.items is not None:
        return False
    node = made.node.args[0] if isinstance(made.node, ast.Call) and made.node.args else None
    if isinstance(node, ast.Starred) or only.has("size"):
        return True
    if only.number() is not None:
        return isinstance(only.const, int) and only.const != 0
    if only.op in ("mul", "floordiv", "add"):
        return all(part.op in ("", "attribute", "named") for part in only.inputs)
    plain = only.op in ("", "attribute", "named") and only.name != "T"
    if not plain or _DATA.search(only.name.lower()) or only.core.op.startswith("numpy."):
        return False
    scope = made.scope
    built = scope is not None and scope.name == "__init__" and only.name in scope.parameters
    return built or bool(_SIZE.search(only.name.lower()))


def _edits(code: Code, value: Value) -> tuple[Edit, ...]:
    node = value.node.args[0] if isinstance(value.node, ast.Call) and value.node.args else None
    if not isinstance(node, ast.Call) or code.names.path(node.func) != "torch.empty":
        return ()
    several = (ast.Starred, ast.Tuple, ast.List)
    if len(node.args) == 1 and not isinstance(node.args[0], several):
        return (replaced(code, node.func, code.segment(node.func)[:-5] + "zeros"),)
    start, _ = code.span(node)
    random = replaced(code, node.func, code.segment(node.func)[:-5] + "randn")
    return (Edit(start, start, "0.02 * "), random)
