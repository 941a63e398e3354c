"""Labelled data: every fault is found, and nothing else is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.labelled import judged, labelled

FOLDER = Path(__file__).parents[3] / "data_cases"


@pytest.mark.parametrize("case", labelled(FOLDER), ids=lambda case: case["path"])
def test_a_labelled_data_set(case: dict, tmp_path: Path):
    assert judged(FOLDER, case, tmp_path) == ([], [])
