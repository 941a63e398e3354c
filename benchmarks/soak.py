"""Kills runs, fills disks, moves clocks and changes files under a reader, and counts what was lost.

Every part repeats one thing that goes wrong until its time or count is up, and compares with a run
to which nothing happened:

    kills   a guarded run is ended by SIGKILL, SIGTERM or SIGINT at random moments and resumed until
            it is done: bit-identical weights, every step and every epoch once in the record
    disk    the same while no file may grow beyond a random size, and while the clock jumps
    files   ``nanguard check`` of files that are cut, filled and replaced while it reads them
    memory  the replay of a bad step under ``nanguard run`` finds no memory; the run goes on
    ranks   one of two ranks is killed in each phase of a step; the other ends, and both resume

    python -m benchmarks.soak --seconds 600                    # what make soak does
    python -m benchmarks.soak kills --count 1000 --output results.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = Path(__file__).resolve().parent / "scripts"
_EPOCHS, _BATCHES = 6, 40
# Seconds after which something that should end hangs: machines are busy.
_HANGS = 180.0

# Has torch loaded and forks a run for each line it reads, so that a killed run costs no new start.
_ZYGOTE = f"""
import json, os, random, resource, signal, sys, time
import torch
torch.set_num_threads(1)
sys.path.insert(0, {str(ROOT)!r})
from tests.training import Run, batches
data = batches({_BATCHES})
Run().guarded(data[:2])  # what is loaded late is loaded now

def train(folder, seed, harm):
    rng = random.Random(seed)
    if harm == "disk":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        size = rng.choice((500, 4000, 20000, 1 << 20))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    if harm == "clock":
        real, shift = time.time, [0.0]
        def jump():
            if rng.random() < 0.2:
                shift[0] = rng.choice((-1e9, -86400, 0, 86400, 1e9))
            return real() + shift[0]
        time.time = jump
    run = Run()
    guard = run.make_guard(run_dir=folder, snapshot_every=5, disk_every=5, keep=2)
    guard.resume()
    while guard.epoch < {_EPOCHS}:
        for batch in guard.watch(data):
            guard.backward(run.loss(batch))
            guard.step(max_norm=1.0)
            time.sleep(0.001)
        guard.end_epoch()
    guard.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    torch.save(run.model.state_dict(), folder + ".pt")

print("ready", flush=True)
for line in sys.stdin:
    folder, seed, harm = json.loads(line)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), 1)
            train(folder, seed, harm)
            code = 0
        except KeyboardInterrupt:
            code = 130
        finally:
            os._exit(code)
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(status, flush=True)
"""


class Zygote:
    """A process that starts runs quickly; used in a ``with``."""

    def __enter__(self) -> Zygote:
        self._process = subprocess.Popen(  # noqa: S603 - our own code
            [sys.executable, "-c", _ZYGOTE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._said() == "ready"
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.communicate()

    def start(self, folder: Path, seed: int, harm: str = "") -> int:
        """Starts a run; returns its process."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(folder), seed, harm]) + "\n")
        self._process.stdin.flush()
        return int(self._said())

    def wait(self) -> int:
        """Returns how the run has ended."""
        return int(self._said())

    def _said(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def complaints(folder: Path, whole: Path) -> list[str]:
    """Returns in what a run that was disturbed differs from one that was not.

    Args:
        folder: The run folder; its weights lie beside it.
        whole: The folder of the other.
    """
    import torch

    out = []
    mine, other = (torch.load(f"{path}.pt", weights_only=True) for path in (folder, whole))
    if not all(torch.equal(mine[name], other[name]) for name in other):
        out.append("weights differ")
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in metrics]
    if steps != list(range(_EPOCHS * _BATCHES)):
        missing = sorted(set(range(_EPOCHS * _BATCHES)) - set(steps))
        out.append(f"steps: {len(missing)} missing, {len(steps) - len(set(steps))} doubled")
    rows = (folder / "training_history.csv").read_text().splitlines()[1:]
    if [row.split(",")[0] for row in rows] != [str(number + 1) for number in range(_EPOCHS)]:
        out.append(f"epochs: {[row.split(',')[0] for row in rows]}")
    private = (path for path in folder.rglob("*") if "snapshots" in path.parts)
    return out + [f"others can read {path.name}" for path in private if path.stat().st_mode & 0o077]


