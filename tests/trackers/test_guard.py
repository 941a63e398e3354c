"""A guard's steps and events, as the readers of each library find them."""

from __future__ import annotations

import math
import random
import re
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from nanguard import Guard, NonFiniteError, Settings
from nanguard.errors import MissingDependencyError, UsageError
from nanguard.trackers.to_tensorboard import TensorBoard
from nanguard.trackers.tracker import Step, TrackedPlace
from tests.trackers import reading
from tests.training import INF, Run, batches, poisoned

if TYPE_CHECKING:
    from pathlib import Path

BAD, WORSE = 7, 9


def train(run_dir: Path | None, trackers: list[str], **settings: Any) -> Guard:
    """Trains 20 steps, one of which has a NaN in its batch and one an infinity."""
    data = poisoned(poisoned(batches(20), [BAD]), [WORSE], INF)
    run = Run()
    guard = Guard(
        run.model,
        run.optimizer,
        run_dir=run_dir,
        trackers=trackers,
        settings=Settings(**{"max_skips": 1, **settings}),
    )
    with guard:
        for batch in guard.watch(data):
            guard.backward(guard.loss(text=run.loss(batch)))
            guard.step(max_norm=1.0)
    return guard


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tmp_path / "run", ["tensorboard"])
    scalars, texts = reading.tensorboard(tmp_path / "run/trackers/tensorboard")
    loss = scalars["nanguard/loss"]
    assert sorted(loss) == list(range(20))
    assert [step for step, value in loss.items() if not math.isfinite(value)] == [BAD, WORSE]
    assert math.isnan(scalars["nanguard/terms/text"][BAD])
    skipped = scalars["nanguard/skipped"]
    assert [skipped[step] for step in (BAD - 1, BAD, WORSE, 19)] == [0, 1, 2, 2]
    assert scalars["nanguard/nonfinite_steps"][19] == 2
    assert [step for step, _ in texts] == [BAD, WORSE]
    assert "non-finite-loss -> skip" in texts[0][1]
    assert "cut-lr" in texts[1][1]
    assert "learning rate now x 0.5" in texts[1][1]
    assert math.isfinite(scalars["nanguard/grad_norm"][BAD - 1])


def test_tensorboard_shows_each_process_as_a_run_of_its_own(tmp_path: Path) -> None:
    """Attempts of one recovery count their steps from 0, each of them."""
    pytest.importorskip("tensorboard")
    for name, value in (("first", 1.0), ("second", 2.0)):
        tracker = TensorBoard(TrackedPlace(tmp_path, name))
        tracker.start()
        tracker.step(Step(0, {"nanguard/loss": value}, {}))
        tracker.finish()
    for name, value in (("first", 1.0), ("second", 2.0)):
        assert reading.tensorboard(tmp_path / name)[0] == {"nanguard/loss": {0: value}}


def test_wandb_offline_run_of_our_own(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    train(tmp_path / "run", ["wandb"])
    assert wandb.run is None
    (file,) = (tmp_path / "run").rglob("*.wandb")
    rows, alerts, summary = reading.wandb(file)
    by_step = {row["_step"]: row for row in rows}
    assert sorted(by_step) == list(range(20))
    assert math.isnan(float(by_step[BAD]["nanguard/loss"]))
    assert by_step[BAD]["nanguard/skipped"] == 1
    assert "non-finite" not in str(by_step[BAD - 1])
    assert "step 7: loss term 'text' is nan" in by_step[BAD]["nanguard/event"]
    assert [alert.level for alert in alerts] == ["WARN", "WARN"]
    assert "step 7" in alerts[0].text
    assert summary["nanguard/bad_steps"][0].startswith("7: loss=nan")


def test_wandb_run_of_the_user(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    run = wandb.init(dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True))
    try:
        for step in range(3):
            run.log({"mine": step}, step=step * 10)
        train(None, ["wandb"])
        assert wandb.run is run
        # What the user logs next is not refused, as it would be if their step had moved.
        run.log({"mine": 3}, step=30)
        run.log({"mine": 4}, step=31)
    finally:
        run.finish()
    (file,) = tmp_path.rglob("*.wandb")
    rows, alerts, summary = reading.wandb(file)
    assert [row["_step"] for row in rows if "mine" in row] == [0, 10, 20, 30, 31]
    told = [row for row in rows if "nanguard/loss" in row]
    assert len(told) == 1
    # Twenty steps went into one row of the user's; the NaN among them is still there.
    assert not math.isfinite(float(told[0]["nanguard/loss"]))
    assert told[0]["nanguard/skipped"] == 2
    assert len(alerts) == 2
    assert [words.split(":")[0] for words in summary["nanguard/bad_steps"]] == ["7", "9"]


def test_mlflow_store_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    train(tmp_path / "run", ["mlflow"])
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    metrics, tags, status = reading.mlflow((tmp_path / "run/trackers/mlflow/mlruns").as_uri())
    assert status == "FINISHED"
    assert sorted(metrics["nanguard/loss"]) == list(range(20))
    assert math.isnan(metrics["nanguard/loss"][BAD])
    assert metrics["nanguard/skipped"][19] == 2
    assert tags["nanguard.nonfinite_steps"].startswith("7: loss=nan")
    assert "; 9: " in tags["nanguard.nonfinite_steps"]
    assert "-> cut-lr" in tags["nanguard.event.0002"]
    assert tags["nanguard.events"] == "2"


def test_mlflow_run_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "theirs").as_uri()
    # Not set_tracking_uri, which would outlive this test.
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with mlflow.start_run() as run:
        train(None, ["mlflow"])
        assert mlflow.active_run().info.run_id == run.info.run_id
        assert reading.mlflow(uri)[2] == "RUNNING"
    metrics, tags, _ = reading.mlflow(uri)
    assert math.isnan(metrics["nanguard/loss"][BAD])
    assert "nanguard.event.0001" in tags


