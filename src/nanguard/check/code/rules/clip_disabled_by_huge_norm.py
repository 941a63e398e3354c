"""Gradient clipping with a limit that no gradient meets."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, replaced
from nanguard.check.code.training import Training, named
from nanguard.check.code.values import INF
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_HUGE_NORM = 1e3
_USELESS_NORM = 1e4
_LIMITS = ("max_norm", "max_grad_norm", "gradient_clip_val", "gradient_clipping", "clip_val")
_CLIPS = ("clip_grad_norm", "clip_gradients", "clip_grads_with_norm")


# Functions of torch, and those of projects that are called alike; a method takes the limit first.
_FUNCTIONS = ("clip_grad_norm", "clip_grad_value")


class ClipDisabledByHugeNorm(CodeRule):
    """`clip_grad_norm_` with a `max_norm` of 1000 or more, or infinity, as "no clipping".

    *Why it breaks a run*: the norms that matter are around 1. A limit of 1e3 or 1e6 lets the one
    gradient through that destroys the weights, and the line still reads as if gradients were
    clipped.

    Use a limit near the norms of a healthy run (1.0 is usual), or take the line out. Calling it
    with infinity to measure the norm, and using what it returns, is fine.
    """

    code = "SRC013"
    name = "clip-disabled-by-huge-norm"
    severity = Severity.WARNING
    seen_in = "https://github.com/victorchall/EveryDream2trainer/pull/175"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef step(model, opt):\n"
            "    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1e6)\n"
            "    opt.step()\n",
            line=5,
            fixed="import torch\n\n\ndef step(model, opt):\n"
            "    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)\n"
            "    opt.step()\n",
        ),
        Fails(
            'import torch\n\nCLIP = float("inf")\n\n\ndef step(accelerator, model, opt):\n'
            "    accelerator.clip_grad_norm_(model.parameters(), CLIP)\n    opt.step()\n",
            line=7,
        ),
        Fails(
            "import argparse\nimport torch\n\nparser = argparse.ArgumentParser()\n"
            'parser.add_argument("--grad-clip", type=float, default=10000.0)\n'
            "args = parser.parse_args()\n\n\ndef step(model):\n"
            "    torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)\n",
            line=10,
        ),
        Fails(
            "import torch\n\n\ndef step(model, opt):\n"
            "    torch.nn.utils.clip_grad_value_(model.parameters(), None)\n    opt.step()\n",
            line=5,
        ),
        Fails(
            "import torch\nimport commons\n\n\ndef step(model, opt):\n"
            "    norm = commons.clip_grad_value_(model.parameters(), None)\n    opt.step()\n",
            line=6,
        ),
        Passes(
            "import torch\n\n\ndef step(model, opt):\n"
            "    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)\n"
            "    opt.step()\n"
        ),
        Passes(
            "import math\nimport torch\n\n\ndef step(model, log):\n"
            "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf)\n"
            "    log(norm.item())\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        training = Training.of(code)
        for call in training.clips:
            if call.node is not None and _has_none(call):
                message = "a limit of None is not a number: the call raises a TypeError"
                if not call.path.startswith("torch."):
                    message = "a limit of None: the gradients are measured, and none is clipped"
                fix = Fix("give a number, such as 1.0, or leave the call out")
                yield self.at(code, call.node, message, fixes=(fix,))
                continue
            if named(call) in _CLIPS:
                yield from self._judged(code, call, _limit(call), measures=_is_used(code, call))
        for key in ("Trainer", "TrainingArguments", "Seq2SeqTrainingArguments"):
            for call in training.called(key):
                given = [call.keywords[name] for name in _LIMITS if name in call.keywords]
                yield from self._judged(code, call, given[0] if given else None, measures=False)

    def _judged(
        self, code: Code, call: Value, limit: Value | None, *, measures: bool
    ) -> Iterator[Finding]:
        if limit is None or call.node is None:
            return
        number = limit.number()
        if number is None and limit.op == "attribute":
            number = _default(code, limit.name)
        if number is None or number < _HUGE_NORM or (number == INF and measures):
            return
        written = _written(call)
        edits = (replaced(code, written, "1.0"),) if written is not None else ()
        fix = Fix("clip at a norm near those of a healthy run, such as 1.0", edits=edits)
        message = f"a limit of {name_of(number)} clips no gradient that can still be used"
        # Losses that are added up over pixels or samples have norms in the hundreds.
        yield self.at(code, call.node, message, fixes=(fix,), weak=number < _USELESS_NORM)


def _has_none(call: Value) -> bool:
    """Whether None is given as the limit, which torch takes for a number, others for no limit."""
    if not isinstance(call.node, ast.Call) or named(call) not in _FUNCTIONS:
        return False
    written = [k.value for k in call.node.keywords if k.arg in ("clip_value", "max_norm")]
    given = [*written, *call.node.args[1:2]]
    return any(isinstance(limit, ast.Constant) and limit.value is None for limit in given)


def _limit(call: Value) -> Value | None:
    for name in _LIMITS:
        if name in call.keywords:
            return call.keywords[name]
    # The model's own method takes the limit first; functions and accelerators the parameters.
    position = 1 if call.path else 2
    if not call.path and len(call.inputs) == 2:
        position = 1
    return call.inputs[position] if position < len(call.inputs) else None


def _written(call: Value) -> ast.expr | None:
    """The limit, where it is a number written in the call."""
    node = call.node
    if not isinstance(node, ast.Call):
        return None
    given = [k.value for k in node.keywords if k.arg in _LIMITS] or node.args[-1:]
    return given[0] if given and isinstance(given[0], ast.Constant) else None


def _is_used(code: Code, call: Value) -> bool:
    return call.node is not None and not isinstance(code.parents.get(call.node), ast.Expr)


def _default(code: Code, name: str) -> float | None:
    """The default of an option of the command line."""
    for option in code.of("add_argument"):
        default = option.keywords.get("default")
        flags = [value.const for value in option.inputs[1:] if isinstance(value.const, str)]
        if default is not None and name in [f.lstrip("-").replace("-", "_") for f in flags]:
            return default.number()
    return None
