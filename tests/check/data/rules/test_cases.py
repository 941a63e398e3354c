"""Every small data set, against every rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nanguard.check.config.document import read_document
from nanguard.check.config.run_config import read_project
from nanguard.check.data.data_reader import from_config, open_sources, recognises
from nanguard.check.rule import rules_for
from nanguard.check.scan import Scan
from nanguard.source.text import Text
from tests.check.data.rules.cases import CASES

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", CASES)
def test_what_is_said(name: str, tmp_path: Path):
    CASES[name].write(tmp_path)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    texts = [Text(str(path), path.read_text()) for path in files if path.suffix == ".yaml"]
    runs = read_project([read_document(text) for text in texts])
    data = [path for path in files if recognises(path, path.read_bytes()[: 1 << 16])]
    sources = open_sources(data, Scan(), [request for run in runs for request in from_config(run)])
    found = [
        finding
        for source in sources
        for rule in rules_for("data")
        for finding in rule.check(source)
    ]
    assert [(f.name, f.line) for f in found] == [*CASES[name].expected] or _same(
        found, CASES[name].expected
    ), [f.message for f in found]


def _same(found: list, expected: tuple) -> bool:
    """Binary files have no line to compare; glitches in text may name one."""
    if len(found) != len(expected):
        return False
    return all(
        f.name == name and (line is None or f.line == line)
        for f, (name, line) in zip(found, expected, strict=True)
    )
