"""What ``nanguard run`` leaves behind, and what is found of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nanguard.errors import LaunchError
from nanguard.run.run_record import LaunchedRun, name_of_run, new_place
from nanguard.run_folder import keep_out_of_git
from nanguard.view.runs import find_runs

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
for step in range(12):
    weight = torch.ones(4) * (step != 5)
    loss = (model(torch.randn(4, 4)).pow(2).squeeze(1) * weight).sum() / weight.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
"""


def nanguard(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "nanguard", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "200"},
    )


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> tuple[Path, Path, str]:
    """A project in which a script was run, the folder of the run, and what was said."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "train.py").write_text(SCRIPT)
    words = ["--", sys.executable, "train.py", "--hub-token", "abcdefghijklmnop"]
    done = nanguard(folder, "run", *words)
    assert done.returncode == 0, done.stderr
    (run,) = (folder / ".nanguard/runs").iterdir()
    return folder, run, done.stderr


def test_the_folder_holds_command_metrics_events_and_incidents(project):
    folder, run, said = project
    assert run.name.endswith("-train")
    assert sorted(path.name for path in run.iterdir()) == [
        "events.jsonl",
        "metrics.jsonl",
        "run.json",
        "step-000005-rank0",
    ]
    told = json.loads((run / "run.json").read_text())
    assert told["command"][1:] == ["train.py", "--hub-token", "(hidden)"]
    assert (told["exit_code"], told["folder"]) == (0, str(folder))
    assert told["ended"] > told["began"]
    assert said.splitlines()[-1] == "nanguard: see it: nanguard report"


def test_every_step_is_there_with_the_numbers_of_the_guard(project):
    _, run, _ = project
    metrics = lines(run / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(12))
    assert [line["action"] for line in metrics] == ["step"] * 5 + ["skip"] + ["step"] * 6
    assert metrics[5]["loss"] == "nan"
    assert all(line["loss"] > 0 and line["grad_norm"] > 0 for line in metrics if line["step"] != 5)
    assert [line["lr"] for line in metrics[:9:4]] == [0.01, 0.005, 0.0025]
    (event,) = lines(run / "events.jsonl")
    assert (event["step"], event["action"], event["name"]) == (5, "skip", "non-finite-loss")


def test_nobody_else_may_read_it_and_git_leaves_it_alone(project):
    folder, run, _ = project
    assert (folder / ".nanguard/.gitignore").read_text() == "*\n"
    assert run.stat().st_mode & 0o077 == 0
    assert (run / "step-000005-rank0" / "batch.pt").exists()
    assert all(path.stat().st_mode & 0o077 == 0 for path in run.rglob("*"))


def test_one_run_is_one_row_with_its_incident(project):
    folder, run, _ = project
    (found,) = find_runs([folder])
    assert found.path == run
    assert [path.name for path in found.incidents] == ["step-000005-rank0"]


def test_the_newest_run_is_reported_and_watched(project, tmp_path):
    folder, run, _ = project
    done = nanguard(folder, "report", "-o", str(tmp_path / "page.html"))
    assert "1 run" in done.stdout, done.stderr
    page = (tmp_path / "page.html").read_text()
    assert "A loss or gradient went bad at step 5; the guard kept it out" in page
    # The incident says all of it: no rule has to say once more that a loss was not finite.
    assert "1 incident, 0 findings" in done.stdout
    assert "No rule found a fault." in page
    assert run.name in nanguard(folder, "watch", "--once").stdout


def test_a_run_that_was_cured_says_where_the_incident_is(project, tmp_path):
    folder, run, _ = project
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "train.py").write_text(SCRIPT.replace("step != 5", "step != -1"))
    assert "none bad" in nanguard(tmp_path, "run", "--", sys.executable, "train.py").stderr
    done = nanguard(tmp_path, "report")
    place = f"nanguard explain .nanguard/runs/{run.name}/step-000005-rank0"
    assert "0 incidents" in done.stdout
    assert f"{place} shows the last one before it, of the run {run.name}, step 5: " in done.stdout
    assert place in done.stdout
    assert place in (tmp_path / "report.html").read_text()
    # Where the run has an incident of its own, it is enough.
    assert "no incident" not in nanguard(tmp_path, "report", str(run)).stdout


def test_other_places_and_no_batch(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ["--run-dir", "runs/7", "--no-batch", "--", sys.executable, "train.py"]
    done = nanguard(tmp_path, "run", *words)
    assert done.stderr.splitlines()[-1] == "nanguard: see it: nanguard report runs/7"
    assert not (tmp_path / ".nanguard").exists()
    incident = json.loads((tmp_path / "runs/7/step-000005-rank0/incident.json").read_text())
    assert "the batch was not kept (--no-batch)" in incident["notes"]
    assert not list(tmp_path.rglob("batch.pt"))
    assert incident["fixes"][0]["verified"]


def test_what_does_not_train_leaves_nothing_behind(tmp_path):
    done = nanguard(tmp_path, "run", "--", sys.executable, "-c", "print('hello')")
    assert done.stdout == "hello\n"
    assert "see it" not in done.stderr
    assert list((tmp_path / ".nanguard/runs").iterdir()) == []


def test_a_folder_that_was_there_keeps_what_is_in_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print()\n")
    LaunchedRun(tmp_path, ["true"]).ended(0)
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "run.json"}
    run = LaunchedRun(tmp_path / "new", ["cell-1.py"])
    run.keep("cell-1.py", "print()\n")
    run.ended(0)
    assert not (tmp_path / "new").exists()


# Neither ends before the other has begun to write, however busy the machine is.
UNTIL_BOTH = """
import pathlib, time
while len(list(pathlib.Path("both").rglob("metrics.jsonl"))) < 2:
    time.sleep(0.1)
