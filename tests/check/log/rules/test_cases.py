"""Every log of the cases: what is wrong is found at its place, and nothing else is said."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nanguard.check.log.log_reader import open_sources, recognises
from nanguard.check.rule import rules_for
from nanguard.check.scan import Scan
from tests.check.log.rules.cases import CASES, Case

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_wrong_is_found_and_nothing_else(case: Case, tmp_path: Path):
    file = tmp_path / case.file
    file.write_text(case.text, encoding="utf-8", newline="")
    assert recognises(file, file.read_bytes()[: 1 << 16])
    (log,) = open_sources([file], Scan())
    assert log.problem is None
    found = [finding for rule in rules_for("log") for finding in rule.check(log)]
    for rule, line, step in case.expected:
        places = [(f.line, f.step) for f in found if f.name == rule]
        assert places, f"{rule} is silent"
        assert any(line in (None, a) and step in (None, b) for a, b in places), (rule, places)
    wanted = {rule for rule, _, _ in case.expected} | case.tolerated
    assert [f for f in found if f.name not in wanted] == []
