"""Labelled checkpoints: every fault is found, and nothing else is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.labelled import judged, labelled

FOLDER = Path(__file__).parents[3] / "checkpoints"


@pytest.mark.parametrize("case", labelled(FOLDER), ids=lambda case: case["path"])
def test_a_labelled_checkpoint(case: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHECKS_SCRATCH", str(tmp_path))
    assert judged(FOLDER, case, tmp_path) == ([], [])
    # What the pickles here would run leaves a file with this name.
    assert not list(tmp_path.rglob("PWNED_MARKER"))
