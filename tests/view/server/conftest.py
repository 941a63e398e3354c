"""A real server, as a user starts it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


class Served:
    """A server in a process of its own."""

    def __init__(self, root: Path, *options: str) -> None:
        command = [sys.executable, "-m", "nanguard", "serve", str(root), "--port", "0", *options]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        said = self.process.stdout.readline()
        self.address = re.search(r"http://\S+", said).group()
        self.port = int(re.search(r":(\d+)/", self.address).group(1))
        self.url = f"http://127.0.0.1:{self.port}"

    def end(self) -> int:
        """Ends it as Ctrl-C does; returns its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(5)
        finally:
            self.process.kill()
            self.process.stdout.close()


@pytest.fixture
def served() -> Iterator[Callable[..., Served]]:
    """Starts servers, and ends them."""
    started: list[Served] = []

    def start(root: Path, *options: str) -> Served:
        started.append(Served(root, *options))
        return started[-1]

    yield start
    for one in started:
        one.end()
