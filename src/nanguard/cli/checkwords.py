"""What the command line of ``nanguard check`` says, read without a library."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanguard.cli.checking import Asked

FLAGS = {
    "--fix": "fix",
    "--unsafe": "unsafe",
    "--diff": "diff",
    "--quiet": "quiet",
    "--no-cache": "no_cache",
    "--checklist": "checklist",
    "--watch": "watch",
    "--statistics": "statistics",
    "--verbose": "verbose",
    "-v": "verbose",
}
VALUES = {
    "--format": "form",
    "--select": "select",
    "--extend-select": "extend",
    "--ignore": "ignore",
    "--fail-on": "fail_on",
    "--baseline": "baseline",
    "--write-baseline": "write_baseline",
    "--output": "output",
    "-o": "output",
    "--jobs": "jobs",
    "--label-key": "label_key",
    "--classes": "classes",
    "--group": "group",
    "--vocab": "vocab",
    "--ignore-label": "ignore_label",
    "--engine": "engine",
}
HERE = "."  # what is meant where no path is named
FORMATS = ("text", "full", "concise", "json", "sarif", "github")
FAIL_ON = ("error", "warning", "info", "none")
ENGINES = ("local", "ray")
_CHOICES = {"form": FORMATS, "fail_on": FAIL_ON, "engine": ENGINES}
_FILES = ("baseline", "write_baseline", "output")
_LEAST = {"jobs": 0, "classes": 1, "vocab": 1}


def asked_by(words: list[str]) -> Asked | None:
    """Returns what is asked; None if any word is not plain, and help or an error is in order."""
    paths: list[str] = []
    told: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        if word in FLAGS:
            told[FLAGS[word]] = True
        elif word == "-" or not word.startswith("-"):
            paths.append(word)
        else:
            name, given, value = word.partition("=")
            if name not in VALUES or (name == "-o" and given):
                return None
            if not _take(told, VALUES[name], value if given else next(rest, "")):
                return None
    from nanguard.cli.checking import Asked

    return Asked(tuple(paths) or (HERE,), **told)


def split(given: str) -> tuple[str, ...]:
    """Returns the words of a list with commas."""
    return tuple(word.strip() for word in given.split(",") if word.strip())


def _take(told: dict[str, Any], field: str, value: str) -> bool:
    """Adds the value of an option; returns whether it is one."""
    if field in ("select", "extend", "ignore"):
        told[field] = (*told.get(field, ()), *split(value))
        return bool(value)
    if field == "group":
        told[field] = (*told.get(field, ()), value)
        return bool(value)
    if field in _FILES:
        told[field] = Path(value)
        return bool(value)
    if field in _LEAST:
        told[field] = int(value) if value.isdecimal() else 0
        return value.isdecimal() and told[field] >= _LEAST[field]
    if field == "ignore_label":
        whole = value.removeprefix("-").isdecimal()
        told[field] = (*told.get(field, ()), int(value) if whole else 0)
        return whole
    told[field] = value
    return value in _CHOICES[field] if field in _CHOICES else bool(value)