def test_a_store_that_takes_no_nan_loses_nothing(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    from nanguard.trackers.to_mlflow import MLflow
    from nanguard.trackers.tracker import Counting, TrackedPlace

    class Strict(mlflow.MlflowClient):  # type: ignore[misc, name-defined]
        def log_batch(self, run_id: str, metrics: Any = (), **options: Any) -> Any:
            if not all(math.isfinite(metric.value) for metric in metrics):
                raise mlflow.MlflowException("not a number")
            return super().log_batch(run_id, metrics=metrics, **options)

    tracker = MLflow(TrackedPlace(tmp_path, "strict"))
    tracker.start()
    tracker._client.__class__ = Strict
    counting = Counting()
    for step, loss in enumerate((1.0, math.nan, -math.inf, 0.5)):
        tracker.step(counting.step({"step": step, "loss": loss, "action": "skip"}))
    tracker.flush()
    run = tracker._client.get_run(tracker._run)
    history = tracker._client.get_metric_history(tracker._run, "nanguard/loss")
    assert [metric.step for metric in history] == [0, 3]
    assert run.data.tags["nanguard.nonfinite_steps"] == "1: loss=nan; 2: loss=-inf"
    assert run.data.metrics["nanguard/nonfinite_steps"] == 2
    tracker.finish()


def test_unknown_name() -> None:
    with pytest.raises(UsageError, match="no tracker called 'tensorbord'") as error:
        train(None, ["tensorbord"])
    assert "tensorboard, wandb, trackio, mlflow" in error.value.do


def test_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingDependencyError, match=r"\[trackers\]"):
        train(None, ["wandb"])


def test_package_that_is_installed_and_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trackio.py").write_text("raise TypeError('Descriptors cannot be created')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingDependencyError, match="cannot be imported: TypeError: Descriptors"):
        train(None, ["trackio"])


def test_only_the_first_rank_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanguard.guard.ranks import Ranks

    monkeypatch.setattr(Ranks, "first", property(lambda _: False))
    train(tmp_path / "run", ["tensorboard"])
    assert not list(tmp_path.rglob("*tfevents*"))


def test_names_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setenv("NANGUARD_TRACK", "tensorboard")
    monkeypatch.setenv("NANGUARD_TRACK_DIR", str(tmp_path / "here"))
    run = Run()
    with Guard(run.model, run.optimizer) as guard:
        for batch in guard.watch(batches(3)):
            guard.backward(run.loss(batch))
            guard.step()
    scalars, _ = reading.tensorboard(tmp_path / "here/tensorboard")
    assert sorted(scalars["nanguard/loss"]) == [0, 1, 2]


def test_stop_is_loud_and_written_before_the_end(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with pytest.raises(NonFiniteError):
        train(tmp_path / "run", ["tensorboard"], on_bad="stop")
    scalars, texts = reading.tensorboard(tmp_path / "run/trackers/tensorboard")
    assert max(scalars["nanguard/loss"]) == BAD
    assert "-> stop" in texts[-1][1]


def test_a_failing_tracker_is_told_once_and_counted(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    (tmp_path / "run").mkdir()
    # A file stands where the folder should be.
    (tmp_path / "run/trackers").write_text("")
    guard = train(tmp_path / "run", ["tensorboard"])
    told = [str(e) for e in guard.summary().events if e.finding.name == "tracker-not-written"]
    assert len(told) == 2
    assert "could not write to tensorboard (" in told[0]
    # 20 steps, 2 events, and what was told of the failure if that came before the end.
    assert re.search(r"could not write 2[23] lines to tensorboard", told[1])
    assert guard.summary().applied == 18


def test_random_numbers_and_threads_are_as_they_were(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    before = set(threading.enumerate())
    random.seed(3)
    plain = train(tmp_path / "a", [])
    after = random.random()
    random.seed(3)
    tracked = train(tmp_path / "b", ["tensorboard"])
    assert random.random() == after
    assert plain.summary().counts() == tracked.summary().counts()
    new = set(threading.enumerate()) - before
    assert not [thread for thread in new if thread.name.startswith("nanguard-")]


def test_incident_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run = Run()
    guard = Guard(
        run.model,
        run.optimizer,
        run_dir=tmp_path / "run",
        incidents=tmp_path / "incidents",
        trackers=["tensorboard"],
    )
    with guard:
        for batch in guard.watch(poisoned(batches(4), [2])):
            guard.backward(run.loss(batch))
            guard.step()
    _, texts = reading.tensorboard(tmp_path / "run/trackers/tensorboard")
    assert any(str(tmp_path / "incidents/step-000002-rank0") in text for _, text in texts)
