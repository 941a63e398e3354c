"""A replay in place writes, removes, starts and sends nothing."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import io
import json
import mmap
import multiprocessing
import os
import queue
import resource
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

from nanguard.cli.explaining import replay_incident
from nanguard.errors import UsageError
from nanguard.replay import landlock
from nanguard.replay.sandbox import Outside, OutsideError
from nanguard.run.command import _explain_the_rest
from nanguard.run.control import Options
from nanguard.run.run_record import sign

early_open = io.open
SCRIPTS = Path(__file__).parents[1] / "run" / "scripts"


def test_files_seem_to_be_written_and_are_not(tmp_path):
    path = tmp_path / "log.txt"
    path.write_text("before")
    with Outside():
        path.write_text("after")
        assert path.read_text() == "after"
        with open(os.fsencode(path), "ab") as file:  # noqa: PTH123 - as TensorBoard does
            file.write(b" that")
        assert path.read_text() == "after that"
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


ELSEWHERE: queue.Queue[int] = queue.Queue()


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
        lambda _path: ELSEWHERE.get(block=False),
        lambda path: io.FileIO(f"/dev/..{path}-new", "w"),
        lambda path: io.FileIO(f"/proc/self/root{path}-new", "w"),
        lambda _path: io.FileIO("/dev/shm/nanguard-test-sandbox", "w"),
        lambda path: os.chdir(path.parent),
        lambda _path: multiprocessing.get_context("spawn").Process(target=print).start(),
        lambda _path: _thread.start_new_thread(print, ()),
        lambda path: ctypes.CDLL(None).unlink(os.fsencode(path)),
        lambda _path: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64)),
    ],
)
def test_everything_else_is_refused(tmp_path, act):
    path = tmp_path / "kept"
    path.write_text("kept")
    before = os.getcwd(), resource.getrlimit(resource.RLIMIT_NOFILE)  # noqa: PTH109
    with Outside(), pytest.raises(OutsideError):
        act(path)
    assert path.read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert (os.getcwd(), resource.getrlimit(resource.RLIMIT_NOFILE)) == before  # noqa: PTH109
    assert not Path("/dev/shm/nanguard-test-sandbox").exists()


@pytest.mark.parametrize(
    "act",
    [
        lambda fd: os.write(fd, b"x"),
        lambda fd: os.writev(fd, [b"x", b"y"]),
        lambda fd: os.pwrite(fd, b"x", 0),
        lambda fd: os.posix_fallocate(fd, 0, 99),
        lambda fd: os.ftruncate(fd, 0),
        lambda fd: os.fchmod(fd, 0o777),
        lambda fd: os.close(fd),
        lambda fd: os.dup2(os.open(os.devnull, os.O_WRONLY), fd),
        lambda fd: os.closerange(fd, fd + 1),
        lambda fd: os.copy_file_range(os.open(__file__, os.O_RDONLY), fd, 3),
        lambda fd: os.sendfile(fd, os.open(__file__, os.O_RDONLY), 0, 3),
        lambda fd: open(fd, "wb", buffering=0, closefd=False).write(b"x"),  # noqa: SIM115
        lambda fd: early_open(fd, "r+b", buffering=0, closefd=False).write(b"x"),
        lambda fd: early_open(f"/proc/self/fd/{fd}", "r+b", buffering=0).write(b"x"),
        lambda fd: early_open(f"/dev/fd/{fd}", "r+b", buffering=0).write(b"x"),
        lambda fd: mmap.mmap(fd, 0).__setitem__(0, 1),
        lambda _fd: os.mkfifo("pipe"),
        lambda _fd: os.umask(0),
        lambda _fd: os.environ.update(NANGUARD_TEST_SANDBOX="1"),
        lambda _fd: threading.Thread(target=lambda: Path("new").write_text("x")).start(),
        lambda _fd: threading.Thread(target=lambda: early_remove("kept")).start(),  # noqa: PTH107
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_was_open_before_stays_as_it_is(tmp_path, monkeypatch, act):
    path = tmp_path / "kept"
    path.write_text("kept")
    monkeypatch.chdir(tmp_path)
    descriptor, threads = os.open(path, os.O_RDWR), set(threading.enumerate())
    before = path.stat().st_mode, mask()
    with Outside(), contextlib.suppress(OutsideError):
        act(descriptor)
        for thread in set(threading.enumerate()) - threads:
            thread.join()
    assert path.read_text() == "kept"
    assert [p.name for p in tmp_path.iterdir()] == ["kept"]
    assert (path.stat().st_mode, mask()) == before
    assert "NANGUARD_TEST_SANDBOX" not in os.environ
    assert os.pread(descriptor, 4, 0) == b"kept"
    assert os.write(descriptor, b"mine") == 4
    os.close(descriptor)
    assert path.read_text() == "mine"


def mask() -> int:
    """Returns which rights new files do not get."""
    before = os.umask(0o22)
    os.umask(before)
    return before


def test_a_queue_of_its_own_works_in_a_replay():
    with Outside():
        items = queue.LifoQueue()
        items.put(1)
        items.put(2)
        assert [items.get(), items.get(), items.empty()] == [2, 1, True]
        with pytest.raises(queue.Empty):
            items.get()
        ELSEWHERE.put(3)
    assert ELSEWHERE.empty()


def test_other_threads_go_on(tmp_path):
    path, items, begin = tmp_path / "other", queue.Queue(), threading.Event()

    def write() -> None:
        begin.wait()
        path.write_text("written")
        items.put(1)

    thread = threading.Thread(target=write)
    thread.start()
    with Outside():
        begin.set()
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


held_by_kernel = pytest.mark.skipif(not landlock.version(), reason="needs Linux with Landlock")


def contents(folder: Path) -> dict[str, bytes | None]:
    found = folder.rglob("*")
    return {str(p): p.read_bytes() if p.is_file() else None for p in found}


@held_by_kernel
def test_second_run_leaves_everything_as_it_was(tmp_path):
    """The script cleans up by early-bound, compiled and foreign means before it imports torch."""
    shutil.copy(SCRIPTS / "cleans_up.py", tmp_path / "train.py")
    nanguard = [sys.executable, "-m", "nanguard"]
    run = [*nanguard, "run", "--incidents", "incidents", "--", sys.executable, "train.py"]
    subprocess.run(run, cwd=tmp_path, check=True, capture_output=True)
    before = contents(tmp_path / "out")
    assert len(before) == 12
    (incident,) = tmp_path.glob("incidents/step-*")
    replay = [*nanguard, "replay", "--yes", incident]
    done = subprocess.run(replay, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert "the loss is inf; it began with aten.div" in done.stdout, done.stderr
    assert contents(tmp_path / "out") == before
    subprocess.run([*replay, "--explain"], cwd=tmp_path, check=True, capture_output=True)
    assert contents(tmp_path / "out") == before


def test_a_replay_in_place_writes_to_nothing_that_was_open_before(tmp_path):
    """The script ends well only if all that it wrote to has one mark of each step."""
    shutil.copy(SCRIPTS / "writes_everywhere.py", tmp_path / "train.py")
    run = [sys.executable, "-m", "nanguard", "run", "--", sys.executable, "train.py"]
    done = subprocess.run(run, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "[division-by-zero, proven]" in done.stderr


@held_by_kernel
@pytest.mark.parametrize(
    "act",
    [
        "open('kept/file', 'w')",
        "os.truncate('kept/file', 0)",
        "os.remove('kept/file')",
        "os.rename('kept/file', 'kept/other')",
        "os.rename('kept/file', 'free/other')",
        "os.replace('free/file', 'kept/file')",
        "os.link('kept/file', 'kept/link')",
        "os.symlink('file', 'kept/link')",
        "os.mkdir('kept/folder')",
        "os.mkfifo('kept/pipe')",
        "check(libc.unlink(b'kept/file'))",
        "check(libc.creat(b'kept/file', 0o600))",
        "check(libc.system(b'rm kept/file'))",
        "subprocess.run(['sh', '-c', 'echo x > kept/file'], check=True, stderr=-3)",
        "os.kill(os.getppid(), 0)",
    ],
)
def test_kernel_holds_what_is_outside_of_a_folder(tmp_path, act):
    for name in ("kept", "free"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("kept")
    program = (
        "import ctypes, os, subprocess\n"
        "from pathlib import Path\n"
        "from nanguard.replay import landlock\n"
        "libc = ctypes.CDLL(None)\n"
        "def check(result):\n"
        "    if result: raise OSError\n"
        "landlock.confine([Path('free')])\n"
        "Path('free/new').write_text('written')\n"
        f"try: {act}\n"
        "except (OSError, subprocess.SubprocessError): print('refused')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    old = "os.kill" in act and landlock.version() < 6
    assert done.stdout == ("" if old else "refused\n"), done.stderr
    assert (tmp_path / "free" / "new").read_text() == "written"
    assert [p.name for p in (tmp_path / "kept").iterdir()] == ["file"]
    assert (tmp_path / "kept" / "file").read_text() == "kept"


def test_without_the_kernels_help_nothing_is_run_without_a_question(tmp_path, monkeypatch):
    incident = tmp_path / "step-000001-rank0"
    incident.mkdir()
    ran = tmp_path / "ran"
    command = [sys.executable, "-c", f"open({str(ran)!r}, 'w')"]
    told = {"schema": "nanguard.incident/1", "step": 1, "rank": 0}
    told["run"] = {"command": command, "folder": str(tmp_path), "ordinal": 1, "ranks": 1}
    told["run"] |= {"seconds": 1.0, "signature": sign(command, str(tmp_path))}
    told["replay"] = {"verdict": "not-replayed"}
    (incident / "incident.json").write_text(json.dumps(told))
    monkeypatch.setattr(landlock, "version", lambda: 0)
    asked = {"precision": None, "without": (), "table": False, "as_json": False, "sure": False}
    with pytest.raises(UsageError, match="Landlock"):
        replay_incident(incident, explain_again=True, seconds=None, **asked)
    options = Options(
        incidents=str(tmp_path), control=str(tmp_path), command=tuple(command), folder=str(tmp_path)
    )
    _explain_the_rest([incident / "incident.json"], options)
    assert not ran.exists()
