"""Findings for other programs: JSON, SARIF 2.1.0, and annotations of a GitHub workflow."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from nanguard import __version__
from nanguard.findings import Severity
from nanguard.view.report.words import literal, place_in_words

if TYPE_CHECKING:
    from nanguard.check.outcome import Outcome, Seen
    from nanguard.findings import Finding

SCHEMA = "nanguard.report/1"
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_SARIF_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_GITHUB_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def as_json(outcome: Outcome) -> str:
    """Returns an outcome as JSON; fields are added over time, never renamed."""
    # Whatever a file holds, a reader gets ASCII: lone surrogates cannot be printed otherwise.
    return json.dumps(_fields(outcome), indent=1) + "\n"


def as_line(outcome: Outcome) -> str:
    """Returns the same in one line, without its end."""
    return json.dumps(_fields(outcome))


def _fields(outcome: Outcome) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "findings": [seen.to_json() for seen in outcome.seen],
        "checked": outcome.checked,
        "not_checked": [entry.to_json() for entry in outcome.not_checked],
        "alignment": outcome.alignment,
        "suppressed": outcome.suppressed,
    }
    if outcome.repairs:
        fields["repairs"] = [repair.to_json() for repair in outcome.repairs]
    if outcome.known or outcome.stale:
        fields["baseline"] = {"known": outcome.known, "stale": outcome.stale}
    return fields


def as_sarif(outcome: Outcome, pages: dict[str, str]) -> str:
    """Returns an outcome as a SARIF log.

    Args:
        outcome: What came of the check.
        pages: For the code of a rule, what it stands for, in a sentence.
    """
    findings = [seen.finding for seen in outcome.seen]
    rules = {finding.code: finding for finding in findings}
    order = {code: index for index, code in enumerate(sorted(rules))}
    run = {
        "tool": {
            "driver": {
                "name": "nanguard",
                "semanticVersion": __version__,
                "rules": [_rule(rules[code], pages.get(code, "")) for code in sorted(rules)],
            }
        },
        "columnKind": "unicodeCodePoints",
        "results": [_result(seen, order) for seen in outcome.seen],
        "invocations": [
            {
                "executionSuccessful": True,
                "toolExecutionNotifications": [
                    _notification(entry.path, entry.reason) for entry in outcome.not_checked
                ],
            }
        ],
    }
    log = {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=1) + "\n"


def _rule(finding: Finding, about: str) -> dict[str, Any]:
    text = about or finding.name.replace("-", " ")
    return {
        "id": finding.code,
        "name": finding.name,
        "shortDescription": {"text": text},
        "help": {"text": f"nanguard explain {finding.name}"},
        "defaultConfiguration": {"level": _SARIF_LEVELS[finding.severity]},
    }


def _result(seen: Seen, order: dict[str, int]) -> dict[str, Any]:
    finding = seen.finding
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": order[finding.code],
        "level": _SARIF_LEVELS[finding.severity],
        "message": {"text": _message(finding)},
        "locations": _locations(seen),
    }
    if finding.path:
        about = " ".join((seen.text or finding.where or "").split())[:200]
        stable = f"{finding.name}:{finding.path}:{about}"
        result["partialFingerprints"] = {"nanguard/v1": stable}
    if finding.step is not None:
        result["properties"] = {"step": finding.step}
    return result


def _message(finding: Finding) -> str:
    words = place_in_words(finding)
    where = f" [{words}]" if words else ""
    fixes = "".join(f"\nFix: {fix.title}" for fix in finding.fixes[:3])
    return f"{finding.message}{where}{fixes}"


def _locations(seen: Seen) -> list[dict[str, Any]]:
    finding = seen.finding
    if not finding.path:
        return []
    place: dict[str, Any] = {"artifactLocation": {"uri": _uri(finding.path)}}
    if finding.line is not None:
        region: dict[str, Any] = {"startLine": max(1, finding.line)}
        if finding.column is not None:
            region["startColumn"] = max(1, finding.column)
        if seen.text:
            region["snippet"] = {"text": seen.text}
        place["region"] = region
    location: dict[str, Any] = {"physicalLocation": place}
    if finding.where and finding.line is None:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.where}]
    return [location]


def _notification(path: str, reason: str) -> dict[str, Any]:
    place = {"physicalLocation": {"artifactLocation": {"uri": _uri(path)}}}
    return {
        "level": "note",
        "message": {"text": f"not checked: {path}: {reason}"},
        "locations": [place],
    }


def _uri(path: str) -> str:
    """Returns a path as SARIF wants it: relative where it is, and escaped."""
    if "://" in path:
        scheme, _, rest = path.partition("://")
        return f"{scheme}://{quote(rest)}"
    slashed = path.replace(os.sep, "/")
    escaped = quote(slashed.encode("utf-8", "surrogateescape"))
    return f"file://{escaped}" if slashed.startswith("/") else escaped


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
        lines.append(_command(_GITHUB_LEVELS[finding.severity], place, message))
    for entry in outcome.not_checked:
        place = {"file": entry.path, "line": None, "title": "not checked"}
        lines.append(_command("notice", place, entry.reason))
    return "".join(f"{line}\n" for line in lines)


def _command(level: str, place: dict[str, str | int | None], message: str) -> str:
    properties = ",".join(
        f"{key}={_value(value)}" for key, value in place.items() if value is not None
    )
    lines = [_text(literal(line, 1000)) for line in message.split("\n")]
    return f"::{level} {properties}::{'%0A'.join(lines)}"


def _text(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _value(value: str | int) -> str:
    shown = literal(str(value), 1000)
    return _text(shown).replace(":", "%3A").replace(",", "%2C")
