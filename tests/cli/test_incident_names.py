"""What users call an incident: nothing, a step, a run, a folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from nanguard import incident as incidents
from nanguard.cli.entry import run
from nanguard.cli.incident_names import incident_named, incidents_named, newest_run
from nanguard.errors import NanguardError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


def write(run_folder: Path, step: int, age: int) -> Path:
    """Writes an incident that is so many seconds old."""
    folder = incidents.new_folder(run_folder, step, 0)
    incident = {
        "schema": incidents.SCHEMA,
        "step": step,
        "rank": 0,
        "sentence": f"train.py:{step} divides by count, which is 0: 0/0 = NaN",
        "symptom": {"kind": "loss", "value": "nan"},
        "cause": {"code": "division-by-zero", "confidence": 0.95},
    }
    incidents.write(folder, incidents.Incident.from_json(incident))
    for path in (folder / incidents.NAME, folder, run_folder):
        stamp = path.stat().st_mtime - age
        os.utime(path, (stamp, stamp))
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two runs: an older one with two incidents, a newer one with one."""
    old, new = (tmp_path / ".nanguard/incidents" / name for name in ("20261101-1", "20261102-1"))
    write(old, 7, 500)
    write(old, 116, 400)
    write(new, 9, 0)
    for path, age in ((old, 400), (new, 0)):
        stamp = path.stat().st_mtime - age
        os.utime(path, (stamp, stamp))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nothing_is_the_newest(project: Path):
    assert incident_named(None, "nanguard explain").name == "step-000009-rank0"
    assert newest_run() == (".nanguard/incidents/20261102-1",)


def test_it_is_found_from_a_folder_below(project: Path, monkeypatch: pytest.MonkeyPatch):
    (project / "src/models").mkdir(parents=True)
    monkeypatch.chdir(project / "src/models")
    assert incident_named(None, "nanguard explain").name == "step-000009-rank0"


def test_a_number_is_a_step(project: Path):
    assert incident_named("116", "nanguard explain").name == "step-000116-rank0"
    with pytest.raises(UsageError, match="incidents of these steps: 7, 9, 116"):
        incident_named("117", "nanguard explain")


@pytest.mark.parametrize("word", ["20261101-1", "20261101", ".nanguard/incidents/20261101-1"])
def test_a_run_is_all_of_its_incidents(project: Path, word: str):
    named = [folder.name for folder in incidents_named(word, "nanguard explain")]
    assert named == ["step-000007-rank0", "step-000116-rank0"]
    assert incident_named(word, "nanguard fix").name == "step-000116-rank0"


def test_what_there_is_not(project: Path, tmp_path_factory, monkeypatch):
    with pytest.raises(UsageError, match="there is no incident 'night'"):
        incidents_named("night", "nanguard fix")
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(UsageError, match="no incident in this folder"):
        incidents_named(str(empty), "nanguard fix")
    monkeypatch.chdir(empty)
    with pytest.raises(UsageError, match=r"nanguard run -- python train\.py"):
        incidents_named(None, "nanguard fix")
    assert newest_run() == (".",)


def test_explain_lists_a_run(project: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["explain", "20261101-1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("20261101-1")
    assert lines[1].startswith("  step 7: train.py:7 divides by count, which is 0: 0/0 = NaN")
    assert lines[2].strip().endswith(".nanguard/incidents/20261101-1/step-000007-rank0")
    assert lines[3].startswith("  step 116: train.py:116 divides by count")


def test_explain_takes_several_things(project: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["explain", "7", "116", "clip-before-unscale"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("Step 7, rank 0") < shown.index("Step 116, rank 0")
    assert shown.index("Step 116, rank 0") < shown.index("clip-before-unscale")


def test_explain_alone_says_what_else_there_is(project: Path, capsys: pytest.CaptureFixture[str]):
    write(project / ".nanguard/incidents/20261102-1", 10, -60)
    assert run(["explain"]) == 0
    shown = capsys.readouterr().out
    assert "Step 10, rank 0" in shown
    assert "1 more incident of this run: nanguard explain" in shown


@pytest.mark.parametrize(
    ("word", "meant"),
    [("20261101-2", "20261101-1"), ("step-000116-rnk0", "step-000116-rank0")],
)
@pytest.mark.parametrize("command", ["explain", "fix", "replay"])
def test_a_name_that_is_nearly_right(project: Path, command: str, word: str, meant: str):
    with pytest.raises(UsageError, match=f"Did you mean .*{meant}"):
        run([command, word])


def test_an_incident_is_known_by_the_name_of_its_folder(project: Path):
    assert incident_named("step-000116-rank0", "nanguard fix").parent.name == "20261101-1"


def test_of_several_runs_of_one_name_one_with_incidents_is_meant(project: Path):
    write(project / ".nanguard/runs/20261031-train", 3, 600)
    (project / ".nanguard/runs/20261103-train").mkdir()
    assert incident_named("train", "nanguard explain").name == "step-000003-rank0"


def test_a_run_is_reported_by_its_name(project: Path, capsys: pytest.CaptureFixture[str]):
    run(["report", "20261101-1"])
    assert capsys.readouterr().out.startswith("report.html: 1 run, 0 numbers, 2 incidents")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["check", "trian.py"], "train.py"),
        (["rules", "CFGG"], "CFG"),
        (["check", "--select", "clip-befor-unscale"], "clip-before-unscale"),
        (["explain", "division-by-zro"], "division-by-zero"),
    ],
)
def test_other_names_that_are_nearly_right(project: Path, words: list[str], meant: str):
    (project / "train.py").write_text("x = 1\n")
    with pytest.raises(NanguardError, match=f"Did you mean {meant}"):
        run(words)
