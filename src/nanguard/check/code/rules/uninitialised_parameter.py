"""A parameter made of memory that nothing was written to."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, replaced
from nanguard.check.code.training import Training, is_test
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


# A loop over the parameters of a model, or a function for each of its modules, that fills them.
_FILLS_ALL = re.compile(
    rb"\.(?:named_)?(?:parameters|modules)\(\):(?:[^\n]*\n){1,6}?[^\n]*(?:init\w*\.|_init|_\()"
    rb"|\.apply\(\w*init|from_pretrained\("
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
        Passes(
            "import math\nimport torch\nfrom torch import nn\n\n\nclass Waves(nn.Module):\n"
            "    def __init__(self, n):\n        super().__init__()\n"
            "        self.freq = nn.Parameter(torch.Tensor(n))\n        with torch.no_grad():\n"
            "            torch.arange(1, n + 1, out=self.freq).mul_(math.pi)\n"
        ),
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
        Passes(
            "import torch\nfrom torch import nn\n\n\ndef widen(model, channels):\n"
            "    for module in model.modules():\n        if isinstance(module, nn.Conv2d):\n"
            "            size = (module.out_channels, channels, *module.kernel_size)\n"
            "            module.weight = nn.parameter.Parameter(torch.Tensor(*size))\n"
            "            module.reset_parameters()\n"
        ),
        Fails(
            "import torch\nfrom torch import nn\n\n\ndef widen(model, channels):\n"
            "    for module in model.modules():\n        if isinstance(module, nn.Conv2d):\n"
            "            module.weight = nn.Parameter(torch.empty(8, channels, 3, 3))\n"
            "            module.requires_grad_(True)\n",
            line=8,
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
            if any(filled.has(name, cls) for name in names) or _fills_itself(code, value):
                continue
            message = f"the parameter {names[0]!r} is made of memory that is never written to"
            fix = Fix("give it first values", edits=_edits(code, value))
            weak = cls is not None and _is_filled_elsewhere(code, cls)
            yield self.at(code, value.node, message, fixes=(fix,), weak=weak)


def _fills_itself(code: Code, value: Value) -> bool:
    """Returns whether it is given to an object that is then told to fill its parameters."""
    assigned = code.parents.get(value.node) if value.node is not None else None
    targets = assigned.targets if isinstance(assigned, ast.Assign) else []
    holders = {
        target.value.id
        for target in targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name)
    } - {"self"}
    scope: ast.AST | None = assigned
    while scope is not None and not isinstance(scope, (ast.FunctionDef, ast.Module)):
        scope = code.parents.get(scope)
    return bool(holders and scope) and any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id in holders
        and _FILLS.search(node.func.attr) is not None
        for node in ast.walk(scope or ast.Pass())
    )


def _is_filled_elsewhere(code: Code, cls: Class) -> bool:
    """Returns whether other files may fill it: all parameters at once, or from a checkpoint."""
    if code.project is None:
        return False
    others = [path for path in code.project.callers(cls.name) if path != code.text.path]
    if others and all(code.project.holds(path, "load_state_dict") for path in others):
        return True
    return code.project.some_file_has(_FILLS_ALL)


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


_FILLS = re.compile(r"init|fill|reset|xavier|kaiming|orthogonal|copy_|weight_attrs|trunc_normal")
_KEEPS = re.compile(
    r"^(requires_grad_|register_\w+|append|extend|print|add_param_group|info|debug|add_module|insert|clip_grad\w*)$"
)
_HOLDERS = frozenset({"ParameterList", "ParameterDict", "register_parameter", "Parameter"})
_ALL = re.compile(r"^(parameters|named_parameters|state_dict|modules|named_modules|children)$")


class Filled:
    """What is filled in place, by the name of the attribute or the local name.

    Attributes:
        names: Names that something is written into, each with the class whose ``self`` has it.
        parts: Texts such that parameters with them in their name are filled.
        everything: Whether some loop fills all parameters there are.
        classes: Classes of which all parameters are filled.
    """

    def __init__(self, code: Code) -> None:
        self.code = code
        self.names: set[tuple[int, str]] = set()
        self.parts: set[str] = set()
        self.everything = False
        self.classes: set[int] = set()
        for function in code.functions:
            for event in function.events:
                if isinstance(event.node, ast.Call):
                    self._call(event.node, function.cls)
                elif event.op in ("setitem", "setattr") and event.node is not None:
                    self._written(event.node, function.cls)
        for node in code.parents:
            if isinstance(node, (ast.For, ast.comprehension)):
                self._loop(node)
        self._inherited()

    def has(self, name: str, cls: Class | None) -> bool:
        """Returns whether a parameter is filled somewhere."""
        if self.everything or (0, name) in self.names or any(part in name for part in self.parts):
            return True
        if cls is None:
            return False
        heirs = [c for c in self.code.classes.values() if cls in c.line_of_descent()]
        related = [*cls.line_of_descent(), *heirs]
        return any(id(c) in self.classes or (id(c), name) in self.names for c in related)

    def _add(self, node: ast.expr, cls: Class | None) -> None:
        names = [*chain(node)]
        if names[-1:] == ["self"] and cls is not None:
            self.names.add((id(cls), names[-2] if len(names) > 1 else "self"))
            names = [name for name in names[:-2] if name != "data"]
        self.names |= {(0, name) for name in names}

    def _call(self, node: ast.Call, cls: Class | None) -> None:
        func = node.func
        name = func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "")
        alone = isinstance(self.code.parents.get(node), ast.Expr)
        for keyword in node.keywords:
            if keyword.arg == "out":
                self._add(keyword.value, cls)
        if _KEEPS.search(name) or not (name.endswith("_") or alone or _FILLS.search(name)):
            return
        if isinstance(func, ast.Attribute) and name.endswith("_"):
            self._add(func.value, cls)
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            several = isinstance(argument, (ast.Tuple, ast.List))
            for part in argument.elts if several else (argument,):  # type: ignore[attr-defined]
                self._add(part, cls)

    def _written(self, node: ast.AST, cls: Class | None) -> None:
        if isinstance(node, ast.Attribute) and node.attr != "data":
            return
        inner = node.value if isinstance(node, (ast.Attribute, ast.Subscript)) else node
        if isinstance(inner, ast.expr):
            self._add(inner, cls)

    def _loop(self, node: ast.For | ast.comprehension) -> None:
        targets = {(0, n.id) for n in ast.walk(node.target) if isinstance(n, ast.Name)}
        if not targets & self.names:
            return
        cls = self._class_around(node)
        for inner in ast.walk(node.iter):
            if isinstance(inner, ast.Attribute):
                if _ALL.search(inner.attr) and isinstance(node, ast.For):
                    of_self = isinstance(inner.value, ast.Name) and inner.value.id == "self"
                    self._all(node, cls if of_self else None)
                self._add(inner, cls)

    def _class_around(self, node: ast.AST) -> Class | None:
        for outer in self.code.ancestors(node):
            if isinstance(outer, ast.ClassDef):
                return self.code.classes.get(outer.name)
        return None

    def _all(self, node: ast.For, cls: Class | None) -> None:
        """A loop over all parameters; tests of their names say which it fills."""
        texts: set[str] = set()
        for inner in node.body:
            for test in ast.walk(inner):
                if isinstance(test, ast.If):
                    if test.orelse:
                        texts.clear()
                        break
                    texts |= {
                        n.value
                        for n in ast.walk(test.test)
                        if isinstance(n, ast.Constant) and isinstance(n.value, str)
                    }
        self.parts |= texts
        if not texts and cls is not None:
            self.classes.add(id(cls))
        elif not texts:
            self.everything = True

    def _inherited(self) -> None:
        """Methods of a base class elsewhere that fill what it knows by name."""
        training = Training.of(self.code)
        own = any("_init_weights" in cls.methods for cls in self.code.classes.values())
        for name, calls in training.calls.items():
            if not re.search(r"init|reset_param|load_state_dict", name) or name == "__init__":
                continue
            for call in calls:
                node = call.node
                func = node.func if isinstance(node, ast.Call) else None
                receiver = func.value if isinstance(func, ast.Attribute) else None
                of_self = isinstance(receiver, ast.Name) and receiver.id == "self" and not own
                if of_self and call.scope is not None and call.scope.cls is not None:
                    self.classes.add(id(call.scope.cls))
        loads = [] if training.trains else training.called("load_state_dict")
        if any(call.inputs and call.inputs[0].core.op == "new" for call in loads):
            self.everything = True


def chain(node: ast.expr) -> Iterator[str]:
    """Yields the names by which an expression reaches a tensor, the last one first."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        node = node.value
    if isinstance(node, ast.Name):
        yield node.id


