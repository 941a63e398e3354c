"""Breaking a run on purpose, to see what it does.

    with inject(guard, "nan", into="loss", step=7):
        train(guard)

Everything is put back when the block ends, also after an exception.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from nanguard.errors import UsageError
from nanguard.guard.guard import Guard
from nanguard.guard.optimizers import parameters_of
from nanguard.guard.parts import named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Fault = Literal["nan", "inf", "-inf", "spike"]
Target = Literal["input", "loss", "gradient"]


@dataclass
class Injection:
    """A fault that strikes at some steps.

    Attributes:
        fault: What it writes.
        steps: The steps it strikes at.
        rank: The only rank it strikes on; None for all.
        factor: What a spike multiplies with.
        fired: How often it has struck.
    """

    fault: Fault
    steps: frozenset[int]
    rank: int | None
    factor: float
    now: Callable[[], int]
    fired: int = 0

    def due(self) -> bool:
        """Returns whether it strikes now; counts it if so."""
        here = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        if self.now() not in self.steps or (self.rank is not None and self.rank != here):
            return False
        self.fired += 1
        return True

    def spoil(self, tensor: Tensor) -> Tensor:
        """Returns a tensor with one bad element, or with all of them too large."""
        if self.fault == "spike":
            return tensor * self.factor
        spoilt = tensor.clone()
        spoilt[(0,) * spoilt.dim()] = float(self.fault)
        return spoilt

    def spoil_loss(self, loss: Tensor) -> Tensor:
        """Returns a bad loss whose gradient is bad too."""
        return loss * (self.factor if self.fault == "spike" else float(self.fault))


@contextlib.contextmanager
def inject(
    target: Guard | nn.Module,
    fault: Fault,
    *,
    into: Target,
    step: int | Iterable[int],
    parameter: str | None = None,
    term: str | None = None,
    rank: int | None = None,
    factor: float = 1e4,
) -> Iterator[Injection]:
    """Puts a fault into a run, for the time of a ``with`` block.

    Args:
        target: A guard, or a model that is trained without one.
        fault: What is written: ``nan``, ``inf``, ``-inf``, or a ``spike``.
        into: Where: into the model's input, the loss, or the gradient.
        step: The step or steps, counted from 0 as the guard counts them. Without a guard, the
            number of optimizer steps that came before.
        parameter: The parameter whose gradient is spoilt; without it, the gradient of the
            model's output, from where it spreads.
        term: The loss term that is spoilt, for losses made with ``guard.loss``.
        rank: The only rank to spoil; all of them by default.
        factor: What a spike multiplies with.

    Yields:
        The injection, which counts how often it struck.
    """
    steps = frozenset([step] if isinstance(step, int) else step)
    with contextlib.ExitStack() as stack:
        if isinstance(target, Guard):
            model = target._parts.models[0]
            injection = Injection(fault, steps, rank, factor, lambda: target.steps)
        else:
            model = target
            counter = stack.enter_context(_counted_steps(model))
            injection = Injection(fault, steps, rank, factor, counter)
        if into == "input":
            stack.enter_context(_spoilt_input(model, injection))
        elif into == "gradient":
            stack.enter_context(_spoilt_gradient(model, parameter, injection))
        elif isinstance(target, Guard):
            stack.enter_context(_spoilt_guard_loss(target, term, injection))
        else:
            stack.enter_context(_spoilt_backward(injection))
        yield injection


@contextlib.contextmanager
def _counted_steps(model: nn.Module) -> Iterator[Callable[[], int]]:
    known = {id(p) for p in model.parameters()}
    count = 0

    def stepped(optimizer: torch.optim.Optimizer, *_args: Any) -> None:
        nonlocal count
        count += any(id(p) in known for p in parameters_of([optimizer]))

    handle = register_optimizer_step_post_hook(stepped)
    try:
        yield lambda: count
    finally:
        handle.remove()


@contextlib.contextmanager
def _spoilt_input(model: nn.Module, injection: Injection) -> Iterator[None]:
    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not module.training or not injection.due():
            return None
        values = [*args, *kwargs.values()]
        place = next((i for i, v in enumerate(values) if _is_float(v)), None)
        if place is None:
            raise UsageError(
                "the model's input holds no floating-point tensor that could be spoilt.",
                where="inject(into='input')",
                do="Spoil the loss or the gradient instead: into='loss' or into='gradient'.",
            )
        values[place] = injection.spoil(values[place])
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _spoilt_gradient(
    model: nn.Module, parameter: str | None, injection: Injection
) -> Iterator[None]:
    def spoil(grad: Tensor) -> Tensor | None:
        return injection.spoil(grad) if injection.due() else None

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(first, torch.Tensor) and first.requires_grad:
            first.register_hook(spoil)

    if parameter is None:
        handle: Any = model.register_forward_hook(after)
    else:
        handle = _find(model, parameter).register_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


def _find(model: nn.Module, parameter: str) -> Tensor:
    known = named([model])
    if parameter in known and not hasattr(known[parameter], "to_local"):
        return known[parameter]
    why = "is sharded" if parameter in known else "does not exist"
    raise UsageError(
        f"the gradient of {parameter!r} cannot be spoilt: that parameter {why}.",
        where="inject(into='gradient', parameter=...)",
        do=f"Choose one of {sorted(known)[:5]}, or leave parameter out.",
    )


@contextlib.contextmanager
def _spoilt_guard_loss(guard: Guard, term: str | None, injection: Injection) -> Iterator[None]:
    backward, terms_of = guard.backward, guard.loss

    def spoilt_backward(loss: Tensor, **options: Any) -> None:
        backward(injection.spoil_loss(loss) if injection.due() else loss, **options)

    def spoilt_terms(**terms: Any) -> Tensor:
        if term in terms and injection.due():
            terms[term] = injection.spoil_loss(terms[term])
        return terms_of(**terms)

    name = "backward" if term is None else "loss"
    setattr(guard, name, spoilt_backward if term is None else spoilt_terms)
    try:
        yield
    finally:
        delattr(guard, name)


@contextlib.contextmanager
def _spoilt_backward(injection: Injection) -> Iterator[None]:
    original: Callable[..., None] = torch.Tensor.backward

    def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        loss = injection.spoil_loss(self) if self.numel() == 1 and injection.due() else self
        original(loss, *args, **kwargs)

    torch.Tensor.backward = backward  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.backward = original  # type: ignore[method-assign]


def _is_float(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()
