"""Accelerate: a guard for a loop with an ``Accelerator``.

For example:

accelerator = Accelerator(gradient_accumulation_steps=4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
guard = guard_for(accelerator, model, optimizer, scheduler=scheduler)
for batch in guard.watch(loader):
    with accelerator.accumulate(model):
        guard.backward(loss_of(model, batch))
        guard.step(max_norm=1.0)
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanguard.errors import MissingDependencyError, UsageError
from nanguard.settings import Settings

try:
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    from nanguard.guard.guard import Guard
except ModuleNotFoundError as error:
    what = "nanguard.integrations.accelerate"
    raise MissingDependencyError.of(what, error, extra="accelerate") from error

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer

_WHERE = "guard_for(accelerator, model, optimizer)"
# They step and scale by themselves, where nothing can come in between.
_CLOSED = ("DEEPSPEED", "MEGATRON_LM", "XLA")


def guard_for(
    accelerator: Accelerator,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    settings: Settings | None = None,
    **options: Any,
) -> Guard:
    """Returns a guard for what an accelerator has prepared.

    ``accelerator.save_state`` and ``load_state`` cover the guard, too; the random streams of each
    rank are those that the accelerator saves.

    Args:
        accelerator: The accelerator.
        model: The model, or several, as ``accelerator.prepare`` returned them.
        optimizer: The optimizer, or several, as ``accelerator.prepare`` returned them.
        settings: As for a guard. With gradient accumulation the host is never late.
        options: What else a guard is given: ``scheduler``, ``ema``, ``run_dir``, ``incidents``...
    """
    _check(accelerator)
    given = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    settings = settings or Settings()
    if accelerator.gradient_accumulation_steps > 1:
        # The accelerator counts batches, and would count those that are given out again.
        settings = replace(settings, lag=0)
    guard = AcceleratedGuard(
        model,
        [_inner(one) for one in given],
        scaler=accelerator.scaler,
        settings=settings,
        **options,
    )
    guard.accelerator = accelerator
    accelerator.register_for_checkpointing(guard)
    return guard


class AcceleratedGuard(Guard):
    """A guard whose backward passes and accumulated steps are those of an accelerator.

    Attributes:
        accelerator: The accelerator.
    """

    accelerator: Accelerator

    def step(self, optimizer: Optimizer | None = None, **options: Any) -> bool | None:
        """Steps as ``Guard.step`` does, once the gradients of all accumulated batches are there."""
        if not self.accelerator.sync_gradients:
            return None
        return super().step(None if optimizer is None else _inner(optimizer), **options)

    def _share(self, loss: Tensor) -> Tensor:
        steps = self.accelerator.gradient_accumulation_steps
        return loss if steps == 1 else loss / steps

    def _go_back(self, loss: Tensor, seed: Tensor | None, options: dict[str, Any]) -> None:
        if seed is not None:
            options = {**options, "gradient": seed}
        self.accelerator.backward(loss, **options)


def _check(accelerator: Any) -> None:
    if not isinstance(accelerator, Accelerator):
        raise UsageError(
            f"accelerator is of type {type(accelerator).__name__}, not an Accelerator.",
            where=_WHERE,
            do="Give the accelerate.Accelerator that has prepared the model.",
        )
    if accelerator.distributed_type.name in _CLOSED:
        raise UsageError(
            f"with {accelerator.distributed_type.name} the step is made inside of an engine.",
            where=_WHERE,
            do="Use DDP or FSDP, or train under `nanguard run`, which watches without acting.",
        )


def _inner(optimizer: Any) -> Any:
    """Returns the torch optimizer inside of what the accelerator made of it."""
    if not isinstance(optimizer, AcceleratedOptimizer):
        raise UsageError(
            f"the optimizer ({type(optimizer).__name__}) was not prepared by the accelerator.",
            where=_WHERE,
            do="Call accelerator.prepare(model, optimizer, ...) first and give what it returns.",
        )
    return optimizer.optimizer
