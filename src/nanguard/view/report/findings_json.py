"""Findings as one JSON object, for other programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanguard.check.outcome import Outcome

SCHEMA = "nanguard.report/1"


def as_json(outcome: Outcome) -> str:
    """Returns an outcome as JSON; fields are added over time, never renamed."""
    # Whatever a file holds, a reader gets ASCII: lone surrogates cannot be printed otherwise.
    return json.dumps(_told(outcome), indent=1) + "\n"


def as_line(outcome: Outcome) -> str:
    """Returns the same in one line, without its end."""
    return json.dumps(_told(outcome))


def _told(outcome: Outcome) -> dict[str, Any]:
    told: dict[str, Any] = {
        "schema": SCHEMA,
        "findings": [seen.to_json() for seen in outcome.seen],
        "checked": outcome.checked,
        "not_checked": [entry.to_json() for entry in outcome.not_checked],
        "alignment": outcome.alignment,
        "suppressed": outcome.suppressed,
    }
    if outcome.repairs:
        told["repairs"] = [repair.to_json() for repair in outcome.repairs]
    if outcome.known or outcome.stale:
        told["baseline"] = {"known": outcome.known, "stale": outcome.stale}
    return told
