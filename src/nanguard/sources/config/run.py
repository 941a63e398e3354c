"""Runs as their configuration files describe them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.sources.config.document import Document


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One run, read from one file or from several that belong together.

    Attributes:
        documents: The files it was read from, the run's own first.
    """

    documents: tuple[Document, ...]


def read_project(documents: Sequence[Document]) -> list[RunConfig]:
    """Returns the runs that files given together describe."""
    return [RunConfig((document,)) for document in documents]
