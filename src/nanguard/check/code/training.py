"""How a file trains: losses, gradients, backward, clipping, the step, and what runs after what."""

from __future__ import annotations

import ast
import re
from functools import cached_property
from typing import TYPE_CHECKING

from nanguard.check.code.values import SHAPE, Value
from nanguard.check.paths import in_tests

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Function

_NO_LOSS = re.compile(
    r"weight|mask|scale|coef|factor|ratio|_fn$|func|mult|type|dict|hist|meter|list|name|config|lambda",
    re.IGNORECASE,
)
_GRADIENT = re.compile(r"(^|_)(grads?|gradients?)($|_)|^g$|^dw$", re.IGNORECASE)
# What is worked out from gradients and is none itself.
_OF_GRADIENTS = re.compile(r"var|std|mean|sign|mask|cos|sim|norm|scale|penalty", re.IGNORECASE)
# Names by which the results of operations go, which say nothing about the value.
_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "neg", "mean", "sum", "total", "abs"})
# What may be done to a loss between where it is made and backward.
_ON_THE_WAY = _ARITHMETIC | SHAPE | {"join", "scale", "local", "where", "masked_fill", "setitem"}
_ON_THE_WAY |= {"nan_to_num", "clamp", "min", "minimum", "clamp_max", "field", "part", "each"}


def root(value: Value) -> Value:
    """Returns the value whose numbers these are, under the first name it was given."""
    base = value
    while value.op in SHAPE and value.inputs:
        if value.op == "named":
            base = value
        value = value.inputs[0]
    return base if base.op == "named" else value


def label(value: Value) -> str:
    """Returns a name by which two mentions of a value can be told to be the same."""
    base = root(value)
    if base.op == "grad" and base.inputs:
        return label(base.inputs[0]) + ".grad"
    return base.name


class ValueRoles:
    """The parts that the values of a file play in training.

    Attributes:
        code: The file.
        trained: The names from which backward passes start, by the function they are in.
    """

    def __init__(self, code: Code) -> None:
        self.code = code
        self.trained: dict[int, set[str]] = {}
        for backward in Training.of(code).backwards:
            names = self.trained.setdefault(id(backward.scope), set())
            for loss in losses_of(backward):
                names |= set(_summands(loss))

    @classmethod
    def of(cls, code: Code) -> ValueRoles:
        """Returns the parts that the values of a file play, worked out once."""
        known: ValueRoles | None = code.facts.get(cls)
        if known is None:
            known = code.facts[cls] = cls(code)
        return known

    def role(self, value: Value) -> str:
        """Returns ``loss``, ``gradient``, ``norm``, or nothing."""
        base = root(value)
        if self.is_gradient(base):
            return "gradient"
        if base.has("gradnorm") or base.op in ("get_total_norm", "clip_grad_norm"):
            plain = any(made.op in ("norm", "vector_norm") for made in base.upstream(4))
            if not plain or any(self.is_gradient(made) for made in base.upstream(12)):
                return "norm"
        if self.is_loss(base):
            return "loss"
        return ""

    def is_gradient(self, value: Value) -> bool:
        """Returns whether a value is a gradient."""
        if value.has("gradient") or value.op == "grad":
            return True
        if value.op in ("named", "element", "part", "") and _GRADIENT.search(value.name):
            return not value.has("gradnorm") and not _OF_GRADIENTS.search(value.name)
        return value.op in ("named", "element") and any(
            made.op == "grad" for made in value.upstream(4)
        )

    def is_loss(self, value: Value) -> bool:
        """Returns whether a value is a loss."""
        base = root(value)
        if base.op == "attribute" and base.name == "output" and base.inputs[0].name == "state":
            # What the step of an ignite engine gives back, as a rule its loss.
            return self.code.names.imported("ignite")
        if value.has("loss") and value.op == "named" and not _NO_LOSS.search(value.name):
            return True
        if _NO_LOSS.search(base.name) or base.has("count", "size"):
            return False
        if base.has("loss"):
            return True
        if base.op in _ARITHMETIC and base.inputs:
            return any(self.is_loss(part) for part in base.inputs)
        if base.op == "named" and base.inputs[0].op in ("part", "element"):
            return any(m.has("loss") and not _NO_LOSS.search(m.name) for m in base.upstream(6))
        return bool(base.name) and base.name in self.trained.get(id(base.scope), ())

    def is_trained_on(self, value: Value, within: Function | None = None) -> bool:
        """Returns whether a loss reaches a backward pass, or is what its function gives back.

        Args:
            value: The loss.
            within: The function it is in, where the value does not know, as a number does not.
        """
        if id(value) in self._reaching:
            return True
        for outer in self.code.ancestors(value.node) if value.node is not None else ():
            if isinstance(outer, ast.Lambda):
                function = self.code.function_of(outer)
                return any(_leads_to(r, value) for r in function.returns) if function else False
            if isinstance(outer, ast.stmt):
                break
        scope = value.scope or within
        return scope is not None and any(_leads_to(result, value) for result in scope.returns)

    @cached_property
    def _reaching(self) -> set[int]:
        found: set[int] = set()
        for backward in Training.of(self.code).backwards:
            for loss in losses_of(backward):
                found |= {id(made) for made in _made_from(loss)}
        return found


def _summands(loss: Value, depth: int = 4) -> Iterator[str]:
    """Yields the names of what is summed up to a loss, and scaled."""
    if loss.op in ("named", "") and loss.name:
        if not loss.has("network"):
            yield loss.name
    elif loss.op in ("add", "mul", "div", "scale", "sub") and depth:
        for part in loss.inputs:
            yield from _summands(part, depth - 1)


