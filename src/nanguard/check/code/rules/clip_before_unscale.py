"""Gradients are clipped while they are still scaled."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.training import (
    CLIPS,
    Training,
    after,
    conditions_of,
    exclude,
    is_backward,
    is_scaled,
    is_step,
    named,
    unscales_itself,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Function
    from nanguard.check.code.values import Value

    _Done = tuple[Value, ast.AST]

# What a condition asks that holds where there is a scaler and it is in use.
_SCALER = re.compile(r"[\w.]*scaler(\.is_enabled\(\))?", re.IGNORECASE)


class ClipBeforeUnscale(CodeRule):
    """`clip_grad_norm_` or `clip_grad_value_` on gradients that a GradScaler has scaled.

    *Why it breaks a run*: the gradients are up to 65536 times too large when they are clipped, so
    every one of them is cut to the limit, and `scaler.step` then divides what is left by the scale:
    the model hardly learns, and a real explosion looks like any other step.

    Call `scaler.unscale_(optimizer)` between backward and the clipping.
    """

    code = "SRC003"
    name = "clip-before-unscale"
    severity = Severity.ERROR
    seen_in = "https://github.com/pytorch/examples/issues/1196"
    examples: ClassVar = (
        Fails(
            "import torch\n\nscaler = torch.amp.GradScaler()\n\n\ndef step(model, loss, opt):\n"
            "    scaler.scale(loss).backward()\n"
            "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "    scaler.step(opt)\n    scaler.update()\n",
            line=8,
            fixed="import torch\n\nscaler = torch.amp.GradScaler()\n\n\n"
            "def step(model, loss, opt):\n    scaler.scale(loss).backward()\n"
            "    scaler.unscale_(opt)\n"
            "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "    scaler.step(opt)\n    scaler.update()\n",
        ),
        Fails(
            "import torch\nfrom torch.nn.utils import clip_grad_value_\n\n\ndef clip(model):\n"
            "    clip_grad_value_(model.parameters(), 0.5)\n\n\n"
            "def step(model, loss, opt, scaler):\n    scaler.scale(loss).backward()\n"
            "    clip(model)\n    scaler.unscale_(opt)\n    scaler.step(opt)\n"
            "    scaler.update()\n",
            line=6,
        ),
        Fails(
            "import torch\n\n\ndef step(model, opt, scaler):\n"
            "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "    scaler.unscale_(opt)\n    scaler.step(opt)\n    scaler.update()\n",
            line=5,
        ),
        Passes(
            "import torch\n\n\ndef step(model, opt, scaler):\n    scaler.unscale_(opt)\n"
            "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "    scaler.step(opt)\n    scaler.update()\n"
        ),
        Passes(
            "import torch\n\n\ndef step(model, loss, opt, scaler):\n"
            "    scaler.scale(loss).backward()\n    scaler.unscale_(opt)\n"
            "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "    scaler.step(opt)\n    scaler.update()\n"
        ),
        Passes(
            "import torch\n\n\ndef step(model, loss, opt, scaler):\n    if scaler is not None:\n"
            "        scaler.scale(loss).backward()\n        scaler.step(opt)\n"
            "    else:\n        loss.backward()\n"
            "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        opt.step()\n"
        ),
        Passes(
            "import torch\n\n\ndef step(model, opt, scaler):\n    if scaler is None:\n"
            "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "        opt.step()\n        return\n    scaler.unscale_(opt)\n"
            "    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "    scaler.step(opt)\n    scaler.update()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        training = Training.of(code)
        if not training.clips:
            return
        looks = _clipped_scaled if training.backwards else _unscaled_late
        if training.backwards and not any(is_scaled(b) for b in training.backwards):
            return
        seen: set[ast.AST] = set()
        for function in code.functions:
            if training.callers(function):
                continue
            for clip, step in looks(code, training, function):
                if clip.node is None or clip.node in seen:
                    continue
                seen.add(clip.node)
                message = "gradients are clipped while they still carry the loss scale"
                fix = Fix(
                    "unscale first: scaler.unscale_(optimizer)", edits=_edits(code, clip, step)
                )
                yield self.at(code, clip.node, message, fixes=(fix,))


def _clipped_scaled(
    code: Code, training: Training, function: Function
) -> Iterator[tuple[Value, Value | None]]:
    """The calls that clip scaled gradients, with the scaler's step that follows."""
    done = _done(code, training, function)
    scaled: _Done | None = None
    if not any(is_backward(event) for event, _ in done):
        # Backward is called elsewhere: what is stepped by a scaler was scaled.
        scaled = next((d for d in done if _is_scalers(d[0], "step")), None)
    for place, (event, site) in enumerate(done):
        if is_backward(event):
            if is_scaled(event):
                scaled = event, site
        elif _is_scalers(event, "unscale", "update") or is_step(event):
            scaled = None
        elif scaled is not None and named(event) in CLIPS and not unscales_itself(event):
            if _has_no_scaler(code, event) or _are_apart(code, scaled, (event, site)):
                continue
            steps = (e for e, _ in done[place:] if _is_scalers(e, "step"))
            yield event, next(steps, None)


