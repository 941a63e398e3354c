"""The order of a training step: clipping, zeroing, and how often a schedule steps."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.origins import origins
from nanguard.check.code.training import (
    CLIPS,
    Training,
    conditions_of,
    exclude,
    inner_loop,
    is_backward,
    is_step,
    named,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Function
    from nanguard.check.code.values import Value

    _Done = tuple[Value, ast.AST]
    _Mark = tuple[str, str, ast.AST]

_NO_LIMIT = 1e3  # a norm that is only measured
# What may start a backward pass, or step, somewhere that cannot be looked into.
_OPAQUE = re.compile(r"backward|backprop|closure|optimi[sz]e|accumulate|step|grad\b|_grads?$")
_FIX = Fix("clip between the backward pass and the step")
_ZEROES = re.compile(
    rb"zero_grad|zero_\w*grad|clear_grad|reset_grad|grad_zero|\.grad\b[^\n]*=\s*None|autograd"
    rb"|grad(\.data)?\.(zero_|fill_|detach_|mul_)|set_to_none|deepspeed|functional_call|\.grad\)"
    rb"|flat_grad|lightning|accelerat|fairseq|grad(\.data)?\[|\bgrad(\.data)?\s*[*]?=|LOMO|jvp|vjp"
)


_LOSS_NAME = re.compile(r"(^|_)loss(es)?(_|$)")


class ClipWithoutGradients(CodeRule):
    """Gradients are clipped before the backward pass or after the step, or the loss is clipped.

    *Why it breaks a run*: between `zero_grad` and `backward` there is nothing to clip, and after
    `step` it is too late: the next `zero_grad` throws away what was clipped. The code says that
    gradients are bounded and no step is, so that the first large one goes through.

    The order is `zero_grad`, `backward`, clip, `step`.
    """

    code = "SRC047"
    name = "clip-without-gradients"
    severity = Severity.WARNING
    seen_in = "https://github.com/jongwook/onsets-and-frames/issues/24"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n"
            "        opt.zero_grad()\n        loss = model(x).mean()\n"
            "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "        loss.backward()\n        opt.step()\n",
            line=8,
        ),
        Fails(
            "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n"
            "        opt.zero_grad()\n        model(x).mean().backward()\n        opt.step()\n"
            "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
            line=9,
        ),
        Fails(
            "import lightning\nimport torch\n\n\nclass Net(lightning.LightningModule):\n"
            "    def training_step(self, batch):\n"
            "        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)\n"
            "        return self.net(batch).mean()\n",
            line=7,
        ),
        Passes(
            "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n"
            "        opt.zero_grad()\n        model(x).mean().backward()\n"
            "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        opt.step()\n"
        ),
        Passes(
            "import torch\n\n\ndef train(model, loader, opt, k):\n"
            "    for i, x in enumerate(loader):\n        if i and i % k == 0:\n"
            "            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "            opt.step()\n            opt.zero_grad()\n"
            "        model(x).mean().backward()\n"
        ),
        Passes(
            "import torch\n\n\ndef train(g, d, loader, opt_g, opt_d):\n    for x in loader:\n"
            "        opt_d.zero_grad()\n        d(x).mean().backward()\n        opt_g.zero_grad()\n"
            "        torch.nn.utils.clip_grad_norm_(d.parameters(), 1.0)\n        opt_d.step()\n"
            "        g(x).mean().backward()\n"
            "        torch.nn.utils.clip_grad_norm_(g.parameters(), 1.0)\n        opt_g.step()\n"
        ),
        Passes(
            "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n"
            "        opt.zero_grad()\n        model(x).mean().backward()\n        opt.step()\n"
            "        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float('inf'))\n"
            "        print(norm)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        training = Training.of(code)
        for function in code.functions if training.clips else ():
            done = training.done_in(function)
            for event, site in done:
                # Only where it stands: the order of what calls it is another function's.
                if event.scope is not function or named(event) not in CLIPS or _measures(event):
                    continue
                if _is_of_loss(event):
                    message = "the loss is handed in, which has no gradient: nothing is clipped"
                    fix = Fix("hand in the parameters: model.parameters()")
                    yield self.at(code, event.node, message, fixes=(fix,))
                    continue
                when = _is_in_automatic_step(code, function, done) or _when(code, done, event, site)
                if when:
                    message = f"gradients are clipped {when}: nothing that is stepped on is clipped"
                    yield self.at(code, event.node, message, fixes=(_FIX,))


def _is_of_loss(clip: Value) -> bool:
    """Returns whether a loss is clipped in place of the parameters."""
    given = clip.inputs[0] if clip.inputs else None
    if given is None or given.op == "parameters" or given.cls is not None:
        return False
    is_loss = given.has("loss") or _LOSS_NAME.search(given.name.lower()) is not None
    return is_loss and given.op in ("named", "join")


def _measures(clip: Value) -> bool:
    """Returns whether gradients are handed in with a limit that is none, to learn their norm."""
    limit = clip.arg(1, "max_norm")
    number = limit.number() if limit is not None else None
    return number is not None and number >= _NO_LIMIT


def _is_in_automatic_step(code: Code, function: Function, done: list[_Done]) -> str:
    """Returns when a step clips of which a trainer does the rest; nothing if it is not one."""
    if function.name != "training_step" or "automatic_optimization" in code.text.content:
        return ""
    if not any(part.endswith("LightningModule") for part in _bases(function)):
        return ""
    marks = [_mark(code, event, site) for event, site in done]
    return "" if any(mark[0] for mark in marks) else "before the trainer's backward pass"


def _bases(function: Function) -> list[str]:
    line = function.cls.line_of_descent() if function.cls is not None else []
    return [base for cls in line for base in cls.bases]


def _mark(code: Code, event: Value, site: ast.AST) -> _Mark:
    """Returns what an event is in the order of a step, with the optimizer's name and the place."""
    name = named(event)
    receiver = event.inputs[0].name if event.inputs else ""
    if is_backward(event) or name == "grad":
        return "backward", "", site
    if name == "zero_grad":
        return "zero", receiver, site
    if is_step(event):
        given = event.inputs[1].name if len(event.inputs) > 1 else receiver
        return "step", given, site
    known = id(event) in Training.of(code).callees or "sched" in receiver.lower()
    opaque = event.op in ("call", name) and not known and _OPAQUE.search(name)
    if opaque and name not in CLIPS and name not in ("no_grad", "step", "set_grad_enabled"):
        return "opaque", "", site
    return "", "", site


