"""The drawing of the packages shows the imports there are; files are few, and none is too long."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# More files cannot be held in the head, and a longer one holds more than one idea.
MOST_FILES, MOST_LINES = 352, 600


@pytest.fixture
def drawn():
    spec = importlib.util.spec_from_file_location(
        "package_drawing", ROOT / "docs" / "package_drawing.py"
    )
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None
    spec.loader.exec_module(module)
    return module


def test_the_drawing_is_current(drawn):
    text = drawn.PAGE.read_text(encoding="utf-8")
    assert text == drawn.page(), "run make docs-packages"


def test_the_drawing_has_every_package_and_only_imports_that_run(drawn, tmp_path):
    names = {path.parent.name for path in drawn.SOURCE.glob("*/__init__.py")} - {"view"}
    text = drawn.drawing()
    assert names | {"view.report", "incident"} <= {line.split()[0] for line in text.splitlines()}
    module = tmp_path / "module.py"
    module.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from nanguard.guard import Guard\n"
        "else:\n    from nanguard import record\n"
        "def later():\n    import nanguard.check.engine\n"
    )
    assert drawn.imports_in(module) == {"nanguard.record", "nanguard.check.engine"}


def test_files_are_few_and_none_is_too_long():
    lines = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8").count("\n")
        for path in (ROOT / "src" / "nanguard").rglob("*.py")
    }
    assert len(lines) <= MOST_FILES
    assert {path: count for path, count in lines.items() if count > MOST_LINES} == {}