def _made_from(value: Value) -> Iterator[Value]:
    """Yields a loss and the losses it was made from."""
    seen: set[int] = set()
    queue = [value]
    while queue and len(seen) < 96:
        made = queue.pop()
        if id(made) in seen:
            continue
        seen.add(id(made))
        yield made
        if made.op in _ON_THE_WAY and made.name not in ("item", "detach", "numpy", "tolist"):
            queue += made.inputs
            queue += made.items or ()


def _leads_to(result: Value, value: Value) -> bool:
    results = result.items or (result,)
    return any(made is value for part in results for made in _made_from(part))


Loop = ast.For | ast.AsyncFor | ast.While
_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)
_BLOCKS = ("body", "orelse", "finalbody")


def leaves(body: Sequence[ast.stmt]) -> bool:
    """Returns whether a block is always left before its end."""
    return any(isinstance(statement, _LEAVES) for statement in body)


def first(body: Sequence[ast.stmt], kinds: tuple[type[ast.stmt], ...]) -> ast.stmt | None:
    """Returns the first statement of a kind in a block or in the branches of it."""
    for statement in body:
        if isinstance(statement, kinds):
            return statement
        if isinstance(statement, (ast.If, ast.With, ast.Try)):
            for block in _BLOCKS:
                found = first(getattr(statement, block, ()), kinds)
                if found is not None:
                    return found
    return None


def within(line: int, body: Sequence[ast.stmt]) -> bool:
    """Returns whether a line lies in a block."""
    return bool(body) and body[0].lineno <= line <= (body[-1].end_lineno or 0)


def inner_loop(code: Code, node: ast.AST) -> Loop | None:
    """Returns the innermost loop around a node, in the same function."""
    for outer in code.ancestors(node):
        if isinstance(outer, (ast.For, ast.AsyncFor, ast.While)):
            return outer
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
    return None


def after(code: Code, node: ast.AST) -> Iterator[ast.stmt]:
    """Yields the statements that run after a node in the same function, until it is left."""
    statement = code.statement_of(node)
    while statement is not None:
        parent = code.parents.get(statement)
        if parent is None:
            return
        leave: ast.stmt | None = None
        for later in _following(parent, statement):
            yield later
            if isinstance(later, _LEAVES):
                leave = later
                break
        if isinstance(leave, (ast.Return, ast.Raise)):
            return
        if leave is not None:
            loop = inner_loop(code, leave)
            if loop is None:
                return
            statement = loop
            continue
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module, ast.ClassDef)):
            return
        statement = parent if isinstance(parent, ast.stmt) else code.statement_of(parent)


def _following(parent: ast.AST, statement: ast.stmt) -> Sequence[ast.stmt]:
    for block in _BLOCKS:
        body = getattr(parent, block, None)
        if isinstance(body, list) and statement in body:
            return body[body.index(statement) + 1 :]
    return ()


def conditions_of(code: Code, node: ast.AST) -> set[tuple[str, bool]]:
    """Returns the conditions under which a node runs, each with whether it holds."""
    found: set[tuple[str, bool]] = set()
    inner = node
    for outer in code.ancestors(node):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            break
        if isinstance(outer, ast.If) and inner is not outer.test:
            found.add(_plain(outer.test, holds=inner not in outer.orelse))
        inner = outer
    return found


def exclude(code: Code, one: ast.AST, other: ast.AST) -> bool:
    """Returns whether two nodes stand under conditions that never hold together."""
    mine = conditions_of(code, one)
    return any((text, not holds) in mine for text, holds in conditions_of(code, other))


def _plain(test: ast.expr, *, holds: bool) -> tuple[str, bool]:
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, holds = test.operand, not holds
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        right = test.comparators[0]
        if isinstance(right, ast.Constant) and right.value is None:
            holds = holds == isinstance(test.ops[0], (ast.IsNot, ast.NotEq))
            test = test.left
    return ast.unparse(test), holds


def marks_of(code: Code, node: ast.AST) -> set[str]:
    """Returns the names that are set together with a node, and can say afterwards that it ran."""
    statement = code.statement_of(node)
    parent = code.parents.get(statement) if statement is not None else None
    found: set[str] = set()
    siblings = getattr(parent, "body", []) if isinstance(parent, ast.If) else []
    for other in (statement, *siblings):
        targets = getattr(other, "targets", None) or [getattr(other, "target", None)]
        if isinstance(other, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            found |= {n for target in targets if target is not None for n in names_in(target)}
    return found


def names_in(node: ast.AST) -> set[str]:
    """Returns the names and attributes an expression mentions."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} | {
        n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)
    }


def spans(statement: ast.stmt, lines: list[int]) -> bool:
    """Returns whether one of some lines lies in a statement."""
    return any(statement.lineno <= line <= (statement.end_lineno or 0) for line in lines)


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

    def done_in(self, function: Function) -> list[tuple[Value, ast.AST]]:
        """Returns what a function does in order, each with where: if it calls that, the call."""
        done: list[tuple[Value, ast.AST]] = []
        site: ast.AST | None = None
        # A call comes after all that happens in it.
        for event in reversed(list(self.code.events(function))):
            if event.scope is function:
                site = event.node
            if id(event) not in self.callees and event.node is not None:
                done.append((event, site or event.node))
        return done[::-1]

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
