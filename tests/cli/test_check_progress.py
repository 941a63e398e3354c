"""The bar of a long scan on a terminal, in bytes; lines in a pipe, if it takes long."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from nanguard.cli import checking

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = "import nanguard.cli.checking as p; p._AFTER = 0\nfrom nanguard.cli import main; main()"
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


def test_a_check_that_takes_long_gives_a_sign_of_life_in_a_pipe(capfd, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(checking.time, "monotonic", lambda: now[0])
    with checking.Progress(quiet=False) as told, checking.Progress(quiet=True) as quiet:
        for done in range(0, 100, 5):
            now[0] = float(done)
            told(done, 100)
            quiet(done, 100)
        now[0] = 200.0
        told.scanned(30_000_000, 90_000_000)
    assert capfd.readouterr().err.splitlines() == [
        "nanguard: checking ... 10 of 100 files, 10 s",
        "nanguard: checking ... 40 of 100 files, 40 s",
        "nanguard: checking ... 70 of 100 files, 70 s",
        "nanguard: scanning ... 30 of 90 MB, 200 s",
    ]
