"""``nanguard run --recover``: real scripts that die, diverge, are killed, and go on."""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from nanguard.run.command import run_command
from nanguard.run.recovering.ladder import RunEnding, read_ending

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT = SCRIPTS / "resumable.py"
RESUME = ("--resume-arg", "--resume {checkpoint}")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def start(folder, *command, options=RESUME):
    own = [sys.executable, "-m", "nanguard", "run", "--recover", "--incidents", "found"]
    return subprocess.Popen(
        [*own, "--no-trace", "--backoff", "0", *options, "--", *map(str, command)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def recover(folder, *command, options=RESUME):
    process = start(folder, *command, options=options)
    out, err = process.communicate(timeout=180)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def train(folder, *arguments, options=RESUME):
    return recover(folder, sys.executable, SCRIPT, *arguments, options=options)


def plain(folder, monkeypatch, capsys, *arguments):
    """Runs the script here, unguarded; returns what it prints."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, arguments)])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return capsys.readouterr().out


def lineage(folder):
    return [json.loads(line) for line in (folder / "found/lineage.jsonl").read_text().splitlines()]


def weights(out):
    return out.split("weights ")[1].split()[0]


def starts(folder):
    """The steps at which the attempts have begun, as the script itself tells."""
    return [int(line) for line in (folder / "ckpt/starts.txt").read_text().split()]


# The ways a run ends.


def test_script_that_dies_over_a_nan_resumes_at_its_milestone(tmp_path):
    """Told through a copy of its configuration; the original and all comments stay."""
    config = tmp_path / "radio.yaml"
    text = textwrap.dedent("""\
        trainer:
          lr: 5.0e-2            # too high?
          resume_milestone: 0   # 0 begins anew
          skip_steps: 0
        """)
    config.write_text(text)
    keys = ["--config", "radio.yaml", "--resume-key", "trainer.resume_milestone={step}"]
    keys += ["--skip-key", "trainer.skip_steps"]
    arguments = [
        "--config",
        "radio.yaml",
        "--raises",
        "--bad-from",
        26,
        "--bad-to",
        27,
        "--pause",
        0.012,
    ]
    done = train(tmp_path, *arguments, options=keys)
    assert done.returncode == 0, done.stderr
    assert "finite True" in done.stdout
    first, second = lineage(tmp_path)
    assert (first["outcome"], first["steps"], first["then"]) == ("non-finite", 27, "restart")
    assert "RuntimeError at resumable.py:" in first["reason"]
    assert "step 26: loss_simple: nan" in first["reason"]
    assert first["lost"] <= 10  # checkpoints are 10 steps apart
    assert (second["outcome"], second["step"]) == ("done", 20)
    assert second["changes"] == {"lr": 0.025, "skip": 7, "config": "radio_attempt2.yaml"}
    assert starts(tmp_path) == [0, 20]
    assert config.read_text() == text
    expected = text.replace("5.0e-2 ", "0.025 ").replace(": 0   #", ": 20   #")
    assert (tmp_path / "radio_attempt2.yaml").read_text() == expected.replace(
        "steps: 0", "steps: 7"
    )
    (entry,) = json.loads((tmp_path / ".nanguard/configs/index.json").read_text())["entries"]
    assert entry["changes"][0]["title"] == "trainer.resume_milestone: 20"
    assert "restart 1 of 3 from ckpt/model-20.pt (step 20), learning rate 0.025" in done.stderr
    assert "attempt 2: it came to its end after 20 steps" in done.stderr


@pytest.mark.exhaustive
def test_run_that_was_poisoned_long_ago_goes_back_far(tmp_path, monkeypatch, capsys):
    """Unguarded it goes on for ever on NaN; its newest checkpoints are all poisoned."""
    bad = ["--bad-from", 13, "--bad-to", 14, "--every", 5]
    spoilt = plain(tmp_path, monkeypatch, capsys, *bad, "--steps", 100, "--pause", 0)
    assert "finite False" in spoilt
    options = [*RESUME, "--lr-arg", "--lr {lr}", "--lr", "0.05", "--checkpoints", "ckpt"]
    newest = ["--steps", 120, "--resume", "ckpt/model-100.pt"]
    done = train(tmp_path, *bad, *newest, options=options)
    assert done.returncode == 0, done.stderr
    assert "finite True" in done.stdout
    assert starts(tmp_path) == [0, 100, 10]
    first, second = lineage(tmp_path)
    assert first["outcome"] == "stopped"
    assert "the run itself holds non-finite values" in first["reason"]
    assert (second["checkpoint"], second["step"]) == ("ckpt/model-10.pt", 10)
    assert second["changes"] == {"lr": 0.025}
    assert second["incidents"] == ["step-000003-rank0"]


def test_diverging_run_is_stopped_by_the_ladder_and_goes_on_slower(tmp_path):
    """The loss overflows at last; weights that have exploded before are no good state either."""
    arguments = ["--lr", 0.15, "--scale", 3.0, "--every", 5, "--steps", 120, "--pause", 0]
    options = [*RESUME, "--lr-arg", "--lr {lr}", "--lr-cut", "0.25", "--checkpoints", "ckpt"]
    done = train(tmp_path, *arguments, options=options)
    assert done.returncode == 0, done.stderr
    first, second = lineage(tmp_path)
    assert first["outcome"] == "stopped"
    assert len(first["incidents"]) > 5  # the ladder has skipped and cut before it stopped
    assert "with bad numbers" in first["checkpoints"]
    assert second["changes"] == {"lr": 0.0375}
    assert second["step"] <= 30
    assert float(done.stdout.split("loss ")[1].split()[0]) < 1


def test_killed_at_any_moment_nothing_is_lost(tmp_path, monkeypatch, capsys):
    """Weights end as those of the run that nobody killed."""
    arguments = ["--steps", 60, "--every", 5, "--pause", 0.01]
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole = plain(tmp_path / "whole", monkeypatch, capsys, *arguments)
    options = [*RESUME, "--max-restarts", "6", "--lr-arg", "--lr {lr}", "--lr", "0.05"]
    killed = [*arguments, "--kills", 2, "--kill-within", 0.4]
    done = train(tmp_path / "killed", *killed, options=options)
    assert done.returncode == 0, done.stderr
    assert weights(done.stdout) == weights(whole)
    lines = lineage(tmp_path / "killed")
    assert [line["outcome"] for line in lines] == ["killed"] * 2 + ["done"]
    # The moment may be that of the write: then that checkpoint is lost, too.
    assert all(line["lost"] <= 10 for line in lines[:-1])
    assert all("lr" not in line["changes"] for line in lines)
    assert "SIGKILL killed it (out of memory, perhaps)" in lines[0]["reason"]


@pytest.mark.exhaustive
def test_newest_checkpoint_that_is_cut_off_is_passed_over(tmp_path):
    arguments = ["--kills", 1, "--kill-within", 0.5, "--cut-newest", "--pause", 0.02]
    done = train(tmp_path, *arguments, "--every", 5)
    assert done.returncode == 0, done.stderr
    first, second = lineage(tmp_path)
    assert "1 damaged" in first["checkpoints"]
    assert second["step"] == int((tmp_path / "ckpt/cut.txt").read_text()) - 5
    assert "finite True" in done.stdout


@pytest.mark.exhaustive
def test_without_a_checkpoint_it_begins_anew(tmp_path):
    """Only the learning rate can help; what was looked at is said."""
    arguments = ["--lr", 0.3, "--scale", 3.0, "--every", 1000, "--steps", 120, "--pause", 0]
    options = [*RESUME, "--lr-arg", "--lr {lr}", "--lr-cut", "0.1", "--max-bad", "0"]
    done = train(tmp_path, *arguments, options=options)
    assert done.returncode == 0, done.stderr
    first, second = lineage(tmp_path)
    assert first["checkpoints"].startswith("no checkpoint in .")
    assert (second["checkpoint"], second["changes"]) == (None, {"lr": 0.03})
    assert starts(tmp_path) == [0, 0]
    assert "restart 1 of 3 as at first, learning rate 0.03" in done.stderr


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("script", "outcome", "bad", "tried", "rate"),
    [
        ("two_optimizers.py", RunEnding.STOPPED, (3, 6), 7, 0.1),
        ("guarded_resumed.py", RunEnding.NON_FINITE, (5, 9), 10, 0.1),
    ],
)
def test_steps_are_counted_in_one_way(tmp_path, script, outcome, bad, tried, rate):
    """Whatever an incident counts: two optimizers as one, or from the beginning of a long run."""
    control = tmp_path / "control"
    control.mkdir()
    guarding = {"incidents": tmp_path / "found", "max_bad": 1, "trace": False, "quiet": True}
    command = [sys.executable, str(SCRIPTS / script)]
    ending = read_ending(control, run_command(command, control=control, **guarding), ())
    assert (ending.outcome, ending.bad, ending.tried) == (outcome, bad, tried)
    assert ending.rate == rate


# When it is left alone.


@pytest.mark.exhaustive
def test_nothing_helps(tmp_path):
    """It ends with a diagnosis; the exit code is the guard's."""
    arguments = ["--bad-from", 17, "--bad-to", 1000, "--every", 5, "--pause", 0]
    options = [*RESUME, "--lr-arg", "--lr {lr}", "--lr", "0.05", "--on-bad", "stop"]
    done = train(tmp_path, *arguments, options=[*options, "--max-restarts", "1"])
    assert done.returncode == 3
    lines = lineage(tmp_path)
    assert [line["step"] for line in lines] == [None, 15]
    assert [line["changes"].get("lr") for line in lines] == [None, 0.025]
    assert lines[-1]["then"] == "1 restart spent, and no more are allowed"
    assert "not started again: 1 restart spent, and no more are allowed" in done.stderr
    assert "the last good one is ckpt/model-15.pt (step 15)" in done.stderr
    assert "nanguard explain found/step-" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["-c", "import argparse, sys; sys.exit(2)"], 2, "it ended with exit code 2, before its"),
        (["-c", "this is no Python"], 1, "a restart would end in the same way"),
    ],
)
def test_command_that_cannot_begin_is_not_started_again(tmp_path, arguments, code, said):
    done = recover(tmp_path, sys.executable, *arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert len(lineage(tmp_path)) == 1


@pytest.mark.exhaustive
def test_restart_that_the_command_does_not_understand(tmp_path):
    save(tmp_path / "ckpt/model-2.pt")
    killed_once = "import os, sys; len(sys.argv) > 1 and sys.exit(2); os.kill(os.getpid(), 9)"
    options = [*RESUME, "--checkpoints", "ckpt"]
    done = recover(tmp_path, sys.executable, "-c", killed_once, options=options)
    assert done.returncode == 2
    assert lineage(tmp_path)[1]["command"][-2:] == ["--resume", "ckpt/model-2.pt"]
    assert "look whether the command understands" in done.stderr


def test_checkpoint_that_cannot_be_loaded_gives_way_to_an_older_one(tmp_path):
    for step in (2, 4):
        save(tmp_path / f"ckpt/model-{step}.pt")
    picky = (
        "import os, sys; len(sys.argv) == 1 and os.kill(os.getpid(), 9); "
        "sys.exit('another model' if '4' in sys.argv[-1] else 0)"
    )
    options = [*RESUME, "--checkpoints", "ckpt/*.pt"]
    done = recover(tmp_path, sys.executable, "-c", picky, options=options)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in lineage(tmp_path)] == [None, 4, 2]


