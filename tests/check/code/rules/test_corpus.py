"""Labelled training code: every fault in it is found, and nothing else is said."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from nanguard.check.code.code import Code
from nanguard.check.rule import rules_for
from nanguard.source.text import Text

LINT = Path(__file__).parents[3] / "lint"
FILES = json.loads((LINT / "labels.json").read_text(encoding="utf-8"))["files"]


def found(path: Path) -> list[tuple[str, int]]:
    code = Code.parse(Text(path.name, path.read_text(encoding="utf-8")))
    return [
        (finding.name, finding.line) for rule in rules_for("code") for finding in rule.check(code)
    ]


def lines_of_statements(text: str) -> dict[int, set[int]]:
    """Returns, for each line, the lines of the smallest statement around it."""
    around: dict[int, set[int]] = {}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.stmt):
            continue
        inner = getattr(node, "body", None)
        block = isinstance(inner, list) and inner
        last = max(node.lineno, inner[0].lineno - 1) if block else node.end_lineno
        span = set(range(node.lineno, last + 1))
        for line in span:
            if line not in around or len(span) < len(around[line]):
                around[line] = span
    return around


def places(label: dict, statements: dict[int, set[int]]) -> set[int]:
    lines = statements.get(label["line"], set()) | {label["line"], *label.get("also", ())}
    return lines | {line + 1 for line in lines} | {line - 1 for line in lines}


@pytest.mark.parametrize("entry", FILES, ids=lambda entry: entry["file"])
def test_a_labelled_file(entry: dict):
    path = LINT / entry["file"]
    statements = lines_of_statements(path.read_text(encoding="utf-8"))
    seen = found(path)
    missed = [
        label
        for label in entry["expected"]
        if not any(n == label["rule"] and li in places(label, statements) for n, li in seen)
    ]
    allowed = [*entry["expected"], *entry["tolerated"]]
    false = [
        (name, line)
        for name, line in seen
        if not any(name == a["rule"] and line in places(a, statements) for a in allowed)
    ]
    assert (missed, false) == ([], [])
