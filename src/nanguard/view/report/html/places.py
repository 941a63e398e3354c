"""Anchors within the page, and how steps are written."""

from __future__ import annotations


def incident_id(run: int, incident: int) -> str:
    """Returns the anchor of an incident."""
    return f"incident-{run}-{incident}"


def step_words(step: float | None) -> str:
    """Returns a step as it is shown: 12 345."""
    if step is None:
        return "unknown"
    if float(step).is_integer():
        return f"{step:,.0f}".replace(",", "\u202f")
    return f"{step:g}"
