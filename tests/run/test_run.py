"""``nanguard run`` as a user meets it: a command, its output, its exit code, its incidents."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import came_to_its_end

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"
HEALTHY = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(STEPS):
    loss = (model(torch.randn(16, 4)) - 1).square().mean()
    if step == BAD:
        loss = loss / (loss * 0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("weights", sum(p.double().abs().sum() for p in model.state_dict().values()).item())
"""


def script(folder, *, bad=-1, steps=12, before="", after=""):
    path = folder / "train.py"
    body = HEALTHY.replace("STEPS", str(steps)).replace("BAD", str(bad))
    path.write_text(before + body + after)
    return path


def undefined(path):
    """Makes the fault one that a bound repairs: 0 / 0, of which it makes 0."""
    path.write_text(path.read_text().replace("loss / (loss", "loss * 0 / (loss"))
    return path


def run(folder, *arguments, options=(), timeout=180, **kwargs):
    command = [sys.executable, "-m", "nanguard", "run", "--incidents", "found", *options, "--"]
    return subprocess.run(
        [*command, *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **kwargs,
    )


def plain(folder, *arguments, **kwargs):
    return subprocess.run(
        list(map(str, arguments)),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **kwargs,
    )


def incidents(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.glob("found/*/incident.json"))]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """Returns what the healthy script prints where nothing guards it."""
    folder = tmp_path_factory.mktemp("healthy")
    return plain(folder, sys.executable, script(folder)).stdout


def test_healthy_script_is_the_same_but_for_a_line_at_its_end(tmp_path, healthy):
    done = run(tmp_path, sys.executable, script(tmp_path))
    assert done.stdout == healthy
    said = "nanguard: 12 steps guarded, none bad\nnanguard: see it: nanguard report\n"
    assert (done.returncode, done.stderr) == (0, said)
    assert not (tmp_path / "found").exists()
    quiet = run(tmp_path, sys.executable, script(tmp_path), options=["-q"])
    assert (quiet.stdout, quiet.stderr) == (healthy, "")


def test_incidents_of_an_earlier_run_are_none_of_this_one(tmp_path, healthy):
    run(tmp_path, sys.executable, script(tmp_path, bad=5), options=["--no-trace"])
    done = run(tmp_path, sys.executable, script(tmp_path))
    assert "12 steps guarded, none bad" in done.stderr


def test_bad_step_leaves_no_trace_in_the_weights(tmp_path):
    path = script(tmp_path, bad=5)
    done = run(tmp_path, sys.executable, path)
    assert done.returncode == 0
    assert "weights nan" in plain(tmp_path, sys.executable, path).stdout
    assert "nan" not in done.stdout
    assert "step 5: the loss is inf -> skip" in done.stderr
    (found,) = incidents(tmp_path)
    assert (found["step"], found["cause"]["code"]) == (5, "division-by-zero")
    assert found["origin"]["line"] == 10
    assert found["replay"]["verdict"] == "reproduced"
    assert "nanguard explain found/step-000005-rank0" in done.stderr


def test_batchnorm_statistics_are_put_back(tmp_path):
    """A bad batch must not reach running statistics either: what follows does not depend on it."""
    after = "\nprint('batches', int(model[1].num_batches_tracked))\n"
    done = run(tmp_path, sys.executable, script(tmp_path, bad=5, after=after))
    assert "batches 11" in done.stdout


def test_a_script_that_asks_for_torch_before_it_imports_it(tmp_path):
    before = "import importlib.util; assert importlib.util.find_spec('torch') is not None\n"
    run(tmp_path, sys.executable, script(tmp_path, bad=5, before=before), options=["--no-trace"])
    assert len(incidents(tmp_path)) == 1


def test_options_reach_the_run(tmp_path):
    path = script(tmp_path, bad=5)
    stopped = run(tmp_path, sys.executable, path, options=["--on-bad", "stop"])
    assert stopped.returncode == 3
    assert "weights" not in stopped.stdout
    quiet = run(tmp_path, sys.executable, path, options=["--quiet", "--no-trace"])
    assert (quiet.returncode, quiet.stderr) == (0, "")
    assert incidents(tmp_path)[-1]["replay"]["verdict"] == "not-replayed"
    most = run(tmp_path, sys.executable, path, options=["--max-bad", "0", "--no-trace"])
    assert most.returncode == 3


