"""``nanguard check --watch``: checkpoints are audited as a job writes them."""

from __future__ import annotations

import json
import math
import signal
import struct
import subprocess
import sys
from queue import Empty, Queue
from threading import Thread
from typing import TYPE_CHECKING

import pytest

from tests.check.plugin import check

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "import nanguard.cli.checking as w; w.EVERY = 0.1\n"
    "from nanguard.cli import main; main()"
)


class Job:
    """A watched folder: what is written into it, and what is said about that."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "check", str(folder), "--watch", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: Queue[str] = Queue()
        Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        for line in self.process.stdout or ():
            self._lines.put(line.rstrip("\n"))

    def save(self, step: int, value: float) -> None:
        head = {"layer.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
        told = json.dumps(head).encode()
        folder = self.folder / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(
            struct.pack("<Q", len(told)) + told + struct.pack("<2f", value, 0.5)
        )

    def said(self, word: str) -> str:
        """Returns the next line with a word in it."""
        seen = []
        try:
            while True:
                seen.append(self._lines.get(timeout=30))
                if word in seen[-1]:
                    return seen[-1]
        except Empty:
            raise AssertionError(f"{word!r} was never said, but {seen}") from None

    def end(self) -> int:
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(timeout=30)
        assert self.process.stderr is not None
        assert self.process.stderr.read() == ""
        return code


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        if job.process.poll() is None:
            job.process.kill()
        job.process.communicate()


def test_each_new_checkpoint_is_audited(tmp_path: Path, jobs: list[Job]):
    job = Job(tmp_path / "run")
    jobs.append(job)
    assert job.said("watching")
    job.save(100, 0.25)
    assert job.said("checkpoint-100").endswith("checkpoint-100: good")
    job.save(200, math.nan)
    assert job.said("checkpoint-200").endswith("checkpoint-200: BAD")
    assert "layer.weight" in job.said("[non-finite-weight]")
    assert "checkpoint-100 (step 100) is the last good" in job.said("[last-good-checkpoint]")
    assert job.end() == 1


def test_a_good_job_ends_with_0_and_is_told_as_json_lines(tmp_path: Path, jobs: list[Job]):
    job = Job(tmp_path, "--format", "json")
    jobs.append(job)
    job.save(10, 0.25)
    report = json.loads(job.said("nanguard.report/1"))
    assert report["findings"] == []
    assert report["checked"] == [str(tmp_path / "checkpoint-10" / "model.safetensors")]
    assert job.end() == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--format", "sarif"), "there is no format 'sarif'"),
        (("--fix",), "watching repairs nothing"),
        (("-o", "x"), "watching repairs nothing"),
        (("s3://bucket/x",), "s3://bucket/x cannot be watched"),
    ],
)
def test_what_cannot_be_watched_is_refused(tmp_path: Path, words: tuple[str, ...], says: str):
    done = check(".", "--watch", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
