"""Run folders: one owner at a time, what an ended one leaves is taken over, nobody else reads."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from nanguard import incident, run_folder
from nanguard.errors import RecordError
from nanguard.record import RunRecord
from nanguard.run_folder import LOCK, FolderLock, open_private

if TYPE_CHECKING:
    from pathlib import Path

# Holds a run folder until its standard input is closed, or is killed.
OWNER = """
import sys
from pathlib import Path
from nanguard.record import RunRecord
record = RunRecord(Path(sys.argv[1]), on_failure=print)
print("owns", flush=True)
sys.stdin.read()
record.close()
"""


def owner_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / LOCK).read_text())


def start_owner(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().strip() == "owns"
    return process


def write_lock(folder: Path, **changed: Any) -> None:
    """Leaves the lock of somebody else behind."""
    (folder / LOCK).write_text(json.dumps({**run_folder._this_process(), **changed}))


def test_a_second_process_is_told_who_has_the_folder(tmp_path: Path):
    owner = start_owner(tmp_path)
    with pytest.raises(RecordError) as raised:
        RunRecord(tmp_path, on_failure=print)
    owner.communicate()
    assert f"in use by process {owner.pid} on {socket.gethostname()}" in str(raised.value)
    assert "run_dir of its own" in raised.value.do
    RunRecord(tmp_path, on_failure=print).close()
    assert not (tmp_path / LOCK).exists()


def test_what_a_killed_process_left_is_taken_over(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    owner = start_owner(tmp_path)
    owner.kill()
    owner.communicate()
    assert owner_of(tmp_path)["pid"] == owner.pid
    record = RunRecord(tmp_path, on_failure=print)
    assert owner_of(tmp_path)["pid"] == os.getpid()
    assert f"was left behind by process {owner.pid}" in caplog.text
    record.close()


def test_a_number_that_belongs_to_another_process_by_now_is_not_the_owner(tmp_path: Path):
    write_lock(tmp_path, pid=os.getppid(), started="1")
    FolderLock(tmp_path).release()
    assert not (tmp_path / LOCK).exists()


def test_another_guard_of_the_same_process_may_go_on(tmp_path: Path):
    forgotten = FolderLock(tmp_path)
    FolderLock(tmp_path).release()
    forgotten.release()
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("other", [{"host": "elsewhere"}, {"namespace": "pid:[1]"}])
def test_an_owner_that_cannot_be_looked_at_is_dead_without_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: dict[str, str]
):
    monkeypatch.setattr(run_folder, "_SILENT", 0.2)
    monkeypatch.setattr(run_folder, "BEAT", 0.1)
    write_lock(tmp_path, **other)
    FolderLock(tmp_path).release()
    assert not (tmp_path / LOCK).exists()


def test_an_owner_on_another_host_that_shows_signs_of_life_keeps_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(run_folder, "_SILENT", 60.0)
    monkeypatch.setattr(run_folder, "BEAT", 0.05)
    write_lock(tmp_path, host="elsewhere", pid=17)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.02):
            now = time.time_ns()
            os.utime(tmp_path / LOCK, ns=(now, now))

    alive = threading.Thread(target=beat)
    alive.start()
    with pytest.raises(RecordError, match="in use by process 17 on elsewhere"):
        FolderLock(tmp_path)
    ended.set()
    alive.join()
    assert owner_of(tmp_path)["host"] == "elsewhere"


def test_a_fork_that_ends_does_not_give_the_folder_back(tmp_path: Path):
    lock = FolderLock(tmp_path)
    child = os.fork()
    if child == 0:
        lock.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert owner_of(tmp_path)["pid"] == os.getpid()
    lock.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"host": 1}', "\udcff", "[" * 5000])
def test_a_lock_that_makes_no_sense_is_nobodys(tmp_path: Path, content: str):
    (tmp_path / LOCK).write_bytes(content.encode("utf-8", "surrogateescape"))
    FolderLock(tmp_path).release()
    assert not (tmp_path / LOCK).exists()


def test_processes_that_start_at_once_agree_on_one_owner(tmp_path: Path):
    write_lock(tmp_path, pid=os.getppid(), started="1")  # all of them find one that is stale
    code = (
        "import sys; from pathlib import Path; from nanguard.run_folder import FolderLock\n"
        "sys.stdin.readline()\n"
        "try: FolderLock(Path(sys.argv[1])); print('mine', flush=True)\n"
        "except OSError: print('not', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    for process in started:
        process.stdin.write("go\n")
        process.stdin.flush()
    told = [process.stdout.readline().strip() for process in started]
    owner = owner_of(tmp_path)["pid"]
    for process in started:
        process.communicate("end\n")
    assert sorted(told) == ["mine", "not", "not", "not", "not", "not"]
    assert owner == started[told.index("mine")].pid


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_incidents_are_the_users_alone(tmp_path: Path):
    before = os.umask(0)
    try:
        folder = incident.new_folder(tmp_path / "incidents", 7, 0)
        incident.write(folder, incident.Incident({"step": 7}))
    finally:
        os.umask(before)
    assert [mode(path) for path in (tmp_path / "incidents", folder)] == [0o700, 0o700]
    assert [mode(path) for path in folder.iterdir()] == [0o600]


def test_a_file_that_others_could_read_is_closed_to_them_when_it_is_written_anew(tmp_path: Path):
    path = tmp_path / "batch.pt"
    path.touch(mode=0o666)
    path.chmod(0o666)
    with open_private(path) as file:
        file.write(b"x")
    assert (mode(path), path.read_bytes()) == (0o600, b"x")
