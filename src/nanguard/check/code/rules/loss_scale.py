"""The scale of a float16 loss: who scales, who unscales, and before what."""

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
    losses_of,
    named,
    names_in,
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
    done = training.done_in(function)
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
    done = training.done_in(function)
    for place, (event, site) in enumerate(done):
        if _is_scalers(event, "unscale"):
            return
        if named(event) not in CLIPS or unscales_itself(event):
            continue
        late = [d for d in done[place:] if _is_scalers(d[0], "unscale")]
        if any(not _are_apart(code, (event, site), other) for other in late):
            yield event, None


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


# Whoever scales losses, in any file of the project.
_SCALES = re.compile(
    rb"[Ss]caler|scale_loss|loss_scal|FP16_Optimizer|[Aa]ccelerat|deepspeed|[Ll]ightning|fairscale"
)


class Fp16LossNotScaled(CodeRule):
    """A float16 autocast region, or apex at O1 or O2, with a plain `loss.backward()`.

    *Why it breaks a run*: gradients below 6e-8 are 0 in float16, and most are that small: layers
    stop learning without a sign of it. What overflows is not skipped either, since that is the
    scaler's work: one inf in a gradient reaches the weights.

    Scale the loss: `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`
    with a `GradScaler`; with apex, `with amp.scale_loss(loss, optimizer) as scaled`. Or use
    bfloat16, which needs no scaling.
    """

    code = "SRC038"
    name = "fp16-loss-not-scaled"
    severity = Severity.WARNING
    seen_in = "https://github.com/NVIDIA/apex/issues/747"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n"
            "        with torch.cuda.amp.autocast():\n            loss = model(x).mean()\n"
            "        loss.backward()\n        opt.step()\n",
            line=8,
        ),
        Fails(
            "import torch\nfrom apex import amp\n\n\ndef train(model, loader, opt):\n"
            '    model, opt = amp.initialize(model, opt, opt_level="O1")\n    for x in loader:\n'
            "        loss = model(x).mean()\n        loss.backward()\n        opt.step()\n",
            line=6,
        ),
        Passes(
            "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n"
            "        with torch.autocast('cuda', dtype=torch.bfloat16):\n"
            "            loss = model(x).mean()\n        loss.backward()\n        opt.step()\n"
        ),
        Passes(
            "import torch\nfrom apex import amp\n\n\ndef train(model, loader, opt):\n"
            '    model, opt = amp.initialize(model, opt, opt_level="O1")\n    for x in loader:\n'
            "        with amp.scale_loss(model(x).mean(), opt) as scaled:\n"
            "            scaled.backward()\n        opt.step()\n"
        ),
        Passes(
            "import torch\n\n\ndef train(model, teacher, loader, opt):\n    for x in loader:\n"
            "        with torch.no_grad(), torch.cuda.amp.autocast():\n            y = teacher(x)\n"
            "        loss = (model(x) - y).square().mean()\n        loss.backward()\n"
            "        opt.step()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        training = Training.of(code)
        starts = [call for call in training.called("initialize") if _is_apex(code, call)]
        regions = [*code.of("autocast")]
        if not starts and not (regions and training.backwards):
            return
        project = code.project
        text = code.text.content.encode()
        if _SCALES.search(text) or (project is not None and project.some_file_has(_SCALES)):
            return
        fix = Fix("scale the loss with a GradScaler, or use bfloat16")
        for call in starts:
            message = "apex is asked for float16, and no file of the project scales a loss"
            yield self.at(code, call.node, message, fixes=(fix,))
        for backward in training.backwards if not starts else ():
            if any(_is_of_half(made) for made in _loss(backward).upstream(40)):
                message = "backward of a loss from a float16 autocast region, and nothing scales it"
                yield self.at(code, backward.node, message, fixes=(fix,))
                return


def _loss(backward: Value) -> Value:
    return backward.inputs[0] if backward.inputs else backward


def _is_of_half(value: Value) -> bool:
    """Returns whether a value was made in a float16 region, where gradients are recorded."""
    return value.autocast == "float16" and value.grad


def _is_apex(code: Code, call: Value) -> bool:
    """Returns whether a call hands a model to apex for a level that computes in float16."""
    if not isinstance(call.node, ast.Call) or not code.names.imported("apex"):
        return False
    level = call.keywords.get("opt_level")
    return level is not None and level.const in ("O1", "O2", None)


class ScaledGradientsStepped(CodeRule):
    """`scaler.scale(loss).backward()`, and then `optimizer.step()` without the scaler.

    *Why it breaks a run*: the gradients are 65536 times what they should be. SGD makes steps that
    long; Adam hides the scale, but steps on every inf as well, which the scaler would have skipped,
    and one is enough to make all weights NaN.

    Let the scaler step: `scaler.step(optimizer)`, then `scaler.update()`.
    """

    code = "SRC050"
    name = "scaled-gradients-stepped"
    severity = Severity.WARNING
    seen_in = "https://github.com/nerfstudio-project/nerfacc/issues/307"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef train(model, loader, opt):\n"
            "    scaler = torch.cuda.amp.GradScaler()\n    for x in loader:\n"
            "        opt.zero_grad()\n        scaler.scale(model(x).mean()).backward()\n"
            "        opt.step()\n",
            line=9,
        ),
        Passes(
            "import torch\n\n\ndef train(model, loader, opt):\n"
            "    scaler = torch.cuda.amp.GradScaler()\n    for x in loader:\n"
            "        opt.zero_grad()\n        scaler.scale(model(x).mean()).backward()\n"
            "        scaler.step(opt)\n        scaler.update()\n"
        ),
        Passes(
            "import torch\n\n\ndef train(model, loader, opt, amp):\n"
            "    scaler = torch.cuda.amp.GradScaler()\n    for x in loader:\n"
            "        opt.zero_grad()\n        loss = model(x).mean()\n        if amp:\n"
            "            scaler.scale(loss).backward()\n            scaler.step(opt)\n"
            "            scaler.update()\n        else:\n            loss.backward()\n"
            "            opt.step()\n"
        ),
        Passes(
            "import torch\n\n\ndef train(g, d, loader, opt_g, opt_d):\n"
            "    scaler = torch.cuda.amp.GradScaler()\n    for x in loader:\n"
            "        scaler.scale(g(x).mean()).backward()\n        scaler.unscale_(opt_g)\n"
            "        opt_g.step()\n        scaler.update()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        if "GradScaler" not in code.text.content:
            return
        training = Training.of(code)
        seen: set[ast.AST] = set()
        for function in code.functions:
            if training.callers(function):
                continue
            for step in _stepped_scaled(code, training, function):
                if step.node is not None and step.node not in seen:
                    seen.add(step.node)
                    message = "the optimizer steps on gradients that still carry the loss scale"
                    fix = Fix("let the scaler step: scaler.step(optimizer), scaler.update()")
                    yield self.at(code, step.node, message, fixes=(fix,))


def _stepped_scaled(code: Code, training: Training, function: Function) -> Iterator[Value]:
    """The steps of an optimizer that follow a scaled loss, with no scaler in between."""
    done = training.done_in(function)
    by_scaler = {event.inputs[1].name for event, _ in done if _is_scalers(event, "step")}
    scaled: _Done | None = None
    for event, site in done:
        if is_backward(event):
            times = any(
                made.op == "scale" for loss in losses_of(event) for made in loss.upstream(6)
            )
            scaled = (event, site) if times and is_scaled(event) else None
        elif _is_scalers(event, "unscale", "update", "step"):
            scaled = None
        elif scaled is not None and is_step(event) and len(event.inputs) == 1:
            known = event.inputs[0].name in by_scaler
            if not known and not _are_apart(code, scaled, (event, site)):
                yield event


class ScaleUpdatedBetweenSteps(CodeRule):
    """`scaler.update()` after the step of one optimizer, and another one steps on the same scale.

    *Why it breaks a run*: the gradients of the second optimizer were scaled before the update. If
    that halved the scale, for an inf in the gradients of the first, they are divided by half of
    what they were multiplied by, and the step is twice as long. The counter that lets the scale
    grow runs as many times too fast as there are optimizers.

    Call `scaler.step` for each optimizer, and `scaler.update()` once behind them.
    """

    code = "SRC061"
    name = "scale-updated-between-steps"
    severity = Severity.WARNING
    seen_in = "https://github.com/neosr-project/neosr/pull/9"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef step(loss, opt_a, opt_b, scaler):\n"
            "    scaler.scale(loss).backward()\n    scaler.step(opt_a)\n    scaler.update()\n"
            "    scaler.step(opt_b)\n    scaler.update()\n",
            line=7,
        ),
        Fails(
            "import torch\n\n\ndef step(loss, optimizers, scaler):\n"
            "    scaler.scale(loss).backward()\n    for opt in optimizers:\n"
            "        scaler.step(opt)\n        scaler.update()\n",
            line=8,
        ),
        Fails(
            "import torch\n\n\nclass Several:\n    def __init__(self, optimizers):\n"
            "        self.optimizers = optimizers\n\n    def step(self, scaler):\n"
            "        _ = [self._step(key, scaler) for key in self.optimizers]\n\n"
            "    def _step(self, key, scaler):\n        scaler.step(self.optimizers[key])\n"
            "        scaler.update()\n",
            line=13,
        ),
        Passes(
            "import torch\n\n\ndef step(loss, optimizers, scaler):\n"
            "    scaler.scale(loss).backward()\n    for opt in optimizers:\n"
            "        scaler.step(opt)\n    scaler.update()\n"
        ),
        Passes(
            "import torch\n\n\ndef step(g, d, x, opt_g, opt_d, scaler):\n"
            "    scaler.scale(d(x).mean()).backward()\n    scaler.step(opt_d)\n"
            "    scaler.update()\n    scaler.scale(g(x).mean()).backward()\n"
            "    scaler.step(opt_g)\n    scaler.update()\n"
        ),
        Passes(
            "import torch\n\n\ndef train(model, loader, opt, scaler):\n    for x in loader:\n"
            "        scaler.scale(model(x).mean()).backward()\n        scaler.step(opt)\n"
            "        scaler.update()\n"
        ),
        Passes(
            "import torch\n\n\ndef train(losses, optimizers, scaler):\n"
            "    for loss, opt in zip(losses, optimizers):\n"
            "        scaler.scale(loss).backward()\n        scaler.step(opt)\n"
            "        scaler.update()\n"
        ),
        Passes(
            "import torch\n\n\ndef step(loss, opt_a, opt_b, scaler, other):\n"
            "    scaler.scale(loss).backward()\n    if other:\n        scaler.step(opt_a)\n"
            "        scaler.update()\n    else:\n        scaler.step(opt_b)\n"
            "        scaler.update()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        training = Training.of(code)
        for function in code.functions if "scaler" in code.text.content.lower() else ():
            events = [event for event in function.events if event.node is not None]
            updates = [event for event in events if _is_update(event)]
            for update in updates:
                before = [e for e in events if _is_scalers(e, "step") and e.line <= update.line]
                if not before:
                    continue
                if _steps_again(code, events, update, before[-1]) or _is_of_each(
                    code, training, function, before[-1], update
                ):
                    message = (
                        "the loss scale changes here before all optimizers have stepped on "
                        "gradients that carry it"
                    )
                    fix = Fix("call scaler.update() once, behind the steps of all optimizers")
                    yield self.at(code, update.node, message, fixes=(fix,))
                    break


def _is_update(event: Value) -> bool:
    return (
        named(event) == "update"
        and len(event.inputs) == 1
        and "scaler" in (event.inputs[0].name + event.inputs[0].path).lower()
    )


def _steps_again(code: Code, events: list[Value], update: Value, step: Value) -> bool:
    """Returns whether another optimizer steps after an update, and no backward pass between."""
    for later in events[events.index(update) + 1 :]:
        if _is_scalers(later, "step") and update.node is not None and later.node is not None:
            return (
                _reaches(code, update.node, later.node)
                and not exclude(code, update.node, later.node)
                and later.inputs[0].name == step.inputs[0].name
                and ast.dump(_stepped(later)) != ast.dump(_stepped(step))
            )
        if is_backward(later) or _OPAQUE.search(named(later)):
            return False
    return False


def _stepped(step: Value) -> ast.AST:
    node = step.node
    return node.args[0] if isinstance(node, ast.Call) and node.args else ast.Pass()


def _is_of_each(
    code: Code, training: Training, function: Function, step: Value, update: Value
) -> bool:
    """Returns whether a step and an update are made for each of several optimizers in turn."""
    if step.node is None or update.node is None:
        return False
    if conditions_of(code, step.node) != conditions_of(code, update.node):
        return False
    stepped = names_in(_stepped(step))
    if stepped & _loop_names(code, step.node, update.node):
        return True
    held = isinstance(_stepped(step), ast.Subscript) and function.node is not None
    key = {n for n in stepped if n in function.parameters and n != "self"}
    if not held or not key or any(is_backward(event) for event in function.events):
        return False
    return any(
        call.node is not None and key & _loop_names(code, call.node, call.node)
        for call in training.callers(function)
    )


def _loop_names(code: Code, step: ast.AST, update: ast.AST) -> set[str]:
    """Returns the names that the innermost loop around two places sets, if nothing else is in it.

    A loop with a backward pass makes new gradients in each turn.
    """
    for outer in code.ancestors(step):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return set()
        if isinstance(outer, (ast.For, ast.ListComp, ast.GeneratorExp)):
            if not any(inner is update for inner in ast.walk(outer)):
                return set()
            calls = [node for node in ast.walk(outer) if isinstance(node, ast.Call)]
            if any(_OPAQUE.search(_last_name(call.func)) for call in calls):
                return set()
            targets = (
                [outer.target]
                if isinstance(outer, ast.For)
                else [generator.target for generator in outer.generators]
            )
            return {name for target in targets for name in names_in(target)}
    return set()


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


# What may make gradients anew, somewhere that cannot be looked into.
_OPAQUE = re.compile(
    r"backward|backprop|closure|accumulate|train|loss|forward|(?<!^)_step|optimize"
)
