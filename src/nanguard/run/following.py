"""What a replay needs to know of a run that a ``Guard`` keeps: its models, steps and batches."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from nanguard.numerics import is_float, local
from nanguard.replay.patches import Patches
from nanguard.replay.starts import Starts
from nanguard.replay.tracer.modules import tensors_in
from nanguard.replay.watch import Made, Watch, is_good

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from nanguard.guard.parts import Parts


class Followed(Watch):
    """A run that a guard keeps.

    Attributes:
        patches: What makes torch tell what happens.
        starts: What its steps began with.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self._parts = parts
        self.patches = Patches(self)
        self.starts = Starts()
        # Where the script made its optimizers is not known: the guard came later.
        self.made_by = [Made(weakref.ref(optimizer), None) for optimizer in parts.optimizers]
        self._models = parts.models

    def begin(self) -> None:
        """Makes torch tell what happens."""
        self.patches.put_on()
        self.starts.begin()

    def close(self) -> None:
        """Leaves torch as it was found."""
        self.starts.close()
        self.patches.take_off()

    def count(self, step: int) -> None:
        """Notes the number of the step that begins."""
        self.ordinal = step
        for optimizer in self._parts.optimizers:
            self.counts[optimizer] = step

    def next_batch(self, own: Any, draw: Callable[[], Any]) -> Any:
        """Hands on a batch."""
        batch = draw()
        self.starts.drew(own, batch, self.indices_of(own))
        return batch

    def made(self, optimizer: Optimizer) -> None:
        """Leaves out other optimizers than the guard's."""

    # In the run itself the guard does all of this.

    def before_backward(self, losses: list[Tensor]) -> None:
        """Ends the start of a pass."""
        self.starts.before_backward(losses)
        self.losses = []
        start = self.starts.current
        if start is not None and losses and losses[0].device.type == "cpu":
            start.bad = not all(map(is_good, losses))

    def after_backward(self) -> None:
        """Notes that the pass is over."""
        self.starts.after_backward()

    def judged_step(self, optimizer: Optimizer, call: Callable[..., Any], closure: Any) -> Any:
        """Makes the step."""
        return call() if closure is None else call(closure)

    def judged_scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Makes the step."""
        return call()

    def boundary(self) -> None:
        """Does nothing."""


class Several:
    """Several optimizers that a guard steps as one."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._all = _AsOne(optimizers) if len(optimizers) > 1 else None

    def as_one(self, optimizers: Sequence[Optimizer]) -> Any:
        """Returns the one optimizer, or something that holds what all of them hold."""
        return optimizers[0] if self._all is None or len(optimizers) == 1 else self._all


class _AsOne:
    """What is looked at of an optimizer, for several of them."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all of them."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:
        """The state of all of them."""
        return {key: value for o in self._optimizers for key, value in o.state.items()}

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Clears the gradients of all of them."""
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def bad_samples(batches: Sequence[tuple[int, Any]]) -> list[int]:
    """Returns which samples of a single batch hold values that are not finite."""
    if len(batches) != 1:
        return []
    rows: set[int] = set()
    sizes: set[int] = set()
    for tensor in tensors_in(batches[0][1]):
        values = local(tensor.detach())
        if not values.dim() or not is_float(values) or values.layout is not torch.strided:
            continue
        sizes.add(values.shape[0])
        bad = ~torch.isfinite(values).reshape(values.shape[0], -1).all(dim=1)
        rows.update(bad.nonzero().flatten().tolist())
    # If every sample is bad, none of them is to blame.
    return sorted(rows) if len(sizes) == 1 and len(rows) < next(iter(sizes)) else []
