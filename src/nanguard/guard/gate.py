"""The latch on the device, and the numbers that travel to the host without anyone waiting.

A bad step sets the latch. While it is set, every optimizer step is a no-op on the device, so the
host may look a few steps late and still find the weights as they were before the bad step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Gate:
    """A latch that lets good steps through until a bad one closes it.

    Attributes:
        latch: 0.0 while every step was good, 1.0 since the first bad one. It is handed to fused
            optimizers as their ``found_inf``.
    """

    def __init__(self, device: torch.device) -> None:
        self.latch = torch.zeros((), dtype=torch.float32, device=device)
        self._spare: list[tuple[Tensor, torch.cuda.Event]] = []

    def close_unless(self, good: Tensor) -> None:
        """Closes the gate if a 0-dim bool on the device says that the step is not good."""
        self.latch.masked_fill_(~good, 1.0)

    def open(self) -> None:
        """Lets steps through again."""
        self.latch.zero_()

    def post(self, values: dict[str, Tensor]) -> Ticket:
        """Sends 0-dim tensors towards the host; the ticket tells when they are there."""
        packed = torch.stack([value.reshape(()) for value in values.values()])
        if packed.device.type != "cuda":
            return Ticket(tuple(values), packed)
        memory, event = self._spare.pop() if self._spare else _pinned()
        if memory.numel() < packed.numel() or memory.dtype != packed.dtype:
            memory = torch.empty(packed.numel(), dtype=packed.dtype, pin_memory=True)
        memory[: packed.numel()].copy_(packed, non_blocking=True)
        event.record()
        return Ticket(tuple(values), memory, event, self._spare)


def _pinned() -> tuple[Tensor, torch.cuda.Event]:
    return torch.empty(16, pin_memory=True), torch.cuda.Event()


class Ticket:
    """Numbers on their way from the device to the host."""

    def __init__(
        self,
        names: tuple[str, ...],
        memory: Tensor,
        event: torch.cuda.Event | None = None,
        spare: list[tuple[Tensor, torch.cuda.Event]] | None = None,
    ) -> None:
        self._names = names
        self._memory = memory
        self._event = event
        self._spare = spare
        self._values: dict[str, float] | None = None

    def read(self) -> dict[str, float]:
        """Returns the numbers by name; waits for the device if they are not there yet."""
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            numbers = self._memory[: len(self._names)].tolist()
            self._values = dict(zip(self._names, numbers, strict=True))
            if self._event is not None and self._spare is not None:
                self._spare.append((self._memory, self._event))
        return self._values
