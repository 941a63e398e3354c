"""``nanguard explain`` and ``nanguard replay`` on real incidents, and on what is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "run" / "scripts" / "divides.py"


def nanguard(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-m", "nanguard", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "120"},
    )


@pytest.fixture(scope="module")
def incident(tmp_path_factory):
    """The folder of an incident, beside the script it comes from."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copy(SCRIPT, folder / "train.py")
    nanguard("run", "--incidents", "found", "--", sys.executable, "train.py", cwd=folder)
    return folder / "found" / "step-000005-rank0"


def test_explain_is_a_page(incident, tmp_path):
    done = nanguard("explain", incident, cwd=tmp_path)
    assert done.returncode == 0
    for part in (
        "Step 5, rank 0: the loss is nan.",
        "-> 25 |     return (error / mask.sum(1)).mean()",
        "division-by-zero: div by zero: 1 of 8 divisors is exactly 0",
        "Proven by replay",
        "dataset index  42",
        "+    return (error / mask.sum(1).clamp(min=1)).mean()",
    ):
        assert part in done.stdout


def test_explain_as_json_is_the_incident(incident, tmp_path):
    done = nanguard("explain", incident, "--format", "json", cwd=tmp_path)
    assert json.loads(done.stdout) == json.loads((incident / "incident.json").read_text())


def test_explain_a_cause(tmp_path):
    done = nanguard("explain", "fully-masked-softmax", cwd=tmp_path)
    assert done.returncode == 0
    assert "-inf in every entry" in " ".join(done.stdout.split())
    told = json.loads(nanguard("explain", "exp-overflow", "--format", "json", cwd=tmp_path).stdout)
    assert told["code"] == "exp-overflow"


def test_replay_from_the_folder_alone(incident, tmp_path):
    done = nanguard("replay", incident, cwd=tmp_path)
    assert done.returncode == 1
    assert "step 5: the loss is nan; it began with aten.div in loss (forward)" in done.stdout
    healed = nanguard("replay", incident, "--without-sample", "2", cwd=tmp_path)
    assert healed.returncode == 0
    assert "step 5 is finite (loss 1.55" in healed.stdout


def test_replay_shows_every_operation(incident, tmp_path):
    done = nanguard(
        "replay",
        incident,
        "--trace-all",
        "--precision",
        "float64",
        "--format",
        "json",
        cwd=tmp_path,
    )
    told = json.loads(done.stdout)
    assert done.returncode == 1
    ops = [row["op"] for row in told["operations"]]
    assert ops.index("aten.native_batch_norm") < ops.index("aten.div")
    bad = next(row for row in told["operations"] if row["nonfinite"])
    assert (bad["op"], bad["line"], bad["nonfinite"]) == ("aten.div", 25, 1)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"schema": "nanguard.inci', "not complete JSON"),
        ("[" * 100_000, "not complete JSON"),
        ('{"schema": "nanguard.incident/2"}', "this version reads"),
        ('{"schema": "other/1"}', "this is not an incident"),
        ("[]", "this is not an incident"),
        ('{"schema": "nanguard.incident/1", "fixes": "none"}', "'fixes' holds str"),
    ],
)
@pytest.mark.parametrize("command", ["explain", "replay"])
def test_a_broken_incident_is_a_message_and_exit_code_2(tmp_path, command, content, says):
    folder = tmp_path / "step-000001-rank0"
    folder.mkdir()
    (folder / "incident.json").write_text(content)
    done = nanguard(command, folder, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_replay_refuses_what_has_no_command(tmp_path):
    folder = tmp_path / "step-000001-rank0"
    folder.mkdir()
    base = {"schema": "nanguard.incident/1", "step": 1, "rank": 0}
    for run in (None, {}, {"command": "rm", "folder": "/", "ordinal": 1}):
        (folder / "incident.json").write_text(json.dumps({**base, "run": run}))
        done = nanguard("replay", folder, cwd=tmp_path)
        assert done.returncode == 2
        assert "does not say which command" in done.stderr


def test_the_command_of_a_stranger_is_not_run(incident, tmp_path):
    """Whoever changes the command of an incident does not get it run by those who replay it."""
    hostile = tmp_path / "step-000005-rank0"
    shutil.copytree(incident, hostile)
    told = json.loads((hostile / "incident.json").read_text())
    told["run"]["command"] = [sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"]
    (hostile / "incident.json").write_text(json.dumps(told))
    done = nanguard("replay", hostile, cwd=tmp_path)
    assert done.returncode == 2
    assert "was not made by you" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_neither_incident_nor_code(tmp_path):
    done = nanguard("explain", "no-such-thing", cwd=tmp_path)
    assert done.returncode == 2
    assert "neither an incident nor a run, a rule or a cause" in done.stderr