def names_of(code: Code, value: Value) -> list[str]:
    """Returns the names a parameter goes by; none if it goes where it cannot be followed."""
    inner: ast.AST | None = value.node
    while inner is not None:
        outer = code.parents.get(inner)
        if isinstance(outer, (ast.Assign, ast.AnnAssign)):
            target = outer.targets[0] if isinstance(outer, ast.Assign) else outer.target
            return _bound(code, value, target)
        if isinstance(outer, ast.Tuple) and isinstance(code.parents.get(outer), ast.Assign):
            target = code.parents[outer].targets[0]  # type: ignore[attr-defined]
            if isinstance(target, ast.Tuple) and len(target.elts) == len(outer.elts):
                return _bound(code, value, target.elts[outer.elts.index(inner)])  # type: ignore[arg-type]
        if isinstance(outer, ast.Call):
            last = outer.func.attr if isinstance(outer.func, ast.Attribute) else ""
            if (last or getattr(outer.func, "id", "")) not in _HOLDERS:
                return []
            if last == "register_parameter" and isinstance(outer.args[0], ast.Constant):
                return [str(outer.args[0].value)]
        elif not isinstance(outer, (ast.expr, ast.comprehension)):
            return []
        inner = outer
    return []


def _bound(code: Code, value: Value, target: ast.expr) -> list[str]:
    if isinstance(target, ast.Attribute):
        return [target.attr]
    if not isinstance(target, ast.Name):
        return []
    names = [target.id]
    scope = value.scope.node if value.scope is not None else code.tree
    for node in ast.walk(scope):
        if not isinstance(node, ast.Name) or node.id != target.id or node is target:
            continue
        parent = code.parents.get(node)
        if isinstance(parent, (ast.Return, ast.Tuple, ast.List, ast.Dict)):
            return []
        if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Attribute):
            names.append(parent.targets[0].attr)
        if isinstance(parent, ast.Call) and isinstance(parent.args[0], ast.Constant):
            names.append(str(parent.args[0].value))
    return names