@pytest.mark.exhaustive
def test_checkpoint_of_no_known_step_is_named(tmp_path):
    save(tmp_path / "ckpt/last.pt")
    dies = "import os; os.kill(os.getpid(), 9)"
    options = ["--resume-arg", "--milestone {step}", "--checkpoints", "ckpt"]
    done = recover(tmp_path, sys.executable, "-c", dies, options=options)
    assert done.returncode == 137
    assert "nothing says which step ckpt/last.pt is of, for {step}" in done.stderr


KILLED_ONCE = """
import os, pathlib, sys
text = pathlib.Path(sys.argv[1]).read_text()
print(text)
if "null" in text:
    pathlib.Path("c.yaml").write_text(sys.argv[2] + chr(10))
    os.kill(os.getpid(), 9)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("new", "code"), [("from: null # changed meanwhile", 0), ("nothing: 1", 137), ("[", 137)]
)
def test_configuration_is_read_when_the_attempt_begins(tmp_path, new, code):
    """If it cannot be used any more, that is said; the exit code is not the one of a bad option."""
    save(tmp_path / "ckpt/model-2.pt")
    (tmp_path / "c.yaml").write_text("from: null\n")
    options = ["--checkpoints", "ckpt", "--config", "c.yaml", "--resume-key", "from"]
    process = [sys.executable, "-c", KILLED_ONCE, "c.yaml", new]
    done = recover(tmp_path, *process, options=options)
    assert done.returncode == code, done.stderr
    first, second = lineage(tmp_path)
    assert first["then"] == "restart"
    if code:
        assert "not started again: " in done.stderr
        assert "Traceback" not in done.stderr
        assert (second["outcome"], second["steps"]) == ("not-begun", 0)
    else:
        assert "from: ckpt/model-2.pt # changed meanwhile" in done.stdout


def test_configuration_is_written_after_the_wait(tmp_path):
    save(tmp_path / "ckpt/model-2.pt")
    (tmp_path / "c.yaml").write_text("from: null\n")
    options = ["--checkpoints", "ckpt", "--config", "c.yaml", "--resume-key", "from"]
    command = [sys.executable, "-c", KILLED_ONCE, "c.yaml", "from: null"]
    process = start(tmp_path, *command, options=[*options, "--backoff", "60"])
    wait_for(tmp_path / "found/lineage.jsonl", process)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert not (tmp_path / "c_attempt2.yaml").exists()


SLEEPER = "import time; open('begun', 'w'); time.sleep(60)"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_it_is_obeyed(tmp_path, number):
    process = start(tmp_path, sys.executable, "-c", SLEEPER)
    wait_for(tmp_path / "begun", process)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (130 if number == signal.SIGINT else 143), err
    (line,) = lineage(tmp_path)
    assert (line["outcome"], line["then"]) == ("interrupted", "end")


def test_interrupt_while_it_waits(tmp_path):
    dies = "import os; os.kill(os.getpid(), 9)"
    process = start(tmp_path, sys.executable, "-c", dies, options=[*RESUME, "--backoff", "60"])
    wait_for(tmp_path / "found/lineage.jsonl", process)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted between two attempts" in err


EXPLAINED_NEVER = """
import json, os, pathlib, sys, time
options = json.loads(os.environ["NANGUARD_RUN"])
if options["again"]:
    time.sleep(60)
