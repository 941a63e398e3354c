"""One rank leaves out a step, on its own, and the others do not."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.nan_checks import Conditions
from nanguard.check.code.training import (
    Training,
    first,
    inner_loop,
    is_backward,
    leaves,
    named,
    within,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.nan_checks import Test
    from nanguard.check.code.scopes import Function
    from nanguard.check.code.values import Value

_FIX = Fix(
    "let all ranks decide together: all_reduce the flag (MAX) before the branch, or check the "
    "gradient norm after backward, which is the same on every rank"
)


class RankDivergentSkip(CodeRule):
    """A non-finite value makes this rank `continue` or `return` before backward, on its own.

    *Why it breaks a run*: backward is where the ranks average their gradients. A rank that skips it
    never enters the all-reduce, the others wait in it until the time limit of the communication,
    and the job hangs with all GPUs busy.

    Decide together: `all_reduce` the flag before the branch, or call backward on every rank and
    skip on the gradient norm, which is the same everywhere.
    """

    code = "SRC001"
    name = "rank-divergent-skip"
    severity = Severity.ERROR
    seen_in = "https://github.com/Lightning-AI/pytorch-lightning/issues/5243"
    examples: ClassVar = (
        Fails(
            "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n\n"
            "def train(model, loader, opt):\n    model = DDP(model)\n    for x in loader:\n"
            "        loss = model(x)\n        if not torch.isfinite(loss):\n            continue\n"
            "        loss.backward()\n        opt.step()\n",
            line=10,
        ),
        Fails(
            "import torch\nfrom accelerate import Accelerator\n\naccelerator = Accelerator()\n\n\n"
            "def step(model, x, opt):\n    loss = model(x)\n    if torch.isfinite(loss):\n"
            "        accelerator.backward(loss)\n        opt.step()\n",
            line=9,
        ),
        Passes(
            "import torch\nimport torch.distributed as dist\n\n\ndef train(model, loader, opt):\n"
            "    for x in loader:\n        loss = model(x)\n"
            "        bad = (~torch.isfinite(loss)).float()\n        dist.all_reduce(bad)\n"
            "        if bad.item() > 0:\n            continue\n        loss.backward()\n"
            "        opt.step()\n"
        ),
        Passes(
            "import torch\nimport torch.distributed as dist\n\n\ndef step(model, x, opt):\n"
            "    loss = model(x)\n    loss.backward()\n"
            "    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "    if not torch.isfinite(norm):\n        return\n    opt.step()\n"
        ),
        Passes(
            "import torch\n\n\ndef step(model, x, opt):\n    loss = model(x)\n"
            "    if not torch.isfinite(loss):\n        return\n    loss.backward()\n"
            "    opt.step()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        training = Training.of(code)
        if not training.several_ranks:
            return
        for test in Conditions.of(code).tests:
            # What a function of another file answers may be agreed on there.
            if all(isinstance(c.node, ast.Call) and not c.exact for c in test.checks):
                continue
            place = _skip(code, training, test)
            if place is not None and not is_agreed(code, training, test):
                message = (
                    "a rank with a non-finite value leaves before backward: the others wait for it "
                    "in the all-reduce and hang"
                )
                yield self.at(code, place, message, fixes=(_FIX,))


def _skip(code: Code, training: Training, test: Test) -> ast.AST | None:
    """The statement by which a rank leaves before backward, if there is one."""
    if not isinstance(test.node, ast.If):
        return None
    leave = first(test.when_bad, (ast.Continue, ast.Return))
    lines = _backward_lines(training, test.function)
    if leave is None:
        good = test.when_good
        skips = bool(good) and not leaves(test.when_bad)
        hit = any(within(line, good) for line in lines)
        missed = not any(within(line, test.when_bad) for line in lines)
        return test.node if skips and hit and missed else None
    if within(leave.lineno, test.when_bad) and any(within(x, test.when_bad) for x in lines):
        return None
    loop = inner_loop(code, test.node)
    if loop is not None:
        lines = [line for line in lines if within(line, loop.body)]
    if lines:
        return leave if min(lines) > test.node.lineno else None
    return (
        leave
        if isinstance(leave, ast.Return) and _stops_caller(code, training, test, leave)
        else None
    )


def _backward_lines(training: Training, function: Function) -> list[int]:
    return [event.line for event in function.events if training.does(event, is_backward)]


def _stops_caller(code: Code, training: Training, test: Test, leave: ast.Return) -> bool:
    """Whether who called this function goes on to backward only if it was given a loss."""
    function = test.function
    nothing = leave.value is None or (
        isinstance(leave.value, ast.Constant) and leave.value.value is None
    )
    if not nothing:
        return False
    if function.name == "training_step" and function.cls is not None and function.cls.is_module():
        return True
    for call in training.callers(function):
        scope = call.scope or code.module
        if any(line >= call.line for line in _backward_lines(training, scope)):
            return True
    return False


_AGREES = re.compile(
    r"(^|_)(all_?reduce|allgather|all_?gather\w*|gather|broadcast\w*|reduce|agree\w*|sync\w*|vote"
    r"|consensus|any_rank|all_ranks|across_\w+|reduced?_\w+|world_\w+|global_\w+|gather_for_metrics)($|_)"
)


def is_agreed(code: Code, training: Training, test: Test) -> bool:
    """Returns whether the ranks have talked about what a condition looks at."""
    condition = test.node.test  # type: ignore[union-attr]
    names = {node.id for node in ast.walk(condition) if isinstance(node, ast.Name)}
    values = [value for node in ast.walk(condition) if (value := code.values.get(node))]
    values += [check.subject for check in test.checks]
    for value in values:
        for made in value.upstream(24):
            if training.does(made, _agrees):
                return True
            if made.op in ("named", "") and made.name:
                names.add(made.name)
    for event in test.function.events:
        if event.line <= test.node.lineno and training.does(event, _agrees):
            node = event.node if isinstance(event.node, ast.Call) else None
            given = {
                n.id
                for a in (node.args if node else ())
                for n in ast.walk(a)
                if isinstance(n, ast.Name)
            }
            if given & names:
                return True
    return False


def _agrees(event: Value) -> bool:
    name = named(event)
    if event.path.startswith(("einops.", "functools.")) or not _AGREES.search(name):
        return False
    # The gather and scatter of a tensor take a dimension, those of ranks do not.
    return not (name == "gather" and len(event.inputs) > 2 and not event.path)


class PlainScalerWithFsdp(CodeRule):
    """A `GradScaler` of `torch.amp` in a script that shards its model with FSDP.

    *Why it breaks a run*: each rank looks for inf in its own shard. The one that finds it skips the
    step and halves its scale, the others step: from then on weights and scales differ.

    Use `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`, which asks all of them; for
    `fully_shard` of FSDP2 the plain one is right.
    """

    code = "SRC051"
    name = "plain-scaler-with-fsdp"
    severity = Severity.WARNING
    seen_in = "https://github.com/pytorch/pytorch/issues/64632"
    examples: ClassVar = (
        Fails(
            "import torch\nfrom torch.cuda.amp import GradScaler\n"
            "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n\n\n"
            "def train(model):\n    model, scaler = FSDP(model), GradScaler()\n"
            "    return model, scaler\n",
            line=7,
        ),
        Passes(
            "import torch\nfrom torch.cuda.amp import GradScaler\n"
            "from torch.nn.parallel import DistributedDataParallel as DDP\n\n\n"
            "def train(model):\n    model, scaler = DDP(model), GradScaler()\n"
            "    return model, scaler\n"
        ),
        Passes(
            "import torch\nfrom torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
            "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler\n\n\n"
            "def train(model):\n    model, scaler = FSDP(model), ShardedGradScaler()\n"
            "    return model, scaler\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        made = [*code.of("new")]
        sharded = any(m.path.startswith("torch.distributed.fsdp.Fully") for m in made)
        if not sharded or "ShardedGradScaler" in code.text.content:
            return
        for scaler in made:
            enabled = scaler.keywords.get("enabled")
            off = enabled is not None and enabled.const is False
            if scaler.path in _SCALERS and not off:
                message = "this scaler looks for inf in the shard of its own rank only"
                fix = Fix("use ShardedGradScaler of torch.distributed.fsdp.sharded_grad_scaler")
                yield self.at(code, scaler.node, message, fixes=(fix,))


_SCALERS = frozenset({"torch.cuda.amp.GradScaler", "torch.amp.GradScaler"})
