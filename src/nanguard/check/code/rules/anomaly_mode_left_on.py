"""Anomaly detection of autograd, switched on for every run."""

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
    from nanguard.check.code.values import Value

_DEBUG = re.compile(r"debug|anomal|detect|diagnos|replay|find_?nan|nan_?check|^test|trace", re.I)
_CONDITIONAL = (ast.If, ast.IfExp, ast.BoolOp, ast.ExceptHandler, ast.Match)
_TITLE = "switch it on only with a flag, for the run that looks for a fault"


class AnomalyModeLeftOn(CodeRule):
    """`set_detect_anomaly(True)`, `detect_anomaly()` or `Trainer(detect_anomaly=True)` for good.

    *Why it breaks a run*: every backward pass keeps a trace of every forward call and looks at
    every gradient, which makes a step two to three times as slow; it sees NaN only, not Inf, and
    stops the run where a guard could have gone on.

    Put it behind a flag, or use it for the one step that failed.
    """

    code = "SRC033"
    name = "anomaly-mode-left-on"
    severity = Severity.INFO
    seen_in = "https://github.com/yenchenlin/nerf-pytorch/issues/42"
    examples: ClassVar = (
        Fails(
            "import torch\n\ntorch.autograd.set_detect_anomaly(True)\n"
            "model = torch.nn.Linear(2, 2)\n",
            line=3,
            fixed="import torch\n\nmodel = torch.nn.Linear(2, 2)\n",
        ),
        Fails(
            "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n"
            "        with torch.autograd.detect_anomaly():\n            model(x).backward()\n"
            "        opt.step()\n",
            line=6,
        ),
        Fails(
            "import lightning as L\n\ntrainer = L.Trainer(max_epochs=3, detect_anomaly=True)\n",
            line=3,
            fixed="import lightning as L\n\n"
            "trainer = L.Trainer(max_epochs=3, detect_anomaly=False)\n",
        ),
        Passes(
            "import torch\n\n\ndef train(model, loader, debug=False):\n    if debug:\n"
            "        torch.autograd.set_detect_anomaly(True)\n"
        ),
        Passes("import torch\n\ntorch.autograd.set_detect_anomaly(False)\n"),
        Passes(
            "import torch\n\n\ndef debug_step(model, x):\n"
            "    with torch.autograd.detect_anomaly():\n        model(x).sum().backward()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        if is_test(code):
            return
        training = Training.of(code)
        for call in training.called("set_detect_anomaly", "detect_anomaly", "Trainer", "Fabric"):
            switch = _switch(call)
            if switch is None or not isinstance(call.node, ast.Call):
                continue
            if _is_conditional(code, training, call):
                continue
            fix = Fix(_TITLE, edits=_edits(code, call.node, switch))
            message = "anomaly detection is on in every run: steps take two to three times as long"
            yield self.at(code, call.node, message, fixes=(fix,))


def _switch(call: Value) -> ast.expr | None:
    """The expression that switches it on."""
    node = call.node
    if not isinstance(node, ast.Call):
        return None
    if call.op == "detect_anomaly":
        return node if call.path.startswith("torch.autograd") else None
    key = "detect_anomaly" if call.op == "new" else "mode"
    given = [k.value for k in node.keywords if k.arg == key]
    if call.op != "new":
        given += node.args[:1]
    if given and isinstance(given[0], ast.Constant) and given[0].value is True:
        return given[0]
    return None


def _is_conditional(code: Code, training: Training, call: Value, depth: int = 2) -> bool:
    node = call.node or code.tree
    for outer in code.ancestors(node):
        if isinstance(outer, _CONDITIONAL) and not _is_main(outer):
            return True
    if any(_DEBUG.search(name) for name in call.guards):
        return True
    function = training.owner(node)
    if function is code.module:
        return False
    later = (c for c in training.called("set_detect_anomaly") if c.scope is call.scope)
    if _DEBUG.search(function.name) or any(c.line > call.line and not _switch(c) for c in later):
        return True
    callers = training.callers(function)
    return bool(callers and depth) and all(
        _is_conditional(code, training, caller, depth - 1) for caller in callers
    )


def _is_main(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.dump(node.test)


def _edits(code: Code, call: ast.Call, switch: ast.expr) -> tuple[Edit, ...]:
    statement = code.parents.get(call)
    if switch is call:
        return ()
    block = getattr(code.parents.get(statement), "body", ()) if statement is not None else ()
    if not isinstance(statement, ast.Expr) or len(block) < 2:
        return (replaced(code, switch, "False"),)
    start = code.text.offset(statement.lineno, 0)
    _, end = code.span(statement)
    content = code.text.content
    rest = content.find("\n", end)
    if content[start:end].strip() != code.segment(statement) or content[end:rest].strip():
        return (replaced(code, switch, "False"),)
    return (Edit(start, rest + 1, ""),)