def _when(code: Code, done: list[_Done], clip: Value, site: ast.AST) -> str:
    """Returns when gradients are clipped, if that is neither after a backward nor before a step."""
    loop = inner_loop(code, site)
    here = next(n for n, one in enumerate(done) if one[0] is clip)
    marks = [
        _mark(code, event, place)
        for event, place in (*done[here + 1 :], *done[:here])  # round the loop, from the clip on
        if _is_in(code, place, loop) and not exclude(code, site, place)
    ]
    marks = [mark for mark in marks if mark[0]]
    if {"zero", "backward", "step"} - {mark[0] for mark in marks}:
        return ""
    after, before = marks[0], marks[-1]
    always = conditions_of(code, before[2]) <= conditions_of(code, site)
    one = len({mark[1] for mark in marks if mark[0] == "zero"}) == 1
    if before[0] == "zero" and after[0] == "backward" and always:
        following = next((mark for mark in marks if mark[0] == "step"), before)
        return "before the backward pass" if one or following[1] == before[1] else ""
    if before[0] == "step" and after[0] == "zero" and (one or after[1] == before[1]):
        return "after the step"
    return ""


def _is_in(code: Code, place: ast.AST, loop: ast.AST | None) -> bool:
    return loop is None or any(outer is loop for outer in code.ancestors(place))


