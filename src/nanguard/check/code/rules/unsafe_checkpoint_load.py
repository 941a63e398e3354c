"""A checkpoint that is loaded by running what it says."""

from __future__ import annotations

import ast
import re
import warnings
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, replaced
from nanguard.check.code.project import torch_floor
from nanguard.check.code.training import Training, is_test
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_PICKLES = ("pickle.", "dill.", "cloudpickle.", "_pickle.", "cPickle.", "pickle5.")
_CHECKPOINT = re.compile(
    r"ck?pt|checkpoint|snapshot|weights|state_dict|\bmodel|resume|restore|_model|\.pth?\b|state\b"
)
_SURELY = re.compile(r"ck?pt|checkpoint|snapshot|resume|restore|state_dict|load_(model|weights)")
_DATA = re.compile(
    r"token|vocab|dataset|cache|data|result|metric|stats|config|cfg|split|index|label|meta|feature"
    r"|batch|embed|history|log|scaler|encoder"
)
_LOADERS = ("load_file", "load_model", "safe_open", "load_state_dict")

_COUNTERS = re.compile(r"epoch|step|iter")

# From this torch on, weights_only is True unless something else is said.
_SAFE = (2, 6)


class UnsafeCheckpointLoad(CodeRule):
    """`torch.load` without `weights_only=True`, or `pickle.load` of a checkpoint.

    *Why it breaks a run*: a checkpoint is a pickle, and unpickling runs whatever the file names. A
    file from elsewhere, or one that was swapped, takes over the run; and torch before 2.6 and since
    differ in what the call without the argument does, so a resume works on one machine and fails on
    the next.

    Say `torch.load(path, weights_only=True)`, or store weights as safetensors. Where the project
    saves settings, arrays or whole models, save `state_dict()` and plain numbers first: such a file
    is refused otherwise.

    This is about safety and not about numbers, so it is a remark, of the group `security`:
    `--ignore security` leaves it out.
    A torch of 2.6 or later, where the requirements ask for one, loads safely by itself.
    """

    code = "SRC031"
    name = "unsafe-checkpoint-load"
    severity = Severity.INFO
    group = "security"
    seen_in = "https://github.com/UMMISCO/ecgtizer/issues/5"
    examples: ClassVar = (
        Fails(
            'import torch\n\nstate = torch.load("last.pt", map_location="cpu")\n',
            line=3,
            fixed='import torch\n\nstate = torch.load("last.pt", map_location="cpu", '
            "weights_only=True)\n",
        ),
        Fails(
            "import torch\n\n\ndef resume(model, path):\n"
            "    model.load_state_dict(torch.load(path, weights_only=False))\n",
            line=5,
            fixed="import torch\n\n\ndef resume(model, path):\n"
            "    model.load_state_dict(torch.load(path, weights_only=True))\n",
        ),
        Fails(
            "import pickle\nimport torch\n\n\ndef load_checkpoint(path):\n"
            '    with open(path, "rb") as file:\n        return pickle.load(file)\n',
            line=7,
        ),
        Fails(
            "import torch\n\n\ndef keep(model, args):\n"
            '    torch.save({"model": model.state_dict(), "settings": args}, "last.pt")\n\n\n'
            'def resume():\n    return torch.load("last.pt")\n',
            line=9,
        ),
        Passes('import torch\n\nstate = torch.load("last.pt", weights_only=True)\n'),
        Passes(
            "import pickle\nimport torch\n\n\ndef load_vocab(path):\n"
            '    with open(path, "rb") as file:\n        return pickle.load(file)\n'
        ),
        Passes(
            "import torch\n\n\ndef read(path, **options):\n    return torch.load(path, **options)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        if is_test(code):
            return
        for call in (*code.of("load"), *Training.of(code).called("partial")):
            if not isinstance(call.node, ast.Call):
                continue
            if _is_torch_load(call) and not _is_safe(call) and not _is_own(code, call):
                edits = (_edit(code, call.node),) if _saves_plain_data(code) else ()
                fix = Fix("load with weights_only=True", edits=edits)
                message = "torch.load without weights_only=True runs code that the file names"
                yield self.at(code, call.node, message, weak=_is_data(code, call), fixes=(fix,))
        for call in Training.of(code).called("load", "loads"):
            copied = any(given.path.endswith("dumps") for given in call.inputs)
            if call.path.startswith(_PICKLES) and not copied and _is_checkpoint(code, call):
                fix = Fix(
                    "store weights as safetensors, or load with torch.load(weights_only=True)"
                )
                message = "a checkpoint is unpickled, which runs code that the file names"
                yield self.at(code, call.node or code.tree, message, fixes=(fix,))


def _saves_plain_data(code: Code) -> bool:
    """Whether nothing is saved in the project that a load with weights_only=True would refuse.

    Settings, arrays and numbers of numpy, and whole models are refused; what a name stands for is
    not known. A project that saves nothing loads what others made.
    """
    contents = [code.text.content]
    if code.project is not None:
        contents = [*code.project.contents_with("torch.save(")]
    return all(map(_is_plain, (saved for content in contents for saved in _saved(content))))


def _saved(content: str) -> Iterator[ast.expr]:
    """Yields what calls of ``torch.save`` are given."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        func = node.func if isinstance(node, ast.Call) else None
        if isinstance(func, ast.Attribute) and func.attr == "save" and _is_torch(func.value):
            yield from node.args[:1]  # type: ignore[attr-defined]


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _is_plain(node: ast.expr) -> bool:
    """Whether something that is saved is a state of tensors, a counter, or a mapping of these."""
    if isinstance(node, ast.Dict):
        return all(map(_is_plain, node.values))
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", "") == "state_dict"
    if isinstance(node, ast.BinOp):
        return _is_plain(node.left) and _is_plain(node.right)
    name = getattr(node, "attr", getattr(node, "id", ""))
    return isinstance(node, ast.Constant) or _COUNTERS.search(name) is not None


def _is_own(code: Code, call: Value) -> bool:
    """Whether what is loaded was written just before, or torch is new enough to be safe."""
    if "weights_only" not in call.keywords and (torch_floor(code.text.path) or (0, 0)) >= _SAFE:
        return True
    path = _first(code, call)
    saved = [s for s in code.of("save") if s.scope is call.scope and s.line < call.line]
    return bool(path) and any(_first(code, other, 1) == path for other in saved)


def _is_data(code: Code, call: Value) -> bool:
    """Whether it is a data set that is loaded, by the name it is given."""
    statement = code.statement_of(call.node) if call.node is not None else None
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any("dataset" in code.segment(target).lower() for target in targets)


def _first(code: Code, call: Value, place: int = 0) -> str:
    node = call.node
    given = node.args if isinstance(node, ast.Call) else []
    return code.segment(given[place]) if place < len(given) else ""


def _is_torch_load(call: Value) -> bool:
    prepared = call.op == "call" and bool(call.inputs) and call.inputs[0].path == "torch.load"
    return call.path == "torch.load" or prepared


def _is_safe(call: Value) -> bool:
    given = call.keywords.get("weights_only")
    if given is not None:
        return given.const is not False
    if "**" in call.keywords or not call.inputs or "weights_only" in call.guards:
        return True
    # What was written into memory just before was not changed by anyone.
    return any(made.path == "io.BytesIO" and not made.inputs for made in call.inputs[0].upstream(4))


def _edit(code: Code, node: ast.Call) -> Edit:
    for keyword in node.keywords:
        if keyword.arg == "weights_only":
            return replaced(code, keyword.value, "True")
    last = max((*node.args, *(k.value for k in node.keywords)), key=lambda n: code.span(n)[1])
    _, end = code.span(last)
    return Edit(end, end, ", weights_only=True")


def _is_checkpoint(code: Code, call: Value) -> bool:
    """Judges by where it is loaded, from what, and what is done with it."""
    training = Training.of(code)
    node = call.node or code.tree
    function = training.owner(node)
    same = [event for event in training.called("load", *_LOADERS) if event.scope is call.scope]
    if function is not code.module and any(
        event.path == "torch.load" or event.op != "load" for event in same if event is not call
    ):
        return not _DATA.search(function.name.lower())
    if _SURELY.search(function.name.lower()):
        return True
    around = [function.name.lower()] if function is not code.module else []
    statement = code.statement_of(node)
    for outer in (statement, *code.ancestors(node)):
        if isinstance(outer, (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr)):
            around.append(code.segment(outer).lower())
        elif isinstance(outer, ast.With):
            around += [code.segment(item.context_expr).lower() for item in outer.items]
    text = " ".join(around).replace("pickle.load", "")
    return bool(_CHECKPOINT.search(text)) and not _DATA.search(text)