def test_rollback_goes_back_to_good_weights(tmp_path):
    body = HEALTHY.replace("STEPS", "6").replace("BAD", "-1")
    path = tmp_path / "train.py"
    path.write_text(
        body.replace(
            "    loss = (model", "    if step == 3:\n        spoil()\n    loss = (model", 1
        ).replace(
            "for step in",
            "def spoil():\n    with torch.no_grad():\n"
            "        model[0].weight[0, 0] = float('nan')\n\n\nfor step in",
            1,
        )
    )
    options = ["--on-bad", "rollback", "--no-trace"]
    done = run(tmp_path, sys.executable, path, options=options)
    assert done.returncode == 0
    assert "rollback" in done.stderr
    assert "nan" not in done.stdout
    # A small model has a copy without being asked.
    without = run(tmp_path, sys.executable, path, options=["--no-trace"])
    assert without.returncode == 0
    assert "rollback (the run itself holds non-finite values)" in without.stderr
    large = "model.extra = nn.Parameter(torch.zeros(5_000_000))\noptimizer ="
    path.write_text(path.read_text().replace("optimizer =", large, 1))
    without = run(tmp_path, sys.executable, path, options=["--no-trace"])
    assert without.returncode == 3  # nothing to go back to


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ("", "import os; os._exit(5)", 5),
        ("", "raise SystemExit(7)", 7),
        ("", "raise RuntimeError('own')", 1),
        ("import sys; sys.exit(4)\n", "", 4),
    ],
)
def test_exit_code_is_the_commands_own(tmp_path, before, after, code):
    path = script(tmp_path, before=before, after=after)
    done = run(tmp_path, sys.executable, path)
    assert done.returncode == code


def test_incident_outlives_a_script_that_ends_hard(tmp_path):
    path = script(tmp_path, bad=10, after="\nimport os; os._exit(0)\n")
    done = run(tmp_path, sys.executable, path)
    assert done.returncode == 0
    assert incidents(tmp_path)[0]["cause"]["code"] == "division-by-zero"


def test_a_command_without_torch_runs_as_always(tmp_path):
    done = run(tmp_path, sys.executable, "-c", "print(input())", input="from stdin\n")
    assert (done.returncode, done.stdout) == (0, "from stdin\n")
    assert "nothing was guarded" in done.stderr


@pytest.mark.parametrize("command", [[], ["no-such-command-here"]])
def test_no_command_is_a_clear_message(tmp_path, command):
    done = run(tmp_path, *command)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_module_shell_and_arguments(tmp_path):
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("")
    before = "import sys; print(sys.argv[1:], __package__)\n"
    undefined(script(tmp_path / "pkg", bad=5, before=before))
    (tmp_path / "go.sh").write_text(f"cd {tmp_path}\n{sys.executable} -m pkg.train --lr 1e-3\n")
    done = run(tmp_path, "bash", "go.sh")
    assert done.returncode == 0
    assert "['--lr', '1e-3'] pkg" in done.stdout
    (found,) = incidents(tmp_path)
    assert Path(found["origin"]["file"]).name == "train.py"
    assert found["fixes"][0]["verified"]


def test_script_can_wait_for_its_children(tmp_path):
    after = """
import os, subprocess, sys
reads = [sys.executable, "-c", "import sys; sys.stdin.read()"]
child = subprocess.Popen(reads, stdin=subprocess.PIPE)
child.stdin.close()
assert child.wait(20) == 0
try:
    os.wait()
except ChildProcessError:
    print("no children of ours")
"""
    done = run(tmp_path, sys.executable, script(tmp_path, after=after), timeout=60)
    assert "no children of ours" in done.stdout, done.stderr


def test_signals_reach_the_command(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import signal, sys, time\nimport torch\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        "print('ready', flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-m", "nanguard", "run", "--", sys.executable, str(path)]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 9
    process.stdout.close()


