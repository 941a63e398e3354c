"""A replay in place writes, removes, starts and sends nothing."""

from __future__ import annotations

import io
import os
import queue
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from os import remove as early_remove
from pathlib import Path

import pytest
import torch

from nanguard.replay.sandbox import Outside, OutsideError

early_open = io.open


def test_files_seem_to_be_written_and_are_not(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("before")
    with Outside():
        path.write_text("after")
        assert path.read_text() == "after"
        torch.save({"x": torch.ones(1)}, tmp_path / "model.pt")
        descriptor = os.open(tmp_path / "raw", os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, b"x")
        os.close(descriptor)
        (tmp_path / "folder").mkdir()
        path.unlink()
        path.rename(tmp_path / "moved")
        shutil.rmtree(tmp_path)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["log.txt"]


def connect(_path):
    with socket.socket() as made:
        made.connect(("127.0.0.1", 9))


@pytest.mark.parametrize(
    "act",
    [
        lambda path: early_open(path, "w"),
        lambda path: early_remove(path),  # noqa: PTH107
        lambda path: os.truncate(path, 0),
        lambda path: os.symlink(path, f"{path}-link"),  # noqa: PTH211
        lambda path: io.FileIO(path, "w"),
        lambda path: sqlite3.connect(f"{path}.db"),
        lambda _path: subprocess.run([sys.executable, "-c", ""], check=False),
        lambda _path: os.system("true"),
        lambda _path: os.posix_spawn("/bin/true", ["true"], {}),
        lambda _path: os.kill(os.getpid(), 0),
        connect,
        lambda _path: queue.Queue().get(block=False),
    ],
)
def test_everything_else_is_refused(tmp_path, act):
    path = tmp_path / "kept"
    path.write_text("kept")
    with Outside(), pytest.raises(OutsideError):
        act(path)
    assert path.read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]


def test_other_threads_go_on(tmp_path):
    path, items = tmp_path / "other", queue.Queue()

    def write() -> None:
        path.write_text("written")
        items.put(1)

    with Outside():
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert path.read_text() == "written"
    assert items.get() == 1


def test_afterwards_all_is_as_before():
    before = (io.open, os.open, os.remove, os.rename, subprocess.Popen.__init__, queue.Queue.put)
    with Outside():
        pass
    after = (io.open, os.open, os.remove, os.rename, subprocess.Popen.__init__, queue.Queue.put)
    assert after == before
    assert Path(os.devnull).exists()
