"""Which values of a data set are worth noting the places of, given what is expected of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.check.data.labels import Label
    from nanguard.check.scanning import Expected


@dataclass
class Watch:
    """What a scan looks out for.

    Attributes:
        expected: What data is checked against.
        measured: Whether labels are measurements, not classes.
    """

    expected: Expected
    measured: bool = False

    @cached_property
    def ignored(self) -> frozenset[int]:
        """Labels that are meant to be skipped."""
        return frozenset(self.expected.ignored)

    def classes(self, group: str | None) -> int | None:
        """Returns how many classes labels of a data set have; None if that is not known."""
        if group is not None and group in self.expected.groups:
            return self.expected.groups[group]
        return self.expected.classes

    def suspects(self, label: Label) -> bool:
        """Returns whether the places of a label are worth noting beyond the first."""
        if self.measured or label.kind in ("text", "bool"):
            return False
        value = float(label.value)
        if label.value in self.ignored:
            return False
        known = self.classes(label.group)
        return value < 0 or not value.is_integer() or (known is not None and value >= known)