def test_replays_write_nothing(tmp_path):
    """The script's own files are those of the run, and of nothing that came after."""
    before = "log = open('log.txt', 'a'); open('once.txt', 'x').close()\n"
    after = "\nlog.write('end\\n'); torch.save(model.state_dict(), 'model.pt')\n"
    path = undefined(script(tmp_path, bad=5, before=before, after=after))
    path.write_text(
        path.read_text().replace(
            "    optimizer.step()\n",
            "    optimizer.step()\n    log.write(f'{step}\\n'); log.flush()\n",
        )
    )
    done = run(tmp_path, sys.executable, path)
    assert done.returncode == 0
    assert (tmp_path / "log.txt").read_text().split() == [*map(str, range(12)), "end"]
    assert incidents(tmp_path)[0]["fixes"][0]["verified"]


def test_loader_with_workers(tmp_path):
    text = (
        (SCRIPTS / "divides.py")
        .read_text()
        .replace("batch_size=8)", "batch_size=8, num_workers=2)")
    )
    (tmp_path / "train.py").write_text(text)
    done = run(tmp_path, sys.executable, "train.py")
    assert "finite True" in done.stdout
    (found,) = incidents(tmp_path)
    assert found["cause"]["code"] == "division-by-zero"
    assert (found["step"], [again["step"] for again in found["again"]]) == (5, [15])
    for one in (found, *found["again"]):
        assert one["samples"] == [2]
        assert one["dataset_indices"] == [42]


def test_script_with_a_guard_of_its_own(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nfrom torch import nn\nfrom nanguard import Guard\n"
        "torch.manual_seed(0)\nmodel = nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "guard = Guard(model, optimizer)\n"
        "for step, x in guard.enumerate([torch.randn(4, 2) for _ in range(8)]):\n"
        "    loss = model(x).square().mean() * (float('nan') if step == 3 else 1.0)\n"
        "    guard.backward(loss)\n    guard.step()\nguard.close()\n"
        "print(guard.summary().skipped, model.weight.sum().item())\n"
    )
    bare = plain(tmp_path, sys.executable, path)
    done = run(tmp_path, sys.executable, path)
    assert done.stdout == bare.stdout
    assert done.stdout.startswith("1 ")
    assert "has a Guard of its own" in done.stderr
    (found,) = incidents(tmp_path)
    assert (found["step"], found["action"]["taken"]) == (3, "skip")
    assert (found["origin"]["op"], found["origin"]["line"]) == ("aten.mul", 9)


@pytest.mark.parametrize("bad", [False, True])
def test_loop_without_optimizer_says_so_once_a_step_is_bad(tmp_path, bad):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nw = torch.nn.Linear(2, 1)\n"
        "for step in range(4):\n    loss = w(torch.ones(1, 2)).sum() ** 2\n"
        f"    loss = loss * 0 / float(step < 2) if {bad} else loss\n"
        "    w.zero_grad()\n    loss.backward()\n    with torch.no_grad():\n"
        "        for p in w.parameters():\n            p -= 0.01 * p.grad\n"
    )
    done = run(tmp_path, sys.executable, path)
    assert done.returncode == 0
    assert done.stderr.count("no torch optimizer was made") == bad
    assert ("4 steps guarded, none bad" in done.stderr) != bad


@pytest.mark.parametrize("way", ["bad", "large"])
def test_gradients_that_a_scaler_would_leave_out_at_any_scale(tmp_path, way):
    script = SCRIPTS / "left_to_a_scaler.py"
    done = run(tmp_path, sys.executable, script, way)
    bare = plain(tmp_path, sys.executable, script, way)
    assert done.stdout == bare.stdout
    assert "25 " in done.stdout
    assert "512.0" in done.stdout, "the scale was not too large"
    if way == "large":
        assert incidents(tmp_path) == []
        return
    first, *others = incidents(tmp_path)
    assert not others
    lines = enumerate(script.read_text().splitlines(), start=1)
    fault = next(number for number, line in lines if "FAULT AT ANY SCALE" in line)
    assert (first["step"], first["symptom"]["where"]) == (25, "gradient")
    assert first["origin"]["line"] == fault
    assert first["cause"]["code"] == "gradient-singularity"
    assert first["fixes"][0]["verified"]


