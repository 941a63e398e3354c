"""The latch on the device, and the numbers that travel to the host without anyone waiting.

A bad step sets the latch. While it is set, every optimizer step is a no-op on the device, so the
host may look a few steps late and still find the weights as they were before the bad step.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max
_FIRST = ("latch", "loss", "grad_norm")


class Gate:
    """A latch that lets good steps through until a bad one closes it.

    The latch lies on a small board on the device, beside the numbers of the step that is being
    built. They are written there as they come, judged in a few kernels, and copied to the host in
    one piece.

    Attributes:
        latch: 0.0 while every step was good, 1.0 since the first bad one. It is handed to fused
            optimizers as their ``found_inf``.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(mode=False):
            self._board = torch.zeros(32, device=device)
            self._limits = torch.full((2,), _LARGEST, device=device)
            self._judged = torch.zeros(2, device=device)
            self._bad = torch.zeros(2, dtype=torch.bool, device=device)
        self._places = {name: self._board[i] for i, name in enumerate(_FIRST)}
        self._known_limits = (_LARGEST, _LARGEST)
        self._spare: list[tuple[Tensor, torch.cuda.Event]] = []
        self.latch = self._places["latch"]

    def __getitem__(self, name: str) -> Tensor:
        """Returns a number on the board, as a 0-dim tensor that will change with it."""
        return self._places[name]

    @torch.no_grad()
    def write(self, name: str, value: Tensor) -> None:
        """Writes a number on the board."""
        self._place(name).copy_(value.detach().reshape(()), non_blocking=True)

    @torch.no_grad()
    def add(self, name: str, value: Tensor) -> None:
        """Adds to a number on the board."""
        place = self._place(name)
        place.add_(value.detach().reshape(()).to(place.device, non_blocking=True))

    @torch.no_grad()
    def judge(
        self,
        loss_limit: float,
        norm_limit: float,
        *,
        forgiven: Tensor | None = None,
        agree: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Closes the gate if loss or gradient norm is not finite or is above its limit.

        Args:
            loss_limit: The largest loss that passes; infinity if the loss does not matter.
            norm_limit: The largest gradient norm that passes.
            forgiven: Whether a bad gradient norm is somebody else's business.
            agree: Makes a verdict that is good here good on all ranks, or on none.
        """
        self._set_limits((loss_limit, min(norm_limit, _LARGEST)))
        pair = self._board[1:3]
        torch.nan_to_num(pair, nan=math.inf, posinf=math.inf, neginf=math.inf, out=self._judged)
        torch.gt(self._judged, self._limits, out=self._bad)
        if forgiven is not None:
            self._bad[1].logical_and_(~forgiven)
        bad = self._bad.any()
        self.close_if(bad if agree is None else ~agree(~bad))

    def close_if(self, bad: Tensor) -> None:
        """Closes the gate if a 0-dim bool on the device says so."""
        self.latch.masked_fill_(bad, 1.0)

    def open(self) -> None:
        """Lets steps through again."""
        self.latch.zero_()

    def post(self, names: Iterable[str]) -> Ticket:
        """Sends numbers on the board towards the host; the ticket tells when they are there."""
        order = {name: index for index, name in enumerate(self._places)}
        places = {name: order[name] for name in names}
        size = len(self._places)
        if self._board.device.type != "cuda":
            return Ticket(places, self._board[:size].clone())
        memory, event = self._spare.pop() if self._spare else (None, torch.cuda.Event())
        if memory is None or memory.numel() < size:
            memory = torch.empty(self._board.numel(), pin_memory=True)
        memory[:size].copy_(self._board[:size], non_blocking=True)
        event.record()
        return Ticket(places, memory, event, self._spare)

    def _place(self, name: str) -> Tensor:
        place = self._places.get(name)
        if place is None:
            self._make_room()
            place = self._places[name] = self._board[len(self._places)]
        return place

    def _make_room(self) -> None:
        if len(self._places) < self._board.numel():
            return
        old = self._board
        with torch.inference_mode(mode=False):
            self._board = torch.cat([old, torch.zeros_like(old)])
        self._places = {name: self._board[i] for i, name in enumerate(self._places)}
        self.latch = self._places["latch"]

    def _set_limits(self, limits: tuple[float, float]) -> None:
        for index, limit in enumerate(limits):
            if limit != self._known_limits[index]:
                # float64 knows larger numbers, but infinity has a meaning of its own here.
                self._limits[index].fill_(limit if math.isinf(limit) else min(limit, _LARGEST))
        self._known_limits = limits


class Ticket:
    """Numbers on their way from the device to the host."""

    def __init__(
        self,
        places: dict[str, int],
        memory: Tensor,
        event: torch.cuda.Event | None = None,
        spare: list[tuple[Tensor, torch.cuda.Event]] | None = None,
    ) -> None:
        self._places = places
        self._memory = memory
        self._event = event
        self._spare = spare
        self._values: dict[str, float] | None = None

    def read(self) -> dict[str, float]:
        """Returns the numbers by name; waits for the device if they are not there yet."""
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            numbers = self._memory.tolist()
            self._values = {name: numbers[place] for name, place in self._places.items()}
            if self._event is not None and self._spare is not None:
                self._spare.append((self._memory, self._event))
        return self._values
