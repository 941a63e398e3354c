"""How a file trains: backward, clipping, the step, and on how many ranks."""

from __future__ import annotations

import ast
import re
from functools import cached_property
from typing import TYPE_CHECKING

from nanguard.check.paths import in_tests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Function
    from nanguard.check.code.values import Value

CLIPS = frozenset(
    {
        "clip_grad_norm", "clip_grad_value", "clip_gradients", "clip_grads_with_norm",
        "dispatch_clip_grad", "adaptive_clip_grad",
    }
)  # fmt: skip
_BACKWARD = frozenset({"backward", "manual_backward"})
_OPTIMIZER = re.compile(r"opt|adam|sgd|scaler|engine|solver", re.IGNORECASE)
_NO_OPTIMIZER = re.compile(
    r"sched|lr|prof|env|timer|bar|track|logg|ema|sim|world|game|warm|anneal|stop|noise|sampler"
    r"|diffusion|beta|meter|progress|swa|queue|agent",
    re.IGNORECASE,
)
_RANKS = re.compile(
    r"^torch\.distributed(?!\.(tensor|rpc|_tools|algorithms))\b|DistributedDataParallel$"
    r"|FullyShardedDataParallel$|fully_shard$|DistributedSampler$|^accelerate\.Accelerator$"
    r"|^(horovod|deepspeed|fairscale|torch_xla)\b"
)
_UNSCALE = ("accelerator", "fabric", "self", "trainer")
_TRAINERS = ("Trainer", "Fabric")


def named(value: Value) -> str:
    """Returns what a call is a call of, without the mark of an operation in place."""
    if value.op == "call":
        return value.name.rstrip("_")
    if value.op == "new":
        return value.path.rpartition(".")[2] or (value.cls.name if value.cls else value.name)
    if value.op in ("local", "result"):
        return value.name.rstrip("_")
    return value.op


class Training:
    """What a file says about how it trains.

    Attributes:
        code: The file.
        callees: The functions of the file that calls go to, by the call's identity.
        calls: What is called, by name.
        backwards: The calls that start a backward pass.
        steps: The calls that step an optimizer.
        clips: The calls that clip gradients.
    """

    def __init__(self, code: Code) -> None:
        self.code = code
        self.callees: dict[int, Function] = {id(call): callee for call, callee in code.calls}
        self.calls: dict[str, list[Value]] = {}
        for function in code.functions:
            for event in function.events:
                callee = self.callees.get(id(event))
                if callee is None or callee.home is not code:
                    self.calls.setdefault(named(event), []).append(event)
        self.backwards = [*self.called(*_BACKWARD)]
        self.steps = [event for event in self.called("step") if is_step(event)]
        self.clips = [*self.called(*CLIPS)]

    @classmethod
    def of(cls, code: Code) -> Training:
        """Returns what a file says, worked out once."""
        known: Training | None = code.facts.get(cls)
        if known is None:
            known = code.facts[cls] = cls(code)
        return known

    def called(self, *names: str) -> Iterator[Value]:
        """Yields the calls of these names, those of functions of the file apart."""
        for name in names:
            yield from self.calls.get(name, ())

    def owner(self, node: ast.AST) -> Function:
        """Returns the function a node stands in."""
        for outer in self.code.ancestors(node):
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return self.code.function_of(outer) or self.code.module
        return self.code.module

    @cached_property
    def _callers(self) -> dict[int, list[Value]]:
        callers: dict[int, list[Value]] = {}
        for call, callee in self.code.calls:
            callers.setdefault(id(callee), []).append(call)
        return callers

    def callers(self, function: Function) -> list[Value]:
        """Returns the calls of a function in this file."""
        return self._callers.get(id(function), [])

    def argument(self, call: Value, function: Function, name: str) -> Value | None:
        """Returns what a call of a function of the file gives one of its parameters."""
        if not isinstance(call.node, ast.Call):
            return None
        for keyword in call.node.keywords:
            if keyword.arg == name:
                return self.code.values.get(keyword.value)
        names = [n for n in function.parameters if n not in ("self", "cls")]
        if name not in names or names.index(name) >= len(call.node.args):
            return None
        return self.code.values.get(call.node.args[names.index(name)])

    def does(self, event: Value, what: Callable[[Value], bool], depth: int = 3) -> bool:
        """Returns whether an event is such a one, or calls a function in which one happens."""
        callee = self.callees.get(id(event))
        if callee is None:
            return what(event)
        return depth > 0 and any(self.does(inner, what, depth - 1) for inner in callee.events)

    @cached_property
    def several_ranks(self) -> bool:
        """Whether the file trains, or can train, on several ranks."""
        if any(_RANKS.search(path) for path in self.code.names.imports.values()):
            return True
        for events in self.calls.values():
            if any(event.path and _RANKS.search(event.path) for event in events):
                return True
        return any(on_several_devices(event) for event in self.called(*_TRAINERS))

    @cached_property
    def trains(self) -> bool:
        """Whether a backward pass and an optimizer's step are in the file."""
        return bool(self.backwards) and bool(self.steps)


