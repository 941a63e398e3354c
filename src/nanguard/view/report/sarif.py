"""Findings as SARIF 2.1.0, which code hosts and editors read."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from nanguard import __version__
from nanguard.findings import Severity
from nanguard.view.report.fields import place_in_words

if TYPE_CHECKING:
    from nanguard.check.outcome import Outcome, Seen
    from nanguard.findings import Finding

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


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
    log = {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=1) + "\n"


def _rule(finding: Finding, about: str) -> dict[str, Any]:
    text = about or finding.name.replace("-", " ")
    return {
        "id": finding.code,
        "name": finding.name,
        "shortDescription": {"text": text},
        "help": {"text": f"nanguard explain {finding.name}"},
        "defaultConfiguration": {"level": _LEVELS[finding.severity]},
    }


def _result(seen: Seen, order: dict[str, int]) -> dict[str, Any]:
    finding = seen.finding
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": order[finding.code],
        "level": _LEVELS[finding.severity],
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