folder = pathlib.Path(options["incidents"], "step-000000-rank0")
folder.mkdir(parents=True)
run = {"command": options["command"], "folder": os.getcwd(), "ordinal": 0, "ranks": 1}
told = {"schema": "nanguard.incident/1", "step": 0, "rank": 0, "run": {**run, "seconds": 1.0}}
told["replay"] = {"verdict": "not-replayed"}
(folder / "incident.json").write_text(json.dumps(told))
sys.exit(1)
"""


def test_interrupt_while_an_incident_is_explained(tmp_path):
    """The attempt is over by then, and none comes after it."""
    (tmp_path / "train.py").write_text(EXPLAINED_NEVER)
    own = [sys.executable, "-m", "nanguard", "run", "--recover", "--incidents", "found"]
    command = [*own, "--backoff", "0", *RESUME, "--", sys.executable, "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    # The second run itself can leave no note.
    while "running the command once more" not in (said := process.stderr.readline()):
        assert said, "it ended before"
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert "interrupted; what is not explained by now stays as it is" in err
    (line,) = lineage(tmp_path)
    assert (line["outcome"], line["then"]) == ("interrupted", "end")


def save(path):
    path.parent.mkdir(exist_ok=True)
    torch.save({"model": {"weight": torch.ones(3)}}, path)


def wait_for(path, process):
    for _ in range(3000):
        if path.exists():
            return
        assert process.poll() is None
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written")


# What lives on below a command.


def test_no_orphan_of_an_attempt_sees_the_next_one(tmp_path):
    """A launcher that is killed leaves a worker in a session of its own, which holds a port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "launcher.py").write_text(
        textwrap.dedent(f"""\
            import os, pathlib, signal, subprocess, sys, time
            first = not pathlib.Path("worker.pid").exists()
            code = ("import os, socket, time; s = socket.socket(); "
                    "s.bind(('127.0.0.1', {port})); s.listen(); "
                    "open('worker.pid', 'w').write(str(os.getpid())); time.sleep(60)")
            if first:
                subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
                while not pathlib.Path("worker.pid").exists():
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            import socket
            socket.socket().bind(("127.0.0.1", {port}))
            print("the port is free")
            """)
    )
    done = recover(tmp_path, sys.executable, "launcher.py")
    assert "the port is free" in done.stdout, done.stderr
    assert not Path(f"/proc/{(tmp_path / 'worker.pid').read_text()}").exists()


