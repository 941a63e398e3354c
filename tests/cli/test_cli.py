"""The command line, as a user calls it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

import nanguard

if TYPE_CHECKING:
    from pathlib import Path


def call(
    *words: str, cwd: Path | None = None, code: str = "", columns: str = "200"
) -> subprocess.CompletedProcess[str]:
    """Runs the command; ``code`` is run before it, in the same process."""
    program = f"{code}\nfrom nanguard.cli import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        capture_output=True,
        text=True,
        timeout=180,
        cwd=cwd,
        check=False,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": columns},
    )


def test_the_demo_proves_its_claim_and_keeps_a_record(tmp_path: Path):
    folder = tmp_path / "a-run-with-a-long-name" / "run"
    done = call("demo", "--steps", "160", "--run-dir", str(folder), columns="60")
    assert done.returncode == 0, done.stderr
    # What is copied from it is whole, however narrow the terminal.
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert f"nanguard replay {folder}/script/incidents/step-000005-rank0" in lines
    assert f"command   {sys.executable} {folder}/script/train.py" in lines
    assert f"line    {folder}/script/train.py:22, in forward" in lines
    assert f"run record: {folder}" in lines
    assert f"report: {folder}/report.html" in lines
    assert "identical: all" in done.stdout
    assert "step 53: the loss is nan -> batch skipped" in done.stdout
    assert "[gradient of head.weight] -> batch skipped" in done.stdout
    assert "step 120: the loss jumped to" in done.stdout
    assert "160 steps, 157 applied, 3 skipped" in done.stdout
    assert "-> 22 |         mean = vectors.sum(1) / known.sum(1, keepdim=True)" in done.stdout
    assert "+        mean = vectors.sum(1) / known.sum(1, keepdim=True).clamp(min=1)" in done.stdout
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events] == [53, 80, 120]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "A loss or gradient went bad at step 53" in page
    assert "division-by-zero" in page
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 160


@pytest.mark.exhaustive
def test_the_quiet_demo_fails_if_the_guard_lets_a_step_through(tmp_path: Path):
    spoil = "import nanguard.guard.gate as g\ng.Gate.judge = lambda self, *a, **k: None"
    done = call("demo", "--steps", "120", "--quiet", cwd=tmp_path, code=spoil)
    assert done.returncode == 1
    different, explained, report = done.stdout.splitlines()
    assert different.startswith("different: the guarded run is not")
    assert explained == "explained: division-by-zero at train.py:22, with a fix that was tried"
    (folder,) = (tmp_path / ".nanguard/demo").iterdir()
    assert report == f"report: {(folder / 'report.html').relative_to(tmp_path)}"


def test_version_and_help():
    assert call("--version").stdout == f"nanguard {nanguard.__version__}\n"
    assert "nanguard demo --run-dir" in call("demo", "--help").stdout
    assert "demo" in call().stdout


def test_a_folder_that_cannot_be_written_is_a_message_and_exit_code_2(tmp_path: Path):
    (tmp_path / "file").touch()
    done = call("demo", "--run-dir", str(tmp_path / "file" / "run"))
    assert done.returncode == 2
    assert "nanguard: the run folder cannot be written to" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_torch_the_demo_says_what_to_install():
    block = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch':\n"
        "            raise ModuleNotFoundError('no torch', name='torch')\n"
        "sys.meta_path.insert(0, Block())"
    )
    done = call("demo", code=block)
    assert done.returncode == 2
    assert "[torch]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_too_few_steps_are_refused():
    done = call("demo", "--steps", "3")
    assert done.returncode == 2
    assert "--steps" in done.stderr


def test_ctrl_c_ends_cleanly_and_keeps_the_record(tmp_path: Path):
    # Whoever runs the tests in the background may have told them to ignore the signal.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from nanguard.cli import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, "demo", "--steps", "5000", "--run-dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(len(lines)))
