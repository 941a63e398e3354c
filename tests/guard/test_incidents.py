"""Bad steps of a guard become incidents, and explaining them does not touch the run."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nanguard import Guard, NonFiniteError, Settings, incident
from nanguard.cli.incident_names import incidents_named
from nanguard.errors import UsageError
from nanguard.replay.tracer import tensor_values as values
from nanguard.view.runs.run_finder import find_runs
from tests.training import NAN, differences, seed_all

QUIET = Settings(snapshot_every=0, spikes="off")


class Logs(nn.Module):
    """A model that takes the logarithm of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = self.last(self.drop(self.norm(self.first(x)))).squeeze(-1)
        return (out * torch.log(w)).mean() + out.square().mean()

    def divided(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Divides by it instead, in the type that autocast computes in."""
        out = self.last(self.drop(self.norm(self.first(x)))).squeeze(-1)
        return (out / w.to(out.dtype)).square().mean()


LINE = next(
    number
    for number, line in enumerate(Path(__file__).read_text().splitlines(), 1)
    if "torch.log(w)).mean()" in line
)


def data(*bad: int, device: str = "cpu", count: int = 10) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(count * 4, 4, generator=generator), torch.full((count * 4,), 0.5)
    for batch in bad:
        w[4 * batch + 2] = 0.0
    return TensorDataset(x.to(device), w.to(device))


class Run:
    """A run under a guard, and all that two of them are compared by."""

    def __init__(self, device: str = "cpu", **options: Any) -> None:
        seed_all(0)
        self.model = Logs().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.device = device
        self.guard = Guard(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            **{"settings": QUIET, **options},
        )

    def fit(self, given: TensorDataset, *, accumulate: int = 1, **loader: Any) -> Run:
        with self.guard:
            for index, (x, w) in self.guard.enumerate(DataLoader(given, 4, **loader)):
                self.guard.backward(self.model(x, w) / accumulate)
                if (index + 1) % accumulate == 0:
                    self.guard.step(max_norm=1.0)
        return self

    def everything(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if self.device == "cuda" else None,
        }


def check(folder: Path, step: int, method: str) -> dict[str, Any]:
    found = incident.read(folder / f"step-{step:06d}-rank0")
    assert (found["symptom"]["where"], found["symptom"]["kind"]) == ("loss", "inf")
    assert (found["origin"]["op"], found["origin"]["line"]) == ("aten.log", LINE)
    assert found["cause"]["code"] == "log-or-sqrt-domain"
    assert found["samples"] == [2]
    assert found["fixes"][0]["verified"]
    assert found["replay"]["verdict"] == "reproduced"
    assert found["replay"]["method"] == method
    return found


def test_a_bad_step_is_explained_in_place(tmp_path: Path):
    run = Run(incidents=tmp_path).fit(data(4))
    found = check(tmp_path, 4, "in-place")
    assert found["dataset_indices"] == [18]
    assert found["action"]["taken"] == "skip"
    assert differences(run.everything(), Run().fit(data(4)).everything()) == []


@pytest.mark.parametrize("place", [True, "incidents"])
def test_a_run_folder_is_shown_with_its_incidents(tmp_path: Path, place: Any, monkeypatch: Any):
    """The layout of ``nanguard run``; incidents in a folder of their own were the custom before."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/night")
    wanted = True if place is True else folder / place
    Run(run_dir=folder, incidents=wanted).fit(data(4))
    found = folder / ("" if place is True else place) / "step-000004-rank0"
    check(found.parent, 4, "in-place")
    (run,) = find_runs(["runs"])
    assert (run.path, run.logs) == (folder, [folder / "metrics.jsonl"])
    assert (run.events, run.incidents) == (folder / "events.jsonl", [found])
    assert incidents_named("runs/night", "nanguard explain") == [found]


def test_incidents_in_the_run_folder_need_one():
    with pytest.raises(UsageError) as caught:
        Run(incidents=True)
    assert "there is no run folder to keep incidents in." in str(caught.value)
    assert 'run_dir="runs/night", incidents=True' in str(caught.value)


def test_the_item_is_named_where_numbers_are_read_late(tmp_path: Path, monkeypatch: Any):
    """As on a device."""
    monkeypatch.setattr(values, "is_late", lambda tensor: True)
    Run(incidents=tmp_path).fit(data(4))
    assert check(tmp_path, 4, "in-place")["dataset_indices"] == [18]


def test_a_loader_with_workers(tmp_path: Path):
    Run(incidents=tmp_path).fit(data(3, count=5), num_workers=1)
    check(tmp_path, 3, "in-place")