def is_test(code: Code) -> bool:
    """Returns whether a file tests other code, going by its name and its functions."""
    path = code.text.path.replace("\\", "/")
    name = path.rpartition("/")[2]
    if name.startswith("conftest.") or in_tests(path):
        return True
    if not name.startswith("test_") and not name.endswith("_test.py"):
        return False
    # A script that evaluates a model on its test data is often called so, too.
    return any(function.name.startswith("test") for function in code.functions) or any(
        cls.name.startswith("Test") for cls in code.classes.values()
    )


def is_backward(event: Value) -> bool:
    """Returns whether a call starts a backward pass."""
    return named(event) in _BACKWARD


def losses_of(backward: Value) -> Iterator[Value]:
    """Yields what a backward pass starts from: the receiver, or what it was given."""
    yield from backward.inputs[:2]


def is_step(event: Value) -> bool:
    """Returns whether a call steps an optimizer, and not a schedule, a profiler or a game."""
    if named(event) != "step" or not event.inputs:
        return False
    receiver = event.inputs[0]
    name = receiver.name
    if receiver.op in ("getitem", "element", "part") and receiver.inputs:
        name = name or receiver.inputs[0].name
    if receiver.op == "call" and name == "super":
        return True
    if "optim" in receiver.path or "sched" in name.lower():
        return "lr_scheduler" not in receiver.path and "sched" not in name.lower()
    if _OPTIMIZER.search(name):
        return True
    return len(event.inputs) == 1 and not event.keywords and not _NO_OPTIMIZER.search(name)


def is_scaled(backward: Value) -> bool:
    """Returns whether a backward pass starts from a loss that a scaler has scaled."""
    if backward.inputs and any(_scales_itself(made) for made in backward.inputs[0].upstream(4)):
        return True
    for value in losses_of(backward):
        for made in value.upstream(6):
            if made.op == "scale" and len(made.inputs) > 1:
                return _is_scaler(made.inputs[0])
    return False


def unscales_itself(clip: Value) -> bool:
    """Returns whether gradients are clipped by an accelerator or trainer, which unscale first."""
    if clip.path or not clip.inputs:
        return False
    receiver = clip.inputs[0]
    if any(named(made) in ("Accelerator", "Fabric") for made in receiver.upstream(4)):
        return True
    return any(part in receiver.name.lower() for part in _UNSCALE)


def _scales_itself(value: Value) -> bool:
    if named(value) not in ("Accelerator", "Fabric"):
        return False
    given = value.keywords.get("mixed_precision") or value.keywords.get("precision")
    return given is not None and str(given.const) in ("fp16", "16", "16-mixed")


def _is_scaler(value: Value) -> bool:
    for made in value.upstream(6):
        if made.path.endswith("GradScaler"):
            enabled = made.keywords.get("enabled")
            return enabled is None or enabled.const is not False
    return "scaler" in value.name.lower() or value.name.lower() in ("amp", "gs")


def on_several_devices(trainer: Value) -> bool:
    """Returns whether a trainer of Lightning is told to use several devices."""
    given = trainer.keywords
    strategy = given.get("strategy")
    if strategy is not None and (
        re.search(r"ddp|fsdp|deepspeed", str(strategy.const)) or strategy.path.endswith("Strategy")
    ):
        return True
    for key in ("devices", "gpus", "num_nodes", "num_processes"):
        number = given[key].number() if key in given else None
        if number is not None and (number > 1 or number == -1):
            return True
        if key in given and len(given[key].items or ()) > 1:
            return True
    return False
