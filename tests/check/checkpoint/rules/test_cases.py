"""Every case: all that is expected is found, nothing else is, and nothing in it is run."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import pytest

from nanguard.check.checkpoint.checkpoint_reader import open_sources, recognises, recognises_folder
from nanguard.check.rule import rules_for
from nanguard.check.scan import Scan
from tests.check.checkpoint.rules.cases import CASES, Case

if TYPE_CHECKING:
    from pathlib import Path


def found_in(folder: Path) -> list:
    """Returns what rules say about a folder, whether or not it is recognised as a whole."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    paths = [path for path in paths if recognises(path, path.read_bytes()[: 1 << 16])]
    whole = [path for path in folder.iterdir() if path.is_dir() and recognises_folder(path)]
    inside = [path for path in paths if not any(top in path.parents for top in whole)]
    sources = list(open_sources([*whole, *inside], Scan()))
    again = list(open_sources(paths, Scan()))
    assert [one.path for one in sources] == [one.path for one in again]
    assert all(not one.not_read for one in sources)
    return [f for one in sources for rule in rules_for("checkpoint") for f in rule.check(one)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    marker = tmp_path / "marker"
    monkeypatch.setenv("NANGUARD_MARKER", str(marker))
    folder = tmp_path / "files"
    folder.mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case.write(folder)
    findings = found_in(folder)
    names = {finding.name for finding in findings}
    said = [f"{finding.name}: {finding.message}" for finding in findings]
    assert set(case.expected) <= names, said
    assert names <= {*case.expected, *case.tolerated}, said
    assert not marker.exists()
    if case.step is not None:
        steps = [finding.step for finding in findings if finding.name == "last-good-checkpoint"]
        assert steps == [case.step]


def test_there_is_a_case_for_every_rule():
    assert {rule.name for rule in rules_for("checkpoint")} == {
        name for case in CASES for name in case.expected
    }