def _unscaled_late(
    code: Code, training: Training, function: Function
) -> Iterator[tuple[Value, Value | None]]:
    """The calls that clip before anything is unscaled, where backward is called in other files."""
    done = _done(code, training, function)
    for place, (event, site) in enumerate(done):
        if _is_scalers(event, "unscale"):
            return
        if named(event) not in CLIPS or unscales_itself(event):
            continue
        late = [d for d in done[place:] if _is_scalers(d[0], "unscale")]
        if any(not _are_apart(code, (event, site), other) for other in late):
            yield event, None


def _done(code: Code, training: Training, function: Function) -> list[_Done]:
    """What a function does in order, each with where: for what a call does, that is the call."""
    done: list[_Done] = []
    site: ast.AST | None = None
    # A call comes after all that happens in it.
    for event in reversed(list(code.events(function))):
        if event.scope is function:
            site = event.node
        if id(event) not in training.callees and event.node is not None:
            done.append((event, site or event.node))
    return done[::-1]


def _are_apart(code: Code, one: _Done, other: _Done) -> bool:
    """Whether two operations never happen in the same pass through a function."""
    (first, here), (second, there) = one, other
    if first.scope is second.scope and first.node is not None and second.node is not None:
        here, there = first.node, second.node
        if exclude(code, here, there):
            return True
    return not (_reaches(code, here, there) or _reaches(code, there, here))


def _reaches(code: Code, one: ast.AST, other: ast.AST) -> bool:
    """Whether the statement of another node runs after that of one, or is the same."""
    around = {code.statement_of(other), *code.ancestors(other)}
    return code.statement_of(one) in around or any(s in around for s in after(code, one))


def _has_no_scaler(code: Code, event: Value) -> bool:
    conditions = conditions_of(code, event.node) if event.node is not None else ()
    return any(not holds and _SCALER.fullmatch(text) for text, holds in conditions)


def _is_scalers(event: Value, *names: str) -> bool:
    if named(event) not in names or not event.inputs:
        return False
    if named(event) != "step":
        return True
    return (
        len(event.inputs) > 1 and "scaler" in (event.inputs[0].name + event.inputs[0].path).lower()
    )


def _edits(code: Code, clip: Value, step: Value | None) -> tuple[Edit, ...]:
    node = step.node if step is not None else None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
        return ()
    statement = code.statement_of(clip.node) if clip.node is not None else None
    if statement is None or step is None or step.scope is not clip.scope:
        return ()
    start, _ = code.span(statement)
    indent = code.text.content[code.text.offset(statement.lineno, 0) : start]
    if indent.strip():
        return ()
    call = f"{code.segment(node.func.value)}.unscale_({code.segment(node.args[0])})"
    return (Edit(start, start, f"{call}\n{indent}"),)
