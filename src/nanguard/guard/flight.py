"""One step on its way: from its first batch until the host knows how it went."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.guard.judge import Reading, StepLimits

if TYPE_CHECKING:
    from torch import Tensor

    from nanguard.guard.feed import Drawn
    from nanguard.guard.gate import Gate, Ticket
    from nanguard.guard.unchanged import Mark
    from nanguard.snapshots.memory import Snapshot


@dataclass(slots=True)
class Flight:
    """One step, from its first batch until the host knows how it went.

    Attributes:
        step: Its number among all steps that were tried.
        update: How many updates came before it.
        epoch: The pass over the data that it began in.
        began: The random streams at the start of that pass; None outside of a watched loop.
        mark: How the host's side of the run was before it.
        batches: The batches that were given out for it.
        written: The numbers about it that are on the gate's board: the loss and its terms.
        backwards: How often backward was called.
        seen_backwards: How often it had been called when the last batch was given out.
        lane: Which optimizers it steps: the index of one, or -1 for all of them.
        limits: What its loss and gradient norm are held to.
        lr: Its learning rate.
        lr_factor: What the scheduled learning rate is multiplied with.
        tickets: Its numbers, on their way to the host.
        suspects: The parameters whose gradients the host saw to be bad.
        searched: Whether an optimizer evaluated the loss by itself, several times.
        passed: Whether it is a good step that a replay goes past without making it.
        snapshot: A snapshot taken after it, good only if the step is.
    """

    step: int
    update: int
    epoch: int
    began: dict[str, Any] | None
    mark: Mark
    batches: list[Drawn] = field(default_factory=list)
    written: dict[str, None] = field(default_factory=dict)
    backwards: int = 0
    seen_backwards: int = 0
    lane: int = -1
    limits: StepLimits = field(default_factory=StepLimits)
    lr: float | None = None
    lr_factor: float = 1.0
    tickets: list[Ticket] = field(default_factory=list)
    suspects: list[str] = field(default_factory=list)
    searched: bool = False
    passed: bool = False
    snapshot: Snapshot | None = None

    @property
    def begun(self) -> bool:
        """Whether anything belongs to it yet."""
        return bool(self.batches or self.written)

    @property
    def passed_over(self) -> bool:
        """Whether its last batch came and went without a backward pass."""
        return bool(self.batches) and self.backwards == self.seen_backwards

    def sum(self, gate: Gate, name: str, value: Tensor) -> None:
        """Adds to one of its numbers, on the gate's board."""
        if name in self.written:
            gate.add(name, value)
        else:
            self.written[name] = None
            gate.write(name, value)

    def read(self) -> Reading:
        """Returns its numbers; waits for the device if they are not there yet."""
        values: dict[str, float] = {}
        for ticket in self.tickets:
            values.update(ticket.read())
        return Reading.of(values)
