"""``nanguard doctor`` on this machine, and on machines where something is missing."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from nanguard.cli import doctor
from nanguard.cli.entry import run
from nanguard.errors import UsageError, installing

if TYPE_CHECKING:
    from pathlib import Path


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, dict]]:
    code = run(["doctor", "--format", "json", *words])
    return code, {one["what"]: one for one in json.loads(capsys.readouterr().out)}


def test_it_says_what_is_here(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, found = asked(capsys)
    assert code == 0
    assert found["torch"]["found"] == torch.__version__
    assert found["python"]["found"].endswith(f"at {sys.executable}")
    assert found["write access"]["found"].startswith(str(tmp_path / ".nanguard"))
    assert not list(tmp_path.iterdir())
    code = run(["doctor"])
    assert capsys.readouterr().out.endswith("\nnanguard run works here.\n")


def python(folder: Path, body: str) -> str:
    """Makes a program that answers as a Python would, or does not."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def answer(**told: object) -> str:
    usual = {"python": [3, 12, 1], "executable": "/opt/python", "monitoring": True, "pth": False}
    return f"echo '{json.dumps({**usual, **told})}'"


def test_nothing_of_the_current_folder_is_imported(tmp_path: Path, monkeypatch, capsys):
    for name in ("torch", "json"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    _, found = asked(capsys, "--python", sys.executable)
    assert found["torch"]["found"] == torch.__version__
    assert not (tmp_path / "ran").exists()


def test_a_python_without_torch(tmp_path: Path, capsys):
    other = python(tmp_path, answer(error="No module named torch"))
    code, found = asked(capsys, "--python", other)
    assert code == 1
    assert found["torch"]["verdict"] == "bad"
    assert "No module named torch" in found["torch"]["found"]
    assert found["reach"]["do"] == (
        f"Install nanguard in that Python: /opt/python -m {installing()}"
    )


def test_an_old_torch_and_a_python_that_fails(tmp_path: Path, capsys):
    code, found = asked(capsys, "--python", python(tmp_path, answer(torch="2.1.0+cu118")))
    assert (code, found["torch"]["verdict"]) == (1, "bad")
    code, found = asked(capsys, "--python", python(tmp_path, "echo broken >&2; exit 3"))
    assert (code, found["python"]["verdict"]) == (1, "bad")
    assert "broken" in found["python"]["found"]
    with pytest.raises(UsageError, match="not a program"):
        run(["doctor", "--python", str(tmp_path / "none")])


def test_gpus_are_counted(tmp_path: Path, capsys):
    told = answer(torch="2.11.0", cuda="12.8", devices=["NVIDIA H200"] * 8)
    _, found = asked(capsys, "--python", python(tmp_path, told))
    assert found["devices"]["found"] == "8 x NVIDIA H200 (CUDA 12.8)"


def test_no_landlock_and_no_write_access_are_said(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(doctor.landlock, "version", lambda: 0)
    assert doctor._of_landlock().verdict == "note"
    assert "nanguard replay --explain --yes" in doctor._of_landlock().do
    found = doctor._of_writing(tmp_path / "gone")
    assert found.verdict == "bad"
    assert "nanguard run --incidents DIR" in found.do
