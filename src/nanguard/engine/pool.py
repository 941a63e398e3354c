"""Many files at once: in this process if they are few, in several if they are many."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.engine.files import check_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nanguard.engine.check import Plan
    from nanguard.engine.outcome import FileOutcome
    from nanguard.sources.kinds import FileKind


def check_files(files: Sequence[tuple[str, FileKind]], plan: Plan) -> Iterator[FileOutcome]:
    """Yields what came of each file."""
    for path, kind in files:
        yield check_path(path, kind, plan.selection)
