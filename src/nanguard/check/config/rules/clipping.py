"""What gradients are clipped at once the faults of a run are repaired."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.check.config.run import Stage

LARGE = 1e3  # from here on nothing is clipped


def clip_after(stage: Stage) -> float:
    """Returns the smallest norm that is set and clips anything; 1.0 if there is none."""
    values = [setting.number for setting in stage.all("clip_norm")]
    return min((value for value in values if value is not None and 0 < value < LARGE), default=1.0)
