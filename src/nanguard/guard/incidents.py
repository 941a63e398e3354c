"""What a bad step turns out to be, once the host looks at it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanguard.guard import events
from nanguard.guard.models import trained
from nanguard.guard.optimizers import state_tensors
from nanguard.guard.symptom import Symptom
from nanguard.numerics import all_finite

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from nanguard.findings import Finding
    from nanguard.guard.flight import Flight
    from nanguard.guard.judge import Reading
    from nanguard.guard.parts import Parts
    from nanguard.guard.ranks import Ranks
    from nanguard.snapshots.manager import Recovery


@dataclass(frozen=True, slots=True)
class Incident:
    """A bad step.

    Attributes:
        finding: What was wrong with it, on the rank where it began.
        poisoned: Whether parameters, buffers or optimizer state are non-finite, on any rank.
        can_roll_back: Whether there is a good snapshot, on all ranks.
        symptom: What was seen of it, here.
        reports: Whether this rank tells about it.
        alone: Whether this rank is known to be the one at fault.
    """

    finding: Finding
    poisoned: bool
    can_roll_back: bool
    symptom: Symptom
    reports: bool = True
    alone: bool = True


def examine(flight: Flight, reading: Reading, parts: Parts, recovery: Recovery) -> Incident:
    """Looks at a bad step with all the time in the world; all ranks look together.

    Args:
        flight: The step.
        reading: Its numbers.
        parts: The run.
        recovery: Its snapshots.
    """
    ranks = parts.ranks
    seen = _as_seen_here(reading, flight, ranks)
    symptom = Symptom.of(seen, flight.limits)
    mine = symptom.finding(flight.step)
    if flight.suspects and mine.name == events.NON_FINITE_GRADIENT.name:
        symptom.names = list(flight.suspects)
        mine = replace(mine, where=f"gradient of {listed(flight.suspects)}")
    poison = poison_in(parts, recovery.finite_buffers())
    if poison is not None:
        # Seen by a scan after this step, or by its loss: then the step before left it so.
        after = flight.step if reading.poisoned else flight.step - 1
        message = f"not finite after step {after}: {poison}"
        if after < 0:
            message = f"not finite since the first forward pass: {poison}"
        mine = events.NON_FINITE_PARAMETER(message, step=max(after, 0), where=poison)
        symptom.where, symptom.kind, symptom.names = _owner_of(poison), "nan", [poison]
    began_here = not (math.isfinite(reading.loss) and reading.loss <= flight.limits.loss.act)
    poisoned = reading.poisoned or poison is not None
    told = ranks.gather((began_here, Incident(mine, poisoned, recovery.can_roll_back, symptom)))
    incidents = [incident for _, incident in told]
    first = next((rank for rank, (here, _) in enumerate(told) if here), None)
    finding = incidents[first or 0].finding
    if ranks.world > 1 and first is not None:
        finding = replace(finding, rank=first, message=f"rank {first}: {finding.message}")
    # A gradient that is bad by itself was reduced over the ranks, so that it may be anyone's.
    anyone = first is None and symptom.where == "gradient" and symptom.kind != "spike"
    return Incident(
        finding,
        poisoned=any(incident.poisoned for incident in incidents),
        can_roll_back=all(incident.can_roll_back for incident in incidents),
        symptom=symptom,
        reports=ranks.world == 1 or anyone or ranks.rank == (first or 0),
        alone=ranks.world == 1 or not anyone,
    )


def _owner_of(poison: str) -> str:
    """Returns what kind of state is not finite."""
    words = poison.split()[:4]
    if "buffer" in words:
        return "buffer"
    return "optimizer state" if "optimizer" in words else "parameter"


def _as_seen_here(reading: Reading, flight: Flight, ranks: Ranks) -> Reading:
    """Returns a reading without the NaN that this rank itself sent through its gradient."""
    spiked = math.isfinite(reading.loss) and not reading.loss <= flight.limits.loss.act
    if ranks.channel == "gradient" and spiked:
        return replace(reading, grad_norm=0.0)
    return reading


def poison_in(parts: Parts, buffers: Mapping[str, Tensor]) -> str | None:
    """Returns what is non-finite in the run itself, in words; None if nothing is."""
    for word, tensors in (
        ("parameter", trained(parts.models, parts.optimizers)),
        ("buffer", buffers),
    ):
        if not all_finite(tensors.values()):
            bad = [name for name, tensor in tensors.items() if not all_finite([tensor])]
            return f"{word} {listed(bad)}"
    if not all_finite(state_tensors(parts.optimizers)):
        return "state of the optimizer"
    return None


def listed(names: Sequence[str]) -> str:
    """Returns a few names, and how many more there are."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
