"""The same scan as tasks of a Ray cluster: two workers on this machine."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from nanguard.check.scan_check import ready
from nanguard.errors import MissingDependencyError
from tests.check.plugin import told
from tests.check.test_scans import LOG, records, safetensors, shown

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the extra ray"
)
ROOT = Path(__file__).parents[2]
__all__ = ["shown"]

DRIVER = """
import json, sys
from pathlib import Path
import ray
from nanguard.check.scan_check import on_ray
from nanguard.check.scan import Scan
from tests.check import ray_work

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
read = []
scan = Scan(spread=on_ray, progress=lambda path, count: read.append(count))
files = sorted(Path(sys.argv[1]).glob("*.bin"))
answer = list(scan.each(getattr(ray_work, sys.argv[2]), files))
print("\\n" + json.dumps([answer, sum(read)]))
"""


def driven(folder: Path, work: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder), work],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def shards(folder: Path) -> int:
    for number in range(8):
        (folder / f"{number}.bin").write_bytes(b"x" * (number + 1))
    return 36


@needs_ray
def test_a_worker_that_is_killed_loses_nothing(tmp_path: Path):
    total = shards(tmp_path)
    done = driven(tmp_path, "size_after_a_kill")
    assert done.returncode == 0, done.stderr
    answer, read = json.loads(done.stdout.splitlines()[-1])
    assert answer == [[f"{number}.bin", number + 1] for number in range(8)]
    assert read == total
    assert (tmp_path / "3.killed").exists()


@needs_ray
def test_a_file_that_cannot_be_read_raises_what_it_raises_here(tmp_path: Path):
    shards(tmp_path)
    done = driven(tmp_path, "size_but_one")
    assert done.returncode == 1
    assert "nanguard.errors.SourceError: it is broken" in done.stderr


@needs_ray
def test_the_report_is_that_of_the_local_engine(tmp_path: Path, shown: Path):
    for number in range(6):
        bad = '{"text": "x", "label": 77}\n' if number == 4 else ""
        (tmp_path / f"shard-{number}.jsonl").write_text(records(50) + bad)
        (tmp_path / f"{number}.log").write_text(LOG * (number + 1) + "step 99 loss: nan\n")
        (tmp_path / f"step_{number}.safetensors").write_bytes(safetensors())
    words = (".", "--classes", "4", "--fail-on", "none")
    here = told(*words, cwd=tmp_path, plugin=shown)
    assert len(here["checked"]) == 18
    assert len(here["findings"]) > 12
    there = told(*words, "--engine", "ray", cwd=tmp_path, plugin=shown, RAY_ADDRESS="local")
    assert there == here


def test_without_ray_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingDependencyError, match=r"pip install '.*\[ray\]'"):
        ready()
