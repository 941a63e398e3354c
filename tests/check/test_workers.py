"""Files that end the process that reads them: what is said, and that the others are read."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nanguard.check import workers
from nanguard.check.scan import Scan
from nanguard.check.workers import Workers
from nanguard.errors import SourceError
from tests.check.deaths import die
from tests.check.deaths import told as lost

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(not workers.can_limit(), reason="needs Linux")
WAYS = {
    "abort": "its reader crashed (SIGABRT)",
    "crash": "its reader crashed (SIGSEGV)",
    "killed": "its reader was killed: there was not enough memory",
    "loop": "it took more than 1 s to read",
    "memory": "it needs more than 256 MB of memory",
    "panic": "nanguard failed on it: Panic: in Rust",
    "exit": "nanguard failed on it: SystemExit: 3",
    "leave": "its reader ended in the midst of it",
    "raise": "nanguard failed on it: ZeroDivisionError: by zero",
}


PROGRAM = """
import json, sys, threading
from nanguard.check import workers
from nanguard.check.scan import Scan
from tests.check.deaths import die, told

workers.SECONDS, workers.MEMORY = 1.0, 256 << 20
jobs, threads, how = json.loads(sys.argv[1])
stop = threading.Event()
if how == "begun":
    threading.Thread(target=stop.wait).start()
    del workers.os.fork
else:
    del workers.os.posix_spawn
read = []
scan = Scan(threads=threads, progress=lambda path, count: read.append((path, count)))
with workers.Workers() as pool:
    made = [list(pool.spread(die, some, scan, lost=told)) for some in jobs]
stop.set()
print(json.dumps([made, read]))
"""
# As a copy of a process of one thread, and as a new one.
HOW = pytest.mark.parametrize("how", ["copied", "begun"])


def spread(*jobs: list[str], how: str, threads: int) -> tuple[list[list[str]], list[list[object]]]:
    """Returns what comes of jobs, one call after the other, and what was told to be read."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps([jobs, threads, how])],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        # A new process finds no module in the current folder.
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stderr == ""
    made, read = json.loads(done.stdout)
    return made, read


@HOW
def test_every_death_is_told_and_ends_nothing_else(how: str):
    jobs = [one for way in WAYS for one in (f"before {way}", way, f"after {way}")]
    (made,), _ = spread(jobs, how=how, threads=2)
    assert len(made) == len(jobs)
    for at, way in enumerate(WAYS):
        before, death, after = made[3 * at : 3 * at + 3]
        assert before.startswith(f"before {way} ")
        assert death == f"{way}: {WAYS[way]}"
        assert after.startswith(f"after {way} ")


@HOW
def test_a_worker_is_used_again_and_prints_nothing(how: str):
    (first, again), read = spread(["a", "print"], ["c"], how=how, threads=1)
    assert len({made.split()[-1] for made in first + again}) == 1
    assert [made.split()[0] for made in first + again] == ["a", "print", "c"]
    assert read == [["a", 3], ["print", 3], ["c", 3]]


def test_without_words_for_it_a_death_is_raised(tmp_path: Path):
    with Workers() as pool, pytest.raises(SourceError, match=r"SIGABRT") as caught:
        list(pool.spread(die, ["abort"], Scan(), files=lambda _: [tmp_path / "a.parquet"]))
    assert caught.value.where == str(tmp_path / "a.parquet")


def test_limits_grow_with_the_size_of_files(tmp_path: Path):
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    seconds, memory = workers._limits([tmp_path / "a", tmp_path / "gone"])
    assert seconds == workers.SECONDS + workers.SECONDS_PER_BYTE * (1 << 20)
    assert memory == workers.MEMORY + workers.MEMORY_PER_BYTE * (1 << 20)
    # A small file: less than 20 s and 1 GB, as docs/check.md promises.
    assert workers.SECONDS < 20
    assert workers.MEMORY < 1 << 30


def test_what_nobody_waits_for_is_ended():
    others = children()  # of tests before this one
    with Workers() as pool:
        several: Iterator[str] = pool.spread(die, ["a", "loop"], Scan(threads=2))
        process = int(next(several).split()[-1])
        below = children() - others
        several.close()  # type: ignore[attr-defined]
        assert children() - others <= {process}
        assert below > {process}
    assert process not in children()


def test_a_process_that_was_killed_while_idle_is_replaced():
    with Workers() as pool:
        (made,) = pool.spread(die, ["a"], Scan())
        os.kill(int(made.split()[-1]), signal.SIGKILL)
        (again,) = pool.spread(die, ["b"], Scan(), lost=lost)
    assert again.startswith("b")


def test_workers_end_with_the_process_that_started_them():
    program = (
        "import os, sys\n"
        "from nanguard.check.workers import Workers\n"
        "from nanguard.check.scan import Scan\n"
        "from tests.check.deaths import die\n"
        "pool = Workers()\n"
        "print(*pool.spread(die, ['a', 'b', 'c'], Scan(threads=3)), flush=True)\n"
        "os._exit(0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    processes = [int(word) for word in done.stdout.split()[1::2]]
    assert processes
    while any(Path(f"/proc/{process}").exists() for process in processes):
        time.sleep(0.01)  # for good, if they do not end: the test then ends by its own limit


def test_a_process_with_threads_is_not_copied(monkeypatch: pytest.MonkeyPatch):
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    monkeypatch.setattr(workers.os, "fork", None)
    try:
        with Workers() as pool:
            (made,) = pool.spread(die, ["a"], Scan())
    finally:
        stop.set()
        thread.join()
    assert made.startswith("a ")


def children() -> set[int]:
    """Returns the processes that this one has started and that are not over."""
    me = os.getpid()
    return {int(one) for one in Path(f"/proc/{me}/task/{me}/children").read_text().split()}