class GradientsNeverZeroed(CodeRule):
    """An optimizer steps in a loop, and no file of the project sets gradients back to 0.

    *Why it breaks a run*: `backward` adds to what is there. Each step is made with the sum of all
    gradients since the start, which grows until the loss diverges.

    Call `optimizer.zero_grad()` in each turn, before `backward` or after `step`.
    """

    code = "SRC048"
    name = "gradients-never-zeroed"
    severity = Severity.WARNING
    seen_in = "https://github.com/wenet-e2e/wekws/issues/72"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n"
            "        model(x).mean().backward()\n        opt.step()\n",
            line=7,
        ),
        Passes(
            "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n"
            "        opt.zero_grad()\n        model(x).mean().backward()\n        opt.step()\n"
        ),
        Passes(
            "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n"
            "        model(x).mean().backward()\n        opt.step()\n"
            "        for p in model.parameters():\n            p.grad = None\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        training = Training.of(code)
        if not training.trains or _ZEROES.search(code.text.content.encode()):
            return
        if code.project is not None and code.project.some_file_has(_ZEROES):
            return
        for step in training.steps:
            loop = inner_loop(code, step.node) if step.node is not None else None
            if loop is None or len(step.inputs) != 1:
                continue
            if any(
                b.node is not None and _is_in(code, b.node, loop) and b.scope is step.scope
                for b in training.backwards
            ):
                message = (
                    "nothing sets gradients back to 0: each step is made with their sum so far"
                )
                fix = Fix("call optimizer.zero_grad() in each turn")
                yield self.at(code, step.node, message, fixes=(fix,))
                return


# The schedule, and where it is told how long training is.
_LENGTHS = {
    "CosineAnnealingLR": (1, "T_max"),
    "OneCycleLR": (2, "total_steps"),
    "PolynomialLR": (1, "total_iters"),
    "get_linear_schedule_with_warmup": (2, "num_training_steps"),
    "get_cosine_schedule_with_warmup": (2, "num_training_steps"),
}
_PLANS = re.compile("|".join(_LENGTHS).encode())
_OPTIMIZER = re.compile(r"(^|_)(optim(izer)?|opt)s?(_|$)")
_EPOCHS = re.compile(r"(n|num|max|total|nb|n_?train|train)?_?(of_)?epochs?(_?num)?|ep")
_BATCHES = re.compile(r"len|numel|.*(steps?|iter(s|ations?)?|batch(es)?)(_per_epoch)?$")
_EPOCH = re.compile(r"epoch|(^|\W)ep($|\W)|\bround")


class ScheduleInWrongUnit(CodeRule):
    """A schedule as long as training in epochs that steps with each batch, or the other way round.

    *Why it breaks a run*: a cosine over 100 epochs that steps with each batch is back at its
    highest rate after 200 batches, and swings like that to the end. One over all batches that steps
    with each epoch never leaves its beginning: the rate is not lowered at all, or the warm-up never
    ends.

    Count in one unit: `T_max=epochs` and a step after each epoch, or `T_max=epochs * len(loader)`
    and a step after each batch.
    """

    code = "SRC049"
    name = "schedule-in-wrong-unit"
    severity = Severity.WARNING
    seen_in = "https://github.com/ivadomed/ivadomed/pull/55"
    examples: ClassVar = (
        Fails(
            "import torch\nfrom torch.optim.lr_scheduler import CosineAnnealingLR\n\n\n"
            "def train(model, loader, opt, epochs):\n    plan = CosineAnnealingLR(opt, epochs)\n"
            "    for epoch in range(epochs):\n        for x in loader:\n"
            "            opt.zero_grad()\n            model(x).mean().backward()\n"
            "            opt.step()\n            plan.step()\n",
            line=12,
        ),
        Fails(
            "import torch\nfrom torch.optim.lr_scheduler import OneCycleLR\n\n\n"
            "def train(model, loader, opt, n):\n"
            "    plan = OneCycleLR(opt, 0.1, steps_per_epoch=len(loader), epochs=n)\n"
            "    for epoch in range(n):\n        for x in loader:\n"
            "            opt.zero_grad()\n            model(x).mean().backward()\n"
            "            opt.step()\n        plan.step()\n",
            line=12,
        ),
        Passes(
            "import torch\nfrom torch.optim.lr_scheduler import CosineAnnealingLR\n\n\n"
            "def train(model, loader, opt, epochs):\n    plan = CosineAnnealingLR(opt, epochs)\n"
            "    for epoch in range(epochs):\n        for x in loader:\n"
            "            opt.zero_grad()\n            model(x).mean().backward()\n"
            "            opt.step()\n        plan.step()\n"
        ),
        Passes(
            "import torch\nfrom torch.optim.lr_scheduler import CosineAnnealingLR\n\n\n"
            "def train(model, x, opt, epochs):\n    plan = CosineAnnealingLR(opt, epochs)\n"
            "    for epoch in range(epochs):\n        opt.zero_grad()\n"
            "        model(x).mean().backward()\n        opt.step()\n        plan.step()\n"
        ),
        Passes(
            "import torch\nfrom torch.optim.lr_scheduler import CosineAnnealingLR\n\n\n"
            "def train(model, loader, opt, epochs):\n"
            "    plan = CosineAnnealingLR(opt, epochs * len(loader))\n"
            "    for epoch in range(epochs):\n        for x in loader:\n"
            "            opt.zero_grad()\n            model(x).mean().backward()\n"
            "            opt.step()\n            plan.step()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        training = Training.of(code)
        if not _is_planned(code):
            return
        for step in training.called("step"):
            if len(step.inputs) != 1 or step.keywords or step.node is None:
                continue
            if _OPTIMIZER.search(step.inputs[0].name):
                continue
            made = origins(code, step.inputs[0]).makers
            if len(made) != 1:
                continue
            unit, stepped = _unit(made[0]), _stepped_with(code, training, step)
            if unit and stepped and unit != stepped:
                name = made[0].path.rpartition(".")[2] or made[0].name
                message = (
                    f"{name} is told its length in {_UNITS[unit]}, and is stepped with each "
                    f"{stepped}"
                )
                fix = Fix("count its length and its steps in the same unit")
                yield self.at(code, step.node, message, fixes=(fix,))


def _is_planned(code: Code) -> bool:
    """Returns whether the project makes a schedule that is told how long training is."""
    if _PLANS.search(code.text.content.encode()):
        return True
    return code.project is not None and code.project.some_file_has(_PLANS)


_UNITS = {"epoch": "epochs", "batch": "batches"}


def _unit(schedule: Value) -> str:
    """Returns whether a schedule is told its length in epochs or in batches; else nothing."""
    place = _LENGTHS.get(schedule.path.rpartition(".")[2])
    if place is None:
        return ""
    if "steps_per_epoch" in schedule.keywords:
        return "batch"
    length = schedule.arg(*place)
    if length is None:
        return ""
    parts = [part for part in length.upstream(12) if part.op != "self"]
    if any(part.op == "len" for part in parts):
        return "batch" if any(part.op == "mul" for part in parts) else ""
    core = length.core
    if core.op not in ("", "attribute", "field") or not _EPOCHS.fullmatch(core.name.lower()):
        return ""
    return "" if any(_BATCHES.fullmatch(part.name.lower()) for part in parts) else "epoch"


def _stepped_with(code: Code, training: Training, step: Value) -> str:
    """Returns whether a schedule steps with each batch or with each epoch; else nothing."""
    loop = inner_loop(code, step.node) if step.node is not None else None
    if loop is None or step.node is None:
        return ""
    outside = conditions_of(code, loop)
    if conditions_of(code, step.node) - outside:
        return ""  # an option, or every so many batches
    beside = [
        other
        for other in (*training.steps, *training.backwards)
        if other is not step and other.node is not None and inner_loop(code, other.node) is loop
    ]
    if _is_of_epochs(loop):
        return "" if beside else "epoch"
    return "batch" if beside and _is_of_batches(loop) else ""


def _is_of_epochs(loop: ast.AST) -> bool:
    if not isinstance(loop, (ast.For, ast.AsyncFor)):
        return False
    return _EPOCH.search(f"{ast.unparse(loop.target)} {ast.unparse(loop.iter)}".lower()) is not None


def _is_of_batches(loop: ast.AST) -> bool:
    """Returns whether a loop goes through batches, and not through steps that are counted."""
    if not isinstance(loop, (ast.For, ast.AsyncFor)):
        return False
    names = ast.unparse(loop.iter).lower()
    return "range(" not in names and re.search(r"load|batch|data|train", names) is not None
