"""What is known about a run beside its numbers: configuration, environment, findings."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from nanguard.errors import SourceError
from nanguard.masking import HIDDEN, hidden, hidden_words
from nanguard.source.files import decode, read_bytes
from nanguard.check.log.records import loads

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

_LARGEST_CONFIG = 128 << 10
_LARGEST_REPORT = 64 << 20
_MOST_FINDINGS = 2000


def configuration_of(paths: Sequence[Path]) -> dict[str, str]:
    """Returns the texts of configurations by file name; what looks like a secret is hidden."""
    out = {}
    for path in paths:
        try:
            data = read_bytes(str(path), _LARGEST_CONFIG)
            content = decode(str(path), data, python=False).content
        except SourceError as error:
            out[path.name] = f"# not shown: {error.what}"
            continue
        out[path.name] = hidden(content)
    return out


def environment_of(incidents: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Returns versions, machine and command, as the first incident recorded them."""
    out: dict[str, str] = {}
    for incident in incidents[:1]:
        run = incident.get("run")
        if not isinstance(run, dict):
            continue
        command = run.get("command")
        if isinstance(command, list) and command:
            words = hidden_words(list(map(str, command[:100])))
            out["command"] = " ".join(w if HIDDEN in w else shlex.quote(w) for w in words)
        for key in ("folder", "python", "torch", "nanguard", "platform", "device", "ranks"):
            if isinstance(run.get(key), (str, int)):
                out[key] = str(run[key])
        out |= _optimizer(incident.get("optimizer"))
        if isinstance(incident.get("autocast"), str):
            out["autocast"] = incident["autocast"]
    return out


def findings_of(path: Path) -> list[dict[str, Any]]:
    """Returns the findings in the JSON of ``nanguard check``.

    Raises:
        SourceError: It is none.
    """
    report = loads(read_bytes(str(path), _LARGEST_REPORT).decode("utf-8", "replace"))
    findings = report.get("findings") if isinstance(report, dict) else None
    if not isinstance(findings, list):
        raise SourceError(
            "it is no whole report of nanguard check.",
            where=str(path),
            do="Write it again: nanguard check --format json -o report.json",
        )
    return [finding for finding in findings[:_MOST_FINDINGS] if isinstance(finding, dict)]


def _optimizer(fields: Any) -> dict[str, str]:
    if not isinstance(fields, dict) or not isinstance(fields.get("name"), str):
        return {}
    rest = [f"{key} {fields[key]:g}" for key in ("lr", "eps") if _is_number(fields.get(key))]
    return {"optimizer": ", ".join([fields["name"], *rest])}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