def test_two_ranks_one_poisoned(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    port = str(29600 + int(time.time()) % 300)
    done = run(tmp_path, *torchrun, "--master-port", port, SCRIPTS / "ddp.py")
    assert came_to_its_end(done.returncode, done.stderr), done.stderr
    weights = re.findall(r"weights (-?[\d.]+|nan|-?inf)", done.stdout)
    assert len(weights) == 2
    assert len(set(weights)) == 1
    assert "n" not in weights[0]
    (found,) = incidents(tmp_path)
    assert (found["step"], found["rank"]) == (4, 1)
    assert found["cause"]["code"] == "division-by-zero"
    assert found["replay"]["method"] == "in-place"
    assert found["samples"] == [2]
    assert done.stdout.count(" step 7 ") == 2  # counted, not by line: ranks share one pipe


def test_bad_loss_of_one_rank_whose_gradient_is_finite(tmp_path):
    """Cross-entropy of labels that are all ignored is NaN, and its gradient 0."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    port = str(29300 + int(time.time()) % 200)
    done = run(tmp_path, *torchrun, "--master-port", port, SCRIPTS / "ddp_ignored.py")
    (found,) = incidents(tmp_path)
    assert (found["step"], found["rank"], found["action"]["taken"]) == (4, 1, "noted"), done.stderr
    assert found["cause"]["code"] == "empty-reduction"
    assert done.stdout.count("made 8 steps") == 2


def test_ranks_that_talk_in_their_forward_pass_replay_together(tmp_path):
    """One of them alone would get another norm, and its part would be taken for the next step's."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    port = str(29100 + int(time.time()) % 100)
    script = SCRIPTS / "ddp_own_norm.py"
    done = run(tmp_path, *torchrun, "--master-port", port, script)
    assert came_to_its_end(done.returncode, done.stderr), done.stderr
    (found,) = incidents(tmp_path)
    line = script.read_text().splitlines().index("        return (x - mean) / spread.sqrt()") + 1
    assert (found["step"], found["origin"]["line"]) == (5, line)
    assert found["cause"]["code"] == "division-by-zero"
    assert found["replay"]["method"] == "in-place"
    weights = re.findall(r"weights (-?[\d.]+|nan|-?inf)", done.stdout)
    assert len(weights) == 2
    assert len(set(weights)) == 1
    assert done.stdout.count(" step 7 ") == 2


def test_rank_that_cannot_make_the_steps_before_by_itself(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    port = str(29900 + int(time.time()) % 90)
    done = run(tmp_path, *torchrun, "--master-port", port, SCRIPTS / "ddp_driven.py")
    found = incidents(tmp_path)[0]
    assert (found["step"], found["rank"]) == (6, 0), done.stderr
    assert found["replay"]["verdict"] == "reproduced"
    assert (found["cause"]["code"], found["origin"]["op"]) == ("exp-overflow", "aten.exp")
    refused = [trial for trial in found["trials"] if "ten times lower" in trial["what"]]
    assert all(trial["finite"] is None for trial in refused)


def test_loss_terms_are_named(tmp_path):
    path = script(tmp_path, bad=-1)
    text = path.read_text().replace(
        "    if step == -1:\n        loss = loss / (loss * 0)\n",
        "    fit = loss\n    decay = torch.log(torch.zeros(()) + (step != 4))\n"
        "    loss = fit + 0.1 * decay\n",
    )
    path.write_text(text)
    run(tmp_path, sys.executable, path)
    (found,) = incidents(tmp_path)
    assert found["symptom"]["terms"]["decay"] == "-inf"
    assert isinstance(found["symptom"]["terms"]["fit"], float)


@pytest.mark.parametrize(
    "backward",
    [
        "(loss / 4).backward()",
        "loss = loss / 4\n    loss.backward()",
        "loss /= 4\n    loss.backward()",
    ],
)
def test_loss_terms_are_named_where_the_sum_is_scaled(tmp_path, backward):
    path = script(tmp_path, bad=-1)
    text = path.read_text().replace(
        "    if step == -1:\n        loss = loss / (loss * 0)\n",
        "    fit = loss\n    decay = torch.log(torch.zeros(()) + (step != 4))\n"
        "    loss = fit + 0.1 * decay\n",
    )
    path.write_text(text.replace("loss.backward()", backward))
    run(tmp_path, sys.executable, path, options=["--no-trace"])
    (found,) = incidents(tmp_path)
    assert set(found["symptom"]["terms"]) == {"fit", "decay"}
    assert found["symptom"]["terms"]["decay"] == "-inf"


def test_fixes_are_tried_where_a_module_of_the_script_needs_torch_first(tmp_path):
    (tmp_path / "parts.py").write_text("import torch\n\ndef noise():\n    return torch.ones(())\n")
    path = undefined(script(tmp_path, bad=5, before="import parts\n"))
    path.write_text(path.read_text().replace("(loss * 0)", "(loss * 0 * parts.noise())"))
    run(tmp_path, sys.executable, path)
    (found,) = incidents(tmp_path)
    fix = next(fix for fix in found["fixes"] if fix.get("diff"))
    assert fix["verified"], fix
    assert fix["how"].startswith("replayed step 5:")


def test_unusual_scripts_are_left_alone(tmp_path):
    bare = plain(tmp_path, sys.executable, "-W", "ignore", SCRIPTS / "unusual.py")
    done = run(tmp_path, sys.executable, "-W", "ignore", SCRIPTS / "unusual.py")
    assert bare.returncode == 0, bare.stderr
    assert done.stdout == bare.stdout
    # One of them leaves out a bad step by itself, which is told, once.
    (told,) = [line for line in done.stderr.splitlines() if " -> " in line]
    assert "the script did not make the step; 1 of " in told
    (found,) = incidents(tmp_path)
    assert found["by_script"]


@pytest.mark.parametrize("part", ["verdict", "good"])
def test_a_guard_that_fails_stands_aside(tmp_path, healthy, part):
    """Before a step is made, or after: then it is not made again."""
    before = (
        "import torch\nfrom nanguard.run.live import Live\n"
        f"def broken(*_, **__): raise KeyError('ours')\nLive.{part} = broken\n"
    )
    done = run(tmp_path, sys.executable, script(tmp_path, before=before))
    assert (done.returncode, done.stdout) == (0, healthy)
    assert done.stderr.count("not guarded any more: KeyError('ours')") == 1


def test_what_the_scripts_own_step_raises_is_raised(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nw = torch.nn.Linear(2, 1)\n"
        "class Refuses(torch.optim.SGD):\n    def step(self, closure=None):\n"
        "        raise ValueError('own')\n"
        "optimizer = Refuses(w.parameters(), lr=0.1)\nw(torch.ones(1, 2)).sum().backward()\n"
        "try:\n    optimizer.step()\nexcept ValueError as error:\n    print(error)\n"
    )
    done = run(tmp_path, sys.executable, path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "own\n", "")


@pytest.mark.parametrize("optimizer", [True, False])
def test_tracker_that_is_broken_does_not_end_the_run(tmp_path, healthy, optimizer):
    (tmp_path / "tensorboard").mkdir()
    broken = "raise TypeError('Descriptors cannot be created directly')\n"
    (tmp_path / "tensorboard" / "__init__.py").write_text(broken)
    path = script(tmp_path)
    if not optimizer:
        made = path.read_text().replace("torch.optim.AdamW(model.parameters(), lr=1e-2)", "model")
        path.write_text(made.replace("    optimizer.step()\n", ""))
    done = run(tmp_path, sys.executable, path, options=["--track", "tensorboard", "--no-trace"])
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the run is not tracked: the tracker tensorboard is installed") == 1
    assert not optimizer or done.stdout == healthy


def test_incident_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "found").touch()
    done = run(tmp_path, sys.executable, script(tmp_path, bad=5))
    assert done.returncode == 0
    assert "nan" not in done.stdout
    assert "could not be written" in done.stderr