def kills(more: Callable[[int], bool], rng: random.Random) -> dict[str, Any]:
    """Ends runs at random moments and resumes them."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    signals = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    with tempfile.TemporaryDirectory(prefix="nanguard-soak-") as scratch, Zygote() as zygote:
        whole = Path(scratch, "whole")
        began = time.monotonic()
        zygote.start(whole, 0)
        assert zygote.wait() == 0
        # Late enough for a few snapshots between two kills, on a machine that may be busy.
        latest = (time.monotonic() - began) / 3
        while more(counts["kills"]):
            folder = Path(scratch, f"run-{counts['runs']}")
            last = 0
            while True:
                process = zygote.start(folder, 0)
                time.sleep(rng.random() * latest)
                number = rng.choice(signals)
                _kill(process, number)
                if zygote.wait() == 0:
                    break
                counts["kills"] += 1
                counts[signal.Signals(number).name] += 1
                newest = _newest(folder)
                if newest < last:
                    wrong.append(f"a snapshot was lost: update {last}, then {newest}")
                last = newest
            counts["runs"] += 1
            wrong += complaints(folder, whole)
    return {**counts, "wrong": wrong}


def _kill(process: int, number: signal.Signals) -> None:
    """Sends a signal to a run, which may have come to its end by now."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def _newest(folder: Path) -> int:
    """Returns the update of the newest snapshot that is whole; 0 without one."""
    from nanguard.errors import SnapshotError
    from nanguard.snapshots.disk import finished, verify

    for path in reversed(finished(folder / "snapshots")):
        try:
            return int(verify(path)["update"])
        except SnapshotError:
            continue
    return 0


def disk(more: Callable[[int], bool], rng: random.Random) -> dict[str, Any]:
    """Lets runs meet full disks and clocks that jump, then end in peace."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="nanguard-soak-") as scratch, Zygote() as zygote:
        whole = Path(scratch, "whole")
        zygote.start(whole, 0)
        assert zygote.wait() == 0
        while more(counts["runs"]):
            harm = rng.choice(("disk", "clock"))
            folder = Path(scratch, f"run-{counts['runs']}")
            process = zygote.start(folder, rng.randrange(10**6), harm)
            if rng.random() < 0.5:
                time.sleep(rng.random())
                _kill(process, signal.SIGKILL)
            if (status := zygote.wait()) not in (0, signal.SIGKILL):
                wrong.append(f"{harm}: the run ended with {status}")
            counts["runs"] += 1
            counts[harm] += 1
            zygote.start(folder, 0)
            if zygote.wait() != 0:
                wrong.append(f"{harm}: the run could not be resumed")
            elif harm == "clock":
                wrong += complaints(folder, whole)
            else:  # lines that found no room are lost and were counted; nothing else is
                wrong += [one for one in complaints(folder, whole) if " 0 doubled" not in one]
    return {**counts, "wrong": wrong}


def files(more: Callable[[int], bool], rng: random.Random) -> dict[str, Any]:
    """Checks files that change while they are read."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    seeds = [p for p in (ROOT / "tests").glob("*/own/**/*") if p.is_file() and p.suffix != ".py"]
    seeds = sorted(p for p in seeds if 0 < p.stat().st_size < 1 << 18)
    with tempfile.TemporaryDirectory(prefix="nanguard-soak-") as scratch:
        while more(counts["checks"]):
            folder = Path(scratch, str(counts["checks"]))
            folder.mkdir()
            chosen = rng.sample(seeds, 12)
            paths = [folder / f"{number}-{seed.name}" for number, seed in enumerate(chosen)]
            for path, seed in zip(paths, chosen, strict=True):
                path.write_bytes(seed.read_bytes() * (1 if path.suffix == ".json" else 3))
            ended = threading.Event()
            changer = threading.Thread(target=_change, args=(paths, ended, rng.random()))
            changer.start()
            try:
                done = subprocess.run(  # noqa: S603 - our own command
                    [sys.executable, "-m", "nanguard", "check", "--format", "json", str(folder)],
                    cwd=scratch, capture_output=True, text=True, timeout=_HANGS, check=False,
                )  # fmt: skip
                said = done.stdout + done.stderr
                if done.returncode not in (0, 1, 2) or "Traceback" in said:
                    wrong.append(f"exit code {done.returncode}: {said[-300:]}")
                if "nanguard failed on" in said:
                    wrong.append(said[said.find("nanguard failed on") :][:200])
            except subprocess.TimeoutExpired:
                wrong.append(f"a check took more than {_HANGS:.0f} s")
            ended.set()
            changer.join()
            counts["checks"] += 1
            counts["files"] += len(paths)
    return {**counts, "wrong": wrong}


