"""Counts that stay on the device until someone asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Counter:
    """How often an edge was met, counted on the device and read when it suits.

    An op that defines what would have been NaN has to say so somewhere, or nobody learns that half
    of the batches are empty. Counting adds no wait; ``value`` waits for the device. Counting writes
    into a tensor from outside, which ``torch.func`` transforms do not allow; leave the counter out
    there.
    """

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def add(self, flags: Tensor) -> None:
        """Adds the number of true values."""
        if flags.device not in self._counts:
            self._counts[flags.device] = torch.zeros((), dtype=torch.int64, device=flags.device)
        self._counts[flags.device].add_(flags.sum())

    def value(self) -> int:
        """Returns the count. Waits for the device."""
        return sum(int(count) for count in self._counts.values())

    def reset(self) -> None:
        """Starts at zero again."""
        for count in self._counts.values():
            count.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Returns the count. Waits for the device."""
        return {"count": self.value()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a count."""
        self._counts = {torch.device("cpu"): torch.tensor(int(state["count"]))}

    def __repr__(self) -> str:
        return f"Counter({self.value()})"
