"""What small parameters were in the steps before: a quantity that drifts shows it long before.

A learned log-variance, a temperature or a scale moves a little in each step, and the step in which
it ends a run is hundreds of steps after the one in which it began to move. Its curve is kept here,
with few points, for tensors that are small enough to be looked at now and then.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from nanguard.replay.task import Curve

# Elements of a tensor, and tensors, that are looked at: scales, temperatures and biases are small.
_SMALL, _MOST_TENSORS = 1 << 12, 64
# Points of a curve that are kept; beyond that every other one goes.
_MOST_POINTS = 128


class Curves:
    """The element farthest from zero of each small parameter, over the steps of a run."""

    def __init__(self) -> None:
        self._points: dict[str, list[tuple[int, float]]] = {}
        self._every = 1
        self._looks = 0

    def look(self, step: int, named: Mapping[str, Tensor], *, last: bool = False) -> None:
        """Adds a point to each curve, unless there are many already.

        Args:
            step: How many steps were made.
            named: The parameters by their names; those on a device are left alone.
            last: Whether this is the end of the curves, which is always of interest.
        """
        self._looks += 1
        if self._looks % self._every and not last:
            return
        small = [(n, p) for n, p in named.items() if 0 < p.numel() <= _SMALL]
        for name, parameter in small[:_MOST_TENSORS]:
            plain = type(parameter) in (torch.Tensor, nn.Parameter)
            if not plain or parameter.device.type != "cpu" or not parameter.is_floating_point():
                continue
            # Some types know no smallest element: theirs has no curve.
            with contextlib.suppress(RuntimeError, NotImplementedError):
                low, high = (float(end) for end in parameter.detach().aminmax())
                value = low if abs(low) > abs(high) else high
                if math.isfinite(value):
                    self._points.setdefault(name, []).append((step, value))
        if max(map(len, self._points.values()), default=0) > _MOST_POINTS:
            self._every *= 2
            self._points = {name: points[::2] for name, points in self._points.items()}

    def all(self) -> dict[str, Curve]:
        """Returns the curves by the names of their parameters."""
        return {name: list(points) for name, points in self._points.items()}
