"""The latch on the device, and the numbers that travel to the host without anyone waiting.

A bad step sets the latch. While it is set, every optimizer step is a no-op on the device, so the
host may look a few steps late and still find the weights as they were before the bad step.
"""

from __future__ import annotations

import ctypes
import math
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from nanguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max
# Numbers that fit on the board: the latch, loss, norm and scale, and the named loss terms.
_ROOM = 64


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
            # What a user makes the default dtype may be too narrow for a limit, or for found_inf.
            self._board = torch.zeros(_ROOM, dtype=torch.float32, device=device)
            self._limits = torch.full((3,), _LARGEST, dtype=torch.float32, device=device)
            self._judged = torch.zeros(3, dtype=torch.float32, device=device)
            self._bad = torch.zeros(3, dtype=torch.float32, device=device)
            self._one = torch.ones((), dtype=torch.float32, device=device)
        # A latch that was set stays so.
        self._limits[0] = 0.5
        self._on_cuda = device.type == "cuda"
        self._first = self._board[:3]
        # The loss and the gradient norm of the step.
        self._numbers = self._board[1:3]
        self._index: dict[str, int] = {}
        self._places: dict[str, Tensor] = {}
        for name in ("latch", "loss", "grad_norm"):
            self._make_place(name)
        self.latch = self._places["latch"]
        self._known_limits = (_LARGEST, _LARGEST)
        self._spare: list[_Slot] = []
        self._stream: tuple[Any, torch.cuda.Stream] | None = None
        self._posted: dict[tuple[str, ...], list[tuple[str, int]]] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Returns a number on the board, as a 0-dim tensor that will change with it."""
        return self._places[name]

    def write(self, name: str, value: Tensor) -> None:
        """Writes a number on the board."""
        place = self._places.get(name)
        if place is None:
            place = self._make_place(name)
        if value is place:
            return
        value = value.detach()
        place.copy_(value if value.dim() == 0 else value.view(()), non_blocking=True)

    def write_step(self, loss: Tensor, norm: Tensor) -> None:
        """Writes the loss and the gradient norm of a step, with one kernel where that will do."""
        if (
            norm is not self._places["grad_norm"]
            and type(norm) is torch.Tensor
            and loss.dtype is norm.dtype is torch.float32
            and loss.dim() == norm.dim() == 0
            and loss.is_cuda
            and norm.is_cuda
        ):
            torch.stack((loss.detach(), norm.detach()), out=self._numbers)
        else:
            self.write("grad_norm", norm)
            self.write("loss", loss)

    def add(self, name: str, value: Tensor) -> None:
        """Adds to a number on the board."""
        place = self._places[name]
        place.add_(value.detach().view(()).to(place.device, non_blocking=True))

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
        any_finite = _LARGEST <= loss_limit < math.inf and norm_limit >= _LARGEST
        if self._on_cuda and any_finite and forgiven is None:
            # This is the part of a step that every step pays for. What a GradScaler looks for is
            # all that matters here, and its kernel leaves a latch that was set as it is.
            torch._amp_foreach_non_finite_check_and_unscale_([self._numbers], self.latch, self._one)
        else:
            self._hold_to((loss_limit, min(norm_limit, _LARGEST)), forgiven)
        if agree is not None:
            self.close_if(~agree(self.latch == 0))

    def _hold_to(self, limits: tuple[float, float], forgiven: Tensor | None) -> None:
        self._set_limits(limits)
        inf = math.inf
        torch.nan_to_num(self._first, nan=inf, posinf=inf, neginf=inf, out=self._judged)
        torch.gt(self._judged, self._limits, out=self._bad)
        if forgiven is not None:
            self._bad[2].masked_fill_(forgiven, 0.0)
        torch.amax(self._bad, dim=0, out=self.latch)

    def close_if(self, bad: Tensor) -> None:
        """Closes the gate if a 0-dim bool on the device says so."""
        self.latch.masked_fill_(bad, 1.0)

    def set(self, *, closed: bool) -> None:
        """Opens or closes the gate, whatever was judged."""
        self.latch.fill_(float(closed))

    def open(self) -> None:
        """Lets steps through again."""
        self.latch.zero_()

    def post(self, names: tuple[str, ...]) -> Ticket:
        """Sends numbers on the board towards the host; the ticket tells when they are there."""
        places = self._posted.get(names)
        if places is None:
            places = self._posted[names] = [(name, self._index[name]) for name in names]
        if not self._on_cuda:
            return Ticket(places, self._board.tolist())
        slot = self._spare.pop() if self._spare else _Slot()
        slot.memory.copy_(self._board, non_blocking=True)
        slot.event.record(self._current_stream())
        return Ticket(places, slot.numbers, slot, self._spare)

    def _current_stream(self) -> torch.cuda.Stream:
        """Returns the stream that work goes to; a new object for it takes longer than a kernel."""
        now = torch._C._cuda_getCurrentStream(self._board.device.index or 0)
        if self._stream is None or self._stream[0] != now:
            self._stream = (now, torch.cuda.current_stream(self._board.device))
        return self._stream[1]

    def _make_place(self, name: str) -> Tensor:
        index = len(self._index)
        if index == _ROOM:
            raise UsageError(
                f"there is no room for {name!r}: a guard follows {_ROOM} numbers at most.",
                where="guard.loss(...)",
                do="Give fewer loss terms names of their own; add up those that belong together.",
            )
        self._index[name] = index
        self._places[name] = self._board[index]
        return self._places[name]

    def _set_limits(self, limits: tuple[float, float]) -> None:
        if limits == self._known_limits:
            return
        for index, limit in enumerate(limits):
            if limit != self._known_limits[index]:
                # float64 knows larger numbers, but infinity has a meaning of its own here.
                self._limits[1 + index].fill_(limit if math.isinf(limit) else min(limit, _LARGEST))
        self._known_limits = limits


class _Slot:
    """Memory of the host that a board is copied to.

    Attributes:
        memory: The memory.
        numbers: The numbers in it, as they are when one looks.
        event: Happens when the copy is there.
    """

    def __init__(self) -> None:
        self.memory = torch.empty(_ROOM, dtype=torch.float32, pin_memory=True)
        self.numbers = (ctypes.c_float * _ROOM).from_address(self.memory.data_ptr())
        self.event = torch.cuda.Event()


class Ticket:
    """Numbers on their way from the device to the host."""

    def __init__(
        self,
        places: list[tuple[str, int]],
        numbers: Sequence[float] | ctypes.Array[ctypes.c_float],
        slot: _Slot | None = None,
        spare: list[_Slot] | None = None,
    ) -> None:
        self._places = places
        self._numbers = numbers
        self._slot = slot
        self._spare = spare
        self._values: dict[str, float] | None = None

    def read(self) -> dict[str, float]:
        """Returns the numbers by name; waits for the device if they are not there yet."""
        if self._values is None:
            if self._slot is not None:
                self._slot.event.synchronize()
            numbers = self._numbers
            self._values = {name: numbers[place] for name, place in self._places}
            if self._slot is not None and self._spare is not None:
                self._spare.append(self._slot)
        return self._values


_StepT = TypeVar("_StepT")
_NumbersT = TypeVar("_NumbersT")


class InFlight(deque[_StepT], Generic[_StepT, _NumbersT]):
    """Steps that were handed to the device and that the host has not seen yet, oldest first.

    ``Guard`` and ``nanguard run`` both keep them here and look at each one a fixed number of steps
    later. What the device has ignored since a bad one, each of them makes up for in its own way: a
    guard owns the loop, and gives the batches out again; ``run`` does not, and replays the steps.
    """

    def __init__(
        self,
        read: Callable[[_StepT], _NumbersT],
        passes: Callable[[_NumbersT], bool],
        accept: Callable[[_StepT, _NumbersT], None],
    ) -> None:
        """Begins with none.

        Args:
            read: Returns the numbers of a step; waits for them if they are not there yet.
            passes: Returns whether the numbers of a step are those of a good one.
            accept: Takes a good step, and its numbers.
        """
        super().__init__()
        self._read, self._passes, self._accept = read, passes, accept

    def settle(self, *, keep: int = 0) -> tuple[_StepT, _NumbersT] | None:
        """Accepts the oldest steps until few enough are left, or until one is bad.

        Args:
            keep: How many steps may stay unseen.

        Returns:
            The bad step, which stays the oldest, and its numbers; None if there is none.
        """
        while len(self) > keep:
            numbers = self._read(self[0])
            if not self._passes(numbers):
                return self[0], numbers
            self._accept(self.popleft(), numbers)
        return None
