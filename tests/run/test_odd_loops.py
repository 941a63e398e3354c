"""Loops that are not the usual one, under ``nanguard run``: only the bad step is left out."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.run.scripts import odd
from tests.run.test_run import incidents, run

pytestmark = pytest.mark.slow

SCRIPT = Path(odd.__file__)


def weights(bad: int = 3) -> str:
    """Returns what a loop shows that has not made the bad step, or has none."""
    model, optimizer = odd.make()
    for number in range(6):
        if number != bad:
            odd.step(model, optimizer, number, -1)
    return str([round(value, 5) for value in model.weight.flatten().tolist()])


@pytest.fixture(autouse=True)
def alike():
    """Here and there one thread computes, so that sums come out alike."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_asyncio_threads_profilers_and_tracing(tmp_path: Path):
    done = run(tmp_path, sys.executable, SCRIPT, "others")
    assert (done.returncode, done.stdout.splitlines()) == (
        0,
        [
            f"asyncio 3 {weights()}",
            f"asyncio -1 {weights(-1)}",
            f"pool {weights()}",
            f"profiler {weights()}",
            f"cProfile {weights()}",
            f"settrace {weights()}",
            "True",
        ],
    ), done.stderr
    assert incidents(tmp_path)[0]["origin"]["op"] == "aten.log"
    assert done.stderr.count("step 3: ") >= 2
    assert "not guarded" not in done.stderr


def test_of_threads_that_train_at_once_one_is_guarded_and_the_other_named(tmp_path: Path):
    done = run(tmp_path, sys.executable, SCRIPT, "at_once")
    assert done.returncode == 0, done.stderr
    (alone, watched) = re.findall(
        r"nanguard: (\w+) trains at the same time as (\w+): the steps of \1 are not guarded",
        done.stderr,
    )[0]
    shown = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    model, optimizer = odd.make()
    for number in range(6):
        odd.step(model, optimizer, number)
    everything = str([round(value, 5) for value in model.weight.flatten().tolist()])
    assert shown == {alone: everything, watched: weights(), "after": weights()}
    assert {one["step"] for one in incidents(tmp_path)} == {3}
    assert "not guarded any more" not in done.stderr


def test_a_thread_whose_loss_went_to_the_step_of_another_is_named(tmp_path: Path):
    done = run(tmp_path, sys.executable, SCRIPT, "in_between", options=("--no-trace",))
    assert done.returncode == 0, done.stderr
    said = "outer trains at the same time as inner: the steps of outer are not guarded"
    assert said in done.stderr


def test_a_timer_that_rings_all_the_time(tmp_path: Path):
    done = run(tmp_path, sys.executable, SCRIPT, "alarms")
    assert done.stdout.splitlines() == [f"alarms {weights()}", "True"], done.stderr
    assert [one["step"] for one in incidents(tmp_path)] == [3]


def test_what_a_signal_handler_raises_is_the_scripts_own(tmp_path: Path):
    """Wherever it interrupts nanguard; the process is guarded afterwards as before."""
    done = run(tmp_path, sys.executable, SCRIPT, "raises", options=("--no-trace",))
    assert done.stdout.splitlines() == ["caught 1"], done.stderr
    assert "not guarded" not in done.stderr
    assert len(incidents(tmp_path)) == 1


def test_a_fork_and_hard_ends(tmp_path: Path):
    done = run(tmp_path, sys.executable, SCRIPT, "forks")
    assert (done.returncode, done.stdout.splitlines()) == (
        7,
        [f"child {weights()}", "child ended with 5", f"parent {weights()}"],
    ), done.stderr
    assert [one["cause"]["code"] for one in incidents(tmp_path)] == ["log-or-sqrt-domain"]


@pytest.mark.parametrize("how", ["objects", "files"])
def test_a_script_without_standard_streams(tmp_path: Path, how: str):
    done = run(tmp_path, sys.executable, SCRIPT, "closed", how, options=("--no-trace",))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "weights").read_text() == "True"
    assert [one["step"] for one in incidents(tmp_path)] == [3]


@pytest.mark.parametrize("then", ["go-on", "end"])
def test_ctrl_c_during_an_explanation(tmp_path: Path, then: str):
    """Everything is put back; who catches it goes on, and the step stays skipped."""
    command = [sys.executable, "-m", "nanguard", "run", "--incidents", "found", "--"]
    process = subprocess.Popen(
        [*command, sys.executable, str(SCRIPT), "interrupted", then, "slow"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not list(tmp_path.glob("found/*/incident.json")) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    said, errors = process.communicate(timeout=180)
    interrupted, end = said.splitlines()
    assert interrupted == "interrupted at 3", errors
    model, optimizer = odd.make()
    for number in range(3):
        odd.step(model, optimizer, number)
    before = str([round(value, 5) for value in model.weight.flatten().tolist()])
    assert end == f"end {weights() if then == 'go-on' else before}"
    assert process.returncode == (0 if then == "go-on" else 130)
    (one,) = incidents(tmp_path)
    assert one["replay"]["why"] == "the explanation was interrupted"


@pytest.mark.exhaustive
def test_processes_that_the_script_spawns(tmp_path: Path):
    done = run(tmp_path, sys.executable, SCRIPT, "spawns")
    expected = [f"rank 0 {weights(-1)}", f"rank 1 {weights()}"]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr
    assert [one["origin"]["op"] for one in incidents(tmp_path)] == ["aten.log"]


ASKS_FIRST = """
import sys
import torch

def look_at(loss):
    if torch.isnan(loss).any() or torch.isinf(loss).any():
        sys.exit(0)

torch.manual_seed(0)
weight = torch.zeros(3, 1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
x = torch.randn(8, 3)
while True:
    x = x.detach().requires_grad_()
    chance = torch.sigmoid(x @ weight + 1)
    (slope,) = torch.autograd.grad(chance.min(), x, retain_graph=True)
    loss = -torch.log(1 - chance).mean()
    look_at(loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    x = x + 30 * torch.sign(weight.detach().t())
"""


def test_a_script_that_asks_for_gradients_and_then_ends_itself(tmp_path: Path):
    """What it asks for comes before the loss: the step has only begun when it leaves."""
    script = tmp_path / "train.py"
    script.write_text(ASKS_FIRST)
    done = run(tmp_path, sys.executable, script)
    assert done.returncode == 0, done.stderr
    (found,) = incidents(tmp_path)
    assert "the script ended itself" in found["action"]["reason"]
    assert (found["origin"]["op"], found["origin"]["line"]) == ("aten.log", 17)
    assert found["cause"]["code"] == "log-or-sqrt-domain"
