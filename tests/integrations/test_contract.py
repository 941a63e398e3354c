"""One training, the same faults, four forms: the same decisions, incidents and weights."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import Trainer

from nanguard import NonFiniteError, Settings, incident
from tests.integrations import forms, tiny
from tests.integrations.forms import Asked, Ended
from tests.integrations.tiny import FAULTS, samples, spoil, without
from tests.ranks import came_to_its_end
from tests.training import differences

if TYPE_CHECKING:
    from nanguard.guard.journal import Event

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FORMS = sorted(forms.FORMS)
BATCHES = 22
# The last but one has the fault of an earlier one, and is counted there.
AT = {2: "nan-input", 4: "inf-loss", 6: "gradient", 8: "minus-inf-loss", 20: "spike"}
NAMES = {
    "nan-input": "non-finite-loss",
    "inf-loss": "non-finite-loss",
    "minus-inf-loss": "non-finite-loss",
    "gradient": "non-finite-gradient",
    "spike": "loss-spike",
}


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(form: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(form)


class Pair:
    """A run with bad batches and one that never saw them, of one form."""

    def __init__(self, form: str, folder: Path, faults: dict[int, str], **asked: Any) -> None:
        data = samples(asked.pop("batches", BATCHES))
        accumulate = asked.get("accumulate", 1)
        self.told: list[Event] = []
        options = {"on_event": self.told.append, **asked.pop("options", {})}
        bad = {
            s for b in faults for s in range(b - b % accumulate, b - b % accumulate + accumulate)
        }
        self.ended = forms.run(form, Asked(folder, spoil(data, faults), options=options, **asked))
        self.everything = self.ended.everything()
        self.clean = forms.run(form, Asked(folder, without(data, bad), **asked)).everything()
        self.events = [
            (event.finding.step, event.finding.name, event.action.value)
            for event in self.ended.guard.summary().events
        ]


@pytest.fixture(scope="module")
def pair(form: str, folder: Path) -> Pair:
    return Pair(form, folder, AT, options={"incidents": folder / "incidents"})


def test_every_fault_is_met_alike(pair: Pair):
    assert pair.events == [(step, NAMES[fault], "skip") for step, fault in AT.items()]
    assert pair.ended.guard.summary().applied == BATCHES - len(AT)


def test_the_run_ends_as_if_it_had_never_seen_them(pair: Pair):
    assert differences(pair.everything, pair.clean) == []


def test_who_is_told_of_a_step_learns_why_it_was_bad(pair: Pair, folder: Path):
    told = {event.finding.step: event.incident for event in pair.told}
    assert list(told) == list(AT)
    for step, fault in AT.items():
        known = told[step]
        assert known is not None
        assert known.cause == ("" if fault == "spike" else FAULTS[fault][-1])
        at = 4 if fault == "minus-inf-loss" else step  # counted in the first of its kind
        assert known.folder == folder / "incidents" / f"step-{at:06d}-rank0"
        assert known.sentence.startswith("" if fault == "spike" else f"step {step}: ")


@pytest.mark.parametrize("step", AT)
def test_the_same_incidents_are_written(pair: Pair, folder: Path, step: int):
    if AT[step] == "minus-inf-loss":
        first = incident.read(folder / "incidents" / "step-000004-rank0")
        assert (first["times"], first["again"][0]["step"]) == (2, step)
        assert first["again"][0]["symptom"]["loss"] == "-inf"
        assert first["again"][0]["dataset_indices"] == [step * tiny.SIZE + 3]
        return
    found = incident.read(folder / "incidents" / f"step-{step:06d}-rank0")
    where, kind, op, code, cause = FAULTS[AT[step]]
    assert (found["step"], found["rank"]) == (step, 0)
    assert (found["symptom"]["where"], found["symptom"]["kind"]) == (where, kind)
    assert found["action"]["taken"] == "skip"
    if AT[step] == "spike":
        assert "finite number" in found["replay"]["why"]
        assert found["symptom"]["loss"] > found["guard"]["limit"]
        return
    assert found["replay"]["verdict"] == "reproduced"
    assert found["cause"]["code"] == cause
    assert found["origin"]["op"] == op
    assert found["samples"] == [3]
    assert found["dataset_indices"] == [step * tiny.SIZE + 3]
    assert found["fixes"][0]["verified"]
    if code is not None:
        assert Path(found["origin"]["file"]) == Path(tiny.__file__)
        assert found["origin"]["line"] == tiny.line_of(code)
        assert found["fixes"][0]["diff"]
    if where == "gradient":
        assert any(name.endswith("last.weight") for name in found["symptom"]["names"])


def test_nothing_is_left_behind(pair: Pair):
    # Only the scheduler's own wrapper.
    step = vars(pair.ended.optimizer)["step"]
    assert Path(step.__code__.co_filename).name == "lr_scheduler.py"
    trainer = pair.ended.framework
    if isinstance(trainer, Trainer):
        assert "step" not in vars(trainer.optimizer)
        assert "training_step" not in vars(trainer)
        assert "backward" not in vars(trainer.accelerator)


def test_one_bad_micro_batch_voids_the_accumulated_step(form: str, tmp_path: Path):
    pair = Pair(form, tmp_path, {3: "nan-input", 8: "gradient"}, accumulate=2, batches=14)
    assert [event[0] for event in pair.events] == [1, 4]
    assert pair.ended.guard.summary().applied == 5
    assert differences(pair.everything, pair.clean) == []


def test_mixed_precision(form: str, tmp_path: Path):
    pair = Pair(form, tmp_path, {3: "nan-input", 5: "gradient"}, bf16=True, batches=8)
    assert [event[0] for event in pair.events] == [3, 5]
    assert differences(pair.everything, pair.clean) == []


# Lightning goes on at the beginning of an epoch, the others in the middle of one.
STOP = {"plain": 5, "accelerate": 5, "lightning": 1, "trainer": 5}


def test_a_run_resumes_from_the_frameworks_checkpoint(form: str, tmp_path: Path):
    data = spoil(samples(8), {2: "nan-input", 6: "inf-loss"})
    whole = forms.run(form, Asked(tmp_path / "a", data, epochs=2))
    first = forms.run(form, Asked(tmp_path / "b", data, epochs=2, stop_after=STOP[form]))
    again = Asked(tmp_path / "c", data, epochs=2, resume=first.saved)
    resumed = forms.run(form, again)
    assert differences(resumed.everything(), whole.everything()) == []
    assert resumed.guard.steps == whole.guard.steps == 16
    assert resumed.guard.summary().counts() == whole.guard.summary().counts()


def test_a_checkpoint_of_another_model_is_refused(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    data = samples(4)
    first = forms.run(form, Asked(tmp_path / "b", data, epochs=2, stop_after=1))
    steps = []

    class Other(tiny.Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(12, 2)

        def forward(self, **batch: Any) -> Any:
            steps.append(1)
            return super().forward(**batch)

    monkeypatch.setattr(forms, "Tiny", Other)
    with pytest.raises((RuntimeError, ValueError), match=r"last\.weight|another model"):
        forms.run(form, Asked(tmp_path / "c", data, epochs=2, resume=first.saved))
    assert not steps


def test_the_guard_stops_a_run(form: str, tmp_path: Path):
    data = spoil(samples(6), {2: "inf-loss"})
    with pytest.raises(NonFiniteError, match="the loss is inf"):
        forms.run(form, Asked(tmp_path, data, options={"settings": Settings(on_bad="stop")}))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(29700 + os.getpid() % 200)]
    command += ["-m", "tests.integrations.two_ranks", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert came_to_its_end(done.returncode, done.stderr), done.stderr[-4000:]
    return out, json.loads((out / "answer.json").read_text())


@pytest.mark.ranks
@pytest.mark.parametrize("form", FORMS)
def test_one_bad_rank(ranks: tuple[Path, Any], form: str):
    out, answers = ranks
    for rank in (0, 1):
        bad, clean = answers[rank][form]["bad"], answers[rank][form]["clean"]
        assert bad["events"] == [[3, "non-finite-loss", 1, "skip"]]
        assert (bad["digest"], bad["lr"]) == (clean["digest"], clean["lr"])
    (folder,) = (out / form).iterdir()
    found = incident.read(folder)
    assert (found["step"], found["rank"], found["run"]["ranks"]) == (3, 1, 2)
    assert found["cause"]["code"] == "bad-input-data"
    assert found["samples"] == [3]


@pytest.mark.ranks
def test_ranks_do_not_draw_the_same_after_a_resume(ranks: tuple[Path, Any]):
    first, second = (answer["streams"] for answer in ranks[1])
    assert first["alone"] != second["alone"]
    assert [first["together"], second["together"]] == [first["saved"], second["saved"]]
    assert first["saved"] != second["saved"]


@pytest.mark.ranks
def test_the_main_process_may_save_by_itself(ranks: tuple[Path, Any]):
    assert [answer["saved"] for answer in ranks[1]] == [True, True]


def test_the_trainers_log_leaves_out_what_was_skipped(tmp_path: Path):
    data = samples(8)
    run = forms.run("trainer", Asked(tmp_path, spoil(data, {2: "nan-input", 5: "inf-loss"})))
    clean = forms.run("trainer", Asked(tmp_path, without(data, {2, 5})))
    logs = [log for log in run.framework.state.log_history if "loss" in log]
    assert [log["nanguard_skipped"] for log in logs] == [1, 1]
    assert all(math.isfinite(log["loss"]) for log in logs)
    mean = clean.framework.state.log_history[-1]["train_loss"]
    assert run.framework.state.log_history[-1]["train_loss"] == pytest.approx(mean)


def test_a_log_of_nothing_but_skipped_steps_is_no_number(tmp_path: Path):
    data = spoil(samples(4), dict.fromkeys(range(4), "nan-input"))
    run = forms.run("trainer", Asked(tmp_path, data))
    (log,) = (log for log in run.framework.state.log_history if "loss" in log)
    assert math.isnan(log["loss"])
    assert log["nanguard_skipped"] == 4


def test_replays_do_not_touch_checkpoints(tmp_path: Path):
    """Safetensors are written by compiled code, past everything that Python could see."""
    code = (
        "import os, sys, torch\n"
        "from pathlib import Path\n"
        "real = os.open\n"
        "from safetensors.torch import save_file\n"
        "from nanguard.replay.sandbox import Outside\n"
        "save_file({'a': torch.zeros(3)}, 'model.safetensors')\n"
        "before = Path('model.safetensors').read_bytes()\n"
        "Path('away').mkdir()\n"
        "Outside(Path('away').resolve()).for_good()\n"
        "save_file({'a': torch.ones(3)}, 'model.safetensors')\n"
        "os._exit(open(real('model.safetensors', 0), 'rb').read() != before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.parametrize("hidden", [True, False])
def test_the_filter_of_the_trainers_log_has_nothing_to_hide(tmp_path: Path, *, hidden: bool):
    """It is on by default: under the guard that is no reason for a warning, and no other log."""
    asked = Asked(tmp_path, spoil(samples(4), {2: "nan-input"}))
    forms.reset()
    ended: Ended = forms.trained(asked, logging_nan_inf_filter=hidden)
    (event,) = ended.guard.summary().events
    assert event.finding.name == "non-finite-loss"
    (log,) = (log for log in ended.framework.state.log_history if "loss" in log)
    good = forms.run("trainer", Asked(tmp_path, without(asked.data, {2}))).framework.state
    assert log["loss"] == pytest.approx(good.log_history[-1]["train_loss"])