@pytest.mark.ranks
def test_two_ranks_of_which_one_is_killed(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    torchrun += ["--master-port", port, SCRIPTS / "resumable_ddp.py"]
    done = recover(tmp_path, *torchrun, "--out", "ckpt")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ends at 16") == 2
    first, second = lineage(tmp_path)
    assert first["outcome"] == "killed"
    assert second["checkpoint"] == "ckpt/step_8.pt"
    assert (first["lost"], second["steps"]) == (3, 8)


# What is refused before anything is started.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "nothing says how to pass the command the checkpoint to resume from"),
        (["--resume-arg", "--resume {chekpoint}"], "there is no placeholder {chekpoint}"),
        ([*RESUME, "--lr-cut", "1.5"], "--lr-cut is 1.5"),
    ],
)
def test_bad_wish_is_a_message_before_the_start(tmp_path, options, said):
    done = recover(tmp_path, sys.executable, "-c", "open('started', 'w')", options=options)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "started").exists()


def test_options_of_recovery_alone_mean_nothing(tmp_path):
    command = [sys.executable, "-m", "nanguard", "run", "--lr-arg", "--lr {lr}", "--", "true"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--lr-arg means nothing without --recover" in done.stderr


def test_text_of_a_shell_cannot_be_changed(tmp_path):
    done = recover(tmp_path, "bash", "-c", "python train.py")
    assert done.returncode == 2
    assert "arguments cannot be put into the text behind -c" in done.stderr