@pytest.mark.parametrize(("lag", "accumulate"), [(0, 1), (2, 1), (0, 2)])
def test_an_explanation_leaves_the_run_alone(lag: int, accumulate: int, tmp_path: Path):
    backward = torch.autograd.backward
    settings = Settings(snapshot_every=0, spikes="off", lag=lag)
    run = Run(incidents=tmp_path, settings=settings)
    ended = run.fit(data(4, 9), accumulate=accumulate).everything()
    clean = Run(settings=settings).fit(data(4, 9), accumulate=accumulate).everything()
    assert differences(ended, clean) == []
    check(tmp_path, 4 // accumulate, "in-place")
    found = incident.read(tmp_path / f"step-{4 // accumulate:06d}-rank0")
    assert [later["step"] for later in found["again"]] == [9 // accumulate]
    assert torch.autograd.backward is backward


def test_explaining_leaves_mixed_precision_on(tmp_path: Path):
    """A step is tried in float32, too; an autocast that lasts must come back from that."""
    cast, ended = torch.autocast("cpu", torch.bfloat16), []
    for incidents in (tmp_path, None):
        run = Run(incidents=incidents)
        run.model.forward = cast(functools.partial(Logs.divided, run.model))
        ended.append(run.fit(data(4)).everything())
    assert differences(*ended) == []
    trials = incident.read(tmp_path / "step-000004-rank0")["trials"]
    assert any("float32" in trial["what"] for trial in trials)


def test_a_loop_that_is_left_early(tmp_path: Path):
    backward = torch.autograd.backward
    run = Run(incidents=tmp_path)
    for bodies, (x, w) in enumerate(run.guard.watch(DataLoader(data(1), 4))):
        run.guard.backward(run.model(x, w))
        run.guard.step()
        if bodies == 2:
            break
    run.guard.close()
    assert torch.autograd.backward is backward
    assert incident.read(tmp_path / "step-000001-rank0")["symptom"]["kind"] == "inf"
    assert run.guard.steps == 3


def test_a_run_that_is_stopped_is_explained(tmp_path: Path):
    run = Run(incidents=tmp_path, settings=Settings(on_bad="stop"))
    with pytest.raises(NonFiniteError):
        run.fit(data(2))
    assert check(tmp_path, 2, "in-place")["action"]["taken"] == "stop"


def test_a_loop_without_watch(tmp_path: Path):
    run = Run(incidents=tmp_path)
    with run.guard:
        for x, w in DataLoader(data(3), 4):
            run.guard.backward(run.model(x, w))
            run.guard.step()
    check(tmp_path, 3, "in-place")


def test_a_resumed_run_counts_on(tmp_path: Path):
    first = Run().fit(data(count=4))
    run = Run(incidents=tmp_path)
    run.model.load_state_dict(first.model.state_dict())
    run.guard.load_state_dict(first.guard.state_dict())
    run.fit(data(3, count=5))
    check(tmp_path, 7, "in-place")


def test_two_optimizers_that_step_as_one(tmp_path: Path):
    seed_all(0)
    models = [Logs(), Logs()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]

    def train(guard: Guard) -> None:
        # Code of its own: pytest compiles what has assertions in it from another source.
        for x, w in guard.watch(DataLoader(data(2), 4)):
            guard.backward(models[0](x, torch.ones_like(w)) + models[1](x, w))
            guard.step()

    with Guard(models, optimizers, incidents=tmp_path, settings=QUIET) as guard:
        train(guard)
    found = incident.read(tmp_path / "step-000002-rank0")
    assert (found["origin"]["line"], found["step"]) == (LINE, 2)
    assert found["cause"]["code"] == "log-or-sqrt-domain"


def test_an_optimizer_that_evaluates_the_loss_itself(tmp_path: Path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.LBFGS(model.parameters())
    with Guard(model, optimizer, incidents=tmp_path, settings=QUIET) as guard:
        for x in guard.watch([torch.ones(3, 2), torch.ones(3, 2), torch.zeros(3, 2)]):

            def closure(x: torch.Tensor = x) -> torch.Tensor:
                optimizer.zero_grad()
                loss = torch.log(x).mean() * model(x).square().mean()
                guard.backward(loss)
                return loss

            guard.step(closure=closure)
    found = incident.read(tmp_path / "step-000002-rank0")
    assert found["replay"]["verdict"] == "reproduced"
    assert found["origin"]["op"] == "aten.log"


def test_what_is_not_replayed_says_why(tmp_path: Path):
    run = Run(incidents=tmp_path, settings=Settings(snapshot_every=0))
    batches = [(torch.randn(4, 4), torch.full((4,), 0.5)) for _ in range(80)]
    batches[75] = (batches[75][0] * 1e4, batches[75][1])
    with run.guard:
        for x, w in run.guard.watch(batches):
            run.guard.backward(run.model(x, w) * (1e9 if x.abs().max() > 1e3 else 1.0))
            run.guard.step()
    found = incident.read(tmp_path / "step-000075-rank0")
    assert found["replay"]["verdict"] == "not-replayed"
    assert "a spike is a finite number" in found["replay"]["why"]
    assert "cause" not in found


SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.guard.test_incidents import Run, data
Run().fit(data(4))
"""


def test_under_the_launcher_the_guard_decides_and_the_launcher_records(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(root=str(Path(__file__).parents[2])))
    command = [sys.executable, "-m", "nanguard", "run", "--incidents", str(tmp_path / "found")]
    command += ["--", sys.executable, str(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = check(tmp_path / "found", 4, "in-place")
    assert found["action"]["taken"] == "skip"
    assert "log-or-sqrt-domain" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
@pytest.mark.parametrize("lag", [0, 2])
def test_on_cuda_an_explanation_leaves_the_run_alone(lag: int, tmp_path: Path):
    settings = Settings(snapshot_every=0, spikes="off", lag=lag)
    run = Run("cuda", incidents=tmp_path, settings=settings)
    ended = run.fit(data(4, 7, device="cuda")).everything()
    clean = Run("cuda", settings=settings).fit(data(4, 7, device="cuda")).everything()
    assert differences(ended, clean) == []
    found = check(tmp_path, 4, "in-place")
    assert [later["step"] for later in found["again"]] == [7]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_a_batch_that_is_bad_on_the_device_is_no_fault_of_the_model(tmp_path: Path):
    given = data(device="cuda")
    given.tensors[0][4 * 3 + 1, 2] = NAN
    Run("cuda", incidents=tmp_path).fit(given)
    found = incident.read(tmp_path / "step-000003-rank0")
    assert (found["origin"]["op"], found["cause"]["code"]) == ("input", "bad-input-data")
    assert found["samples"] == [1]
