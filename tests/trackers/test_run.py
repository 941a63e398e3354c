"""``nanguard run --track``, and what ``check`` and ``report`` make of what was written."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trackers import reading

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"
READ_TRACKIO = (
    "import json; from trackio.sqlite_storage import SQLiteStorage as S; "
    "(run,) = S.get_runs('nanguard'); "
    "print(json.dumps([S.get_logs('nanguard', run), S.get_alerts('nanguard')], default=str))"
)


def command(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command with every library's files below a folder."""
    ours = ("NANGUARD_TRACK", "WANDB_MODE", "WANDB_DIR", "MLFLOW_TRACKING_URI")
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
        "OMP_NUM_THREADS": "1",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
    }
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def track(script: str, folder: Path, *trackers: str, trace: bool = False) -> str:
    """Runs a script under ``nanguard run``; returns what was said."""
    options = [word for name in trackers for word in ("--track", name)]
    options += [] if trace else ["--no-trace"]
    words = ["-m", "nanguard", "run", "--incidents", "incidents", *options, "--"]
    done = command(*words, sys.executable, SCRIPTS / script, folder=folder)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of an unmodified script that was run with all four trackers."""
    for name in ("tensorboard", "wandb", "trackio", "mlflow"):
        pytest.importorskip(name)
    folder = tmp_path_factory.mktemp("tracked")
    track("plain.py", folder, "tensorboard", "wandb", "trackio", "mlflow")
    return folder


def test_tensorboard(tracked: Path) -> None:
    scalars, texts = reading.tensorboard(tracked / "incidents/trackers/tensorboard")
    loss = scalars["nanguard/loss"]
    assert sorted(loss) == list(range(20))
    assert [step for step, value in loss.items() if not math.isfinite(value)] == [5]
    assert [scalars["nanguard/skipped"][step] for step in (4, 5, 19)] == [0, 1, 1]
    assert set(scalars["nanguard/grad_norm"]) >= set(range(20)) - {5}
    assert scalars["nanguard/lr"][0] == pytest.approx(1e-2)
    assert "the loss is nan -> skip" in texts[0][1]
    assert str(tracked / "incidents/step-000005-rank0") in texts[1][1]


def test_wandb(tracked: Path) -> None:
    (file,) = tracked.rglob("*.wandb")
    rows, alerts, _ = reading.wandb(file)
    assert [row["_step"] for row in rows] == list(range(20))
    assert math.isnan(float(rows[5]["nanguard/loss"]))
    assert [(alert.level, alert.title) for alert in alerts] == [
        ("WARN", "nanguard: non-finite-loss -> skip")
    ]


def test_mlflow(tracked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tracked / "incidents/trackers/mlflow/mlruns").as_uri()
    metrics, tags, status = reading.mlflow(uri)
    assert status == "FINISHED"
    assert math.isnan(metrics["nanguard/loss"][5])
    assert tags["nanguard.nonfinite_steps"].startswith("5: loss=nan")
    assert "step-000005-rank0" in tags["nanguard.event.0002"]


def test_trackio(tracked: Path) -> None:
    done = command("-c", READ_TRACKIO, folder=tracked)
    assert done.returncode == 0, done.stderr
    logs, alerts = json.loads(done.stdout)
    losses = {row["step"]: row["nanguard/loss"] for row in logs if "nanguard/loss" in row}
    assert sorted(losses) == list(range(20))
    assert math.isnan(losses[5])
    assert [row["step"] for row in logs if "nanguard/event" in row] == [5, 5]
    assert [(alert["level"], alert["step"]) for alert in alerts] == [("warn", 5)]


def test_check_and_report_read_it(tracked: Path) -> None:
    places = [tracked / "incidents/trackers" / name for name in ("tensorboard", "wandb")]
    done = command("-m", "nanguard", "check", "--format", "json", *places, folder=tracked)
    found = json.loads(done.stdout)["findings"]
    assert [(f["name"], f["step"]) for f in found] == [("non-finite-loss", 5)] * 2
    page = tracked / "report.html"
    done = command("-m", "nanguard", "report", *places, "-o", page, folder=tracked)
    assert done.returncode == 0, done.stderr
    assert "2 runs" in done.stdout + done.stderr
    assert "nanguard/loss" in page.read_text(encoding="utf-8")


def test_two_optimizers_have_steps_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    track("two_optimizers.py", tmp_path, "tensorboard")
    scalars, texts = reading.tensorboard(tmp_path / "incidents/trackers/tensorboard")
    first, second = scalars["nanguard/loss"], scalars["nanguard/optimizer-1/loss"]
    assert sorted(first) == sorted(second) == list(range(6))
    assert all(map(math.isfinite, first.values()))
    assert [step for step, value in second.items() if not math.isfinite(value)] == [3]
    assert texts[0][0] == 3


def test_script_with_a_guard_is_tracked_once_and_replays_write_nothing(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    said = track("guarded.py", tmp_path, "tensorboard", trace=True)
    assert "could not write" not in said
    found = json.loads((tmp_path / "incidents/step-000005-rank0/incident.json").read_text())
    assert found["replay"]["verdict"] == "reproduced"
    (file,) = tmp_path.rglob("*tfevents*")
    scalars, _ = reading.tensorboard(file.parent)
    assert sorted(scalars["nanguard/loss"]) == list(range(12))
    assert math.isnan(scalars["nanguard/loss"][5])


def test_trackio_run_of_the_user(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    done = command(SCRIPTS / "trackio_run.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    stored = json.loads(done.stdout.splitlines()[-1])
    assert stored["runs"] == ["mine"]
    rows = [row for row in stored["logs"] if "nanguard/loss" in row]
    assert [row["step"] for row in rows if math.isnan(row["nanguard/loss"])] == [5]
    assert len([row for row in stored["logs"] if "loss" in row]) == 8
    assert stored["alerts"][0]["title"] == "nanguard: non-finite-loss -> skip"


def test_unknown_tracker_ends_before_the_command_starts(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    script = f"open({str(mark)!r}, 'w')"
    words = ["-m", "nanguard", "run", "--track", "tensorbord", "--", sys.executable, "-c", script]
    done = command(*words, folder=tmp_path)
    assert done.returncode == 2
    assert "Did you mean tensorboard?" in done.stderr
    assert not mark.exists()


@pytest.mark.exhaustive
@pytest.mark.ranks
def test_ranks_that_a_script_starts_by_itself(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    track("spawned.py", tmp_path, "tensorboard")
    scalars, _ = reading.tensorboard(tmp_path / "incidents/trackers/tensorboard")
    assert sorted(scalars["nanguard/loss"]) == list(range(6))
    (incident,) = (tmp_path / "incidents").glob("step-*")
    assert incident.name == "step-000003-rank1"
