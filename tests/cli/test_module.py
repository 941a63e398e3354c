"""``python -m nanguard``: nothing in the folder that is looked at is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import nanguard

# Modules of Python and of others that nanguard imports, sooner or later.
NAMES = (
    "token",
    "inspect",
    "dataclasses",
    "re",
    "json",
    "pickle",
    "select",
    "yaml",
    "polars",
    "numpy",
)
TRAP = "from pathlib import Path\nPath(__file__).with_suffix('.ran').touch()\n"


@pytest.mark.parametrize("word", ["nanguard", "-mnanguard"])
def test_modules_of_the_current_folder_are_not_imported(tmp_path: Path, word: str):
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(TRAP)
    (tmp_path / "config.yaml").write_text("learning_rate: 0.001\nbatch_size: 8\n")
    (tmp_path / "train.csv").write_text("x,label\n1.5,0\n2.5,1\n")
    done = run(tmp_path, *(["-m", word] if word == "nanguard" else [word]))
    assert done.returncode == 0, done.stderr
    assert "2 files" in done.stdout
    assert not list(tmp_path.glob("*.ran"))


def test_a_folder_that_was_asked_for_is_kept(tmp_path: Path):
    (tmp_path / "beside.py").write_text(TRAP)
    (tmp_path / "mine.py").write_text("import nanguard, beside\n")
    done = run(tmp_path, "-m", "mine")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "beside.ran").exists()


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a folder, with a check of two files in it."""
    return subprocess.run(
        [sys.executable, *words, "check", "config.yaml", "train.csv"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(Path(nanguard.__file__).parents[1])},
    )