def _change(paths: list[Path], ended: threading.Event, seed: float) -> None:
    rng = random.Random(seed)  # noqa: S311 - nothing here is a secret
    while not ended.wait(rng.random() * 0.01):
        path = rng.choice(paths)
        what = rng.randrange(5)
        try:
            size = path.stat().st_size if path.exists() else 0
            if what == 0:
                os.truncate(path, rng.randrange(size + 1))
            elif what == 1:
                with path.open("ab") as file:
                    file.write(rng.randbytes(200))
            elif what == 2:
                path.write_bytes(rng.choice(paths).read_bytes())
            elif what == 3:
                path.unlink()
            else:
                path.touch()
        except OSError:
            continue


def memory(more: Callable[[int], bool], rng: random.Random) -> dict[str, Any]:
    """Lets replays of a bad step find no memory, and sees whether the run comes to the same end."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="nanguard-soak-") as scratch:
        script = str(SCRIPTS / "out_of_memory.py")
        plain = _printed([sys.executable, script, "0"], scratch)
        while more(counts["runs"]):
            allowed = rng.choice((1, 2, 3, 5))
            run = [sys.executable, "-m", "nanguard", "run", "--incidents", f"i{counts['runs']}"]
            done = _printed([*run, "--", sys.executable, script, str(allowed)], scratch)
            if done != plain:
                wrong.append(f"after {allowed} calls: {done!r} instead of {plain!r}")
            written = list(Path(scratch, f"i{counts['runs']}").glob("*/incident.json"))
            if len(written) != 1:
                wrong.append(f"after {allowed} calls: {len(written)} incidents")
            counts["runs"] += 1
    return {**counts, "wrong": wrong}


def _printed(command: list[str], folder: str) -> tuple[int, str]:
    done = subprocess.run(  # noqa: S603 - our own scripts
        command, cwd=folder, capture_output=True, text=True, timeout=_HANGS, check=False
    )
    return done.returncode, done.stdout


PHASES = ("start", "data", "forward", "backward", "step", "snapshot", "after")


def ranks(more: Callable[[int], bool], rng: random.Random) -> dict[str, Any]:
    """Kills one of two ranks in each phase of a step, and resumes both."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="nanguard-soak-") as scratch:
        whole = _ranked(Path(scratch, "whole"), "none", -1, 0)
        while more(counts["kills"]):
            phase, rank = PHASES[counts["kills"] % len(PHASES)], rng.randrange(2)
            folder = Path(scratch, str(counts["kills"]))
            code, _ = _ranked(folder, phase, rank, rng.randrange(6, 20))
            if code in (0, None):
                wrong.append(f"{phase}, rank {rank}: {'it hangs' if code is None else 'no kill'}")
            if _ranked(folder, "none", -1, 0) != whole:
                wrong.append(f"{phase}, rank {rank}: the resumed run ends differently")
            counts["kills"] += 1
            counts[phase] += 1
    return {**counts, "wrong": wrong}


def _ranked(folder: Path, phase: str, rank: int, step: int) -> tuple[int | None, str]:
    """Runs two ranks; returns the exit code, None if they hang, and what the first has printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    words = [str(SCRIPTS / "two_ranks.py"), str(folder), phase, str(rank), str(step)]
    process = subprocess.Popen(  # noqa: S603 - our own script
        [*command, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        said, _ = process.communicate(timeout=_HANGS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""
    return process.returncode, said


PARTS = {"kills": kills, "disk": disk, "files": files, "memory": memory, "ranks": ranks}


def main() -> int:
    """Runs the parts, one after the other; returns 1 if anything was lost."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--seconds", type=float, help="for all parts together")
    parser.add_argument("--count", type=int, help="how often each part does what it does")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="a file for the counts, as JSON")
    asked = parser.parse_args()
    unknown = [name for name in asked.parts if name not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; there are: {', '.join(PARTS)}")
    names = asked.parts or list(PARTS)
    if asked.seconds is None and asked.count is None:
        asked.seconds = 600.0
    told: dict[str, Any] = {"command": " ".join(["python", "-m", "benchmarks.soak", *sys.argv[1:]])}
    for name in names:
        began = time.monotonic()
        share = None if asked.seconds is None else asked.seconds / len(names)

        def more(done: int, began: float = began, share: float | None = share) -> bool:
            late = share is not None and time.monotonic() - began > share
            return not late and (asked.count is None or done < asked.count)

        rng = random.Random(f"{asked.seed}/{name}")  # noqa: S311 - it has to be repeatable
        told[name] = {**PARTS[name](more, rng), "seconds": round(time.monotonic() - began)}
        print(name, json.dumps(told[name]), flush=True)
        if asked.output is not None:
            asked.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return int(any(told[name]["wrong"] for name in names))


if __name__ == "__main__":
    raise SystemExit(main())