"""


def test_two_processes_at_once_keep_a_record_each(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT.replace("step != 5", "True") + UNTIL_BOTH)
    both = f"{sys.executable} train.py & {sys.executable} train.py & wait"
    assert nanguard(tmp_path, "run", "--run-dir", "both", "--", "bash", "-c", both).returncode == 0
    records = sorted((tmp_path / "both").rglob("metrics.jsonl"))
    assert len(records) == 2
    assert records[1].parent.name.startswith("process-") or records[0].parent.name.startswith("p")
    assert all([line["step"] for line in lines(path)] == list(range(12)) for path in records)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "src/train_gpt.py", "--lr", "1"], "train_gpt"),
        (["torchrun", "--nproc-per-node", "2", "train.py"], "train"),
        (["python", "-m", "trl.sft"], "trl.sft"),
        (["yolo", "train"], "yolo"),
        (["bash", "night.sh"], "night"),
        (["python", "my script (2).py"], "my-script-2"),
    ],
)
def test_a_run_is_called_after_what_it_runs(command, name):
    assert name_of_run(command) == name


def test_two_runs_of_one_second_have_two_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _form: "20261116-101010")
    first = new_place(["python", "a.py"])
    first.mkdir(parents=True)
    assert new_place(["python", "a.py"]).name == "20261116-101010-a-2"


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="nanguard run --run-dir DIR"):
        LaunchedRun(tmp_path / "file" / "run", ["python"])


def test_a_gitignore_that_is_there_stays(tmp_path):
    (tmp_path / ".gitignore").write_text("cache\n")
    keep_out_of_git(tmp_path)
    assert (tmp_path / ".gitignore").read_text() == "cache\n"


def test_checkpoints_of_a_trainer_are_no_runs(tmp_path):
    for step in (10, 20, 100):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        history = [{"step": s, "loss": 1.0 / s, "epoch": 0.1} for s in range(1, step, 5)]
        (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (found,) = find_runs([tmp_path])
    assert found.path == tmp_path / "out"
    assert [path.parent.name for path in found.logs] == ["checkpoint-100"]
