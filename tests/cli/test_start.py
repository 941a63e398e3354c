"""What a command imports before it answers: its own parts, and nothing that is heavy."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

HEAVY = {
    "lightning", "markdown_it", "matplotlib", "numpy", "polars", "pydantic", "pygments", "rich",
    "starlette", "torch", "transformers", "typer", "yaml",
}  # fmt: skip
# The parts that serve one command, or a few.
PARTS = {
    "advice", "demo", "diagnose", "integrations", "loader", "ops", "replay", "run", "snapshots",
    "trackers", "view.report", "view.server", "view.terminal",
}  # fmt: skip

IMPORTED = """
import atexit, sys
before = set(sys.modules)
def tell():
    names = [name.split(".") for name in set(sys.modules) - before]
    own = [name[1:] for name in names if name[0] == "nanguard"]
    own = [name[:2] if name[:1] == ["view"] else name[:1] for name in own]
    found = {".".join(name) for name in own} | {name[0] for name in names}
    sys.stderr.write("\\nimported: " + " ".join(sorted(found)))
atexit.register(tell)
from nanguard.cli import main
main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("start")
    (place / "train.py").write_text("x = 1\n")
    (place / "c.yaml").write_text("learning_rate: 0.1\n")
    (place / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n')
    return place


@pytest.mark.parametrize(
    ("words", "may"),
    [
        ("--help", set()),
        ("--version", set()),
        ("check --help", set()),
        ("run --help", set()),
        ("check train.py", {"view.report"}),
        ("check c.yaml", {"view.report", "yaml"}),
        ("check log.jsonl", {"view.report"}),
        ("rules CFG", set()),
        ("preset", {"advice"}),
        ("report log.jsonl", {"view.report"}),
        ("watch log.jsonl --once", {"rich", "view.report", "view.terminal"}),
        ("run --quiet -- true", {"diagnose", "run", "trackers", "view.report"}),
    ],
)
def test_a_command_imports_its_own_parts(folder: Path, words: str, may: set[str]):
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *words.split()],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    imported = set(done.stderr.rpartition("imported: ")[2].split())
    assert "cli" in imported
    assert imported & (HEAVY | PARTS) <= may
