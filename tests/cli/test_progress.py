"""The bar of a long scan: on a terminal only, in bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = "import nanguard.cli.progress as p; p._AFTER = 0\nfrom nanguard.cli import main; main()"
RECORDS = '{"text": "some words", "label": 3}\n' * 500_000


def shown(folder: Path, *words: str, terminal: bool) -> str:
    """Returns what a scan writes to standard error."""
    command = [sys.executable, "-c", PROGRAM, "check", "a.jsonl", "--fail-on", "none", *words]
    if not terminal:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        return done.stderr
    pty = pytest.importorskip("pty", reason="no terminals here")
    parent, child = pty.openpty()
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=child)
    os.close(child)
    told = b""
    try:
        while piece := os.read(parent, 1 << 16):
            told += piece
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(parent)
    assert process.wait(timeout=60) == 0
    return told.decode()


def test_bytes_are_shown_on_a_terminal_and_nowhere_else(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(RECORDS)
    told = shown(tmp_path, terminal=True)
    assert "scanning" in told
    assert "/17.5 MB" in told
    assert shown(tmp_path, "--quiet", terminal=True) == ""
    assert shown(tmp_path, terminal=False) == ""
