"""Findings as annotations of a GitHub workflow: one command a line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.findings import Severity
from nanguard.view.report.fields import literal, place_in_words

if TYPE_CHECKING:
    from nanguard.check.outcome import Outcome

_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def as_github(outcome: Outcome) -> str:
    """Returns the annotations, and a notice for each file that was not checked."""
    lines = []
    for seen in outcome.seen:
        finding = seen.finding
        place = {
            "file": finding.path,
            "line": finding.line,
            "col": finding.column,
            "title": f"{finding.name} ({finding.code})",
        }
        where = place_in_words(finding)
        message = f"{finding.message} ({where})" if where else finding.message
        if finding.fixes:
            message += f"\nFix: {finding.fixes[0].title}"
        lines.append(_command(_LEVELS[finding.severity], place, message))
    for entry in outcome.not_checked:
        place = {"file": entry.path, "line": None, "title": "not checked"}
        lines.append(_command("notice", place, entry.reason))
    return "".join(f"{line}\n" for line in lines)


def _command(level: str, place: dict[str, str | int | None], message: str) -> str:
    told = ",".join(f"{key}={_value(value)}" for key, value in place.items() if value is not None)
    lines = [_text(literal(line, 1000)) for line in message.split("\n")]
    return f"::{level} {told}::{'%0A'.join(lines)}"


def _text(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _value(value: str | int) -> str:
    shown = literal(str(value), 1000)
    return _text(shown).replace(":", "%3A").replace(",", "%2C")
