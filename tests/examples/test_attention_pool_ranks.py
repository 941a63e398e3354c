"""The attention-pooled classifier on two ranks: who waits for whom, and its stable launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples.story import HOME

from tests.ranks import came_to_its_end

pytestmark = pytest.mark.exhaustive

FOLDER = HOME / "attention_pool_classifier"
BIN = Path(sys.executable).parent
LAUNCH = "--multi_gpu --num_processes=2 --num_machines=1 --mixed_precision=no --dynamo_backend=no"


def launched(out: Path, *sets: str, steps: int = 20):
    words = [BIN / "accelerate", "launch", *LAUNCH.split(), "--main_process_port=0", "train.py"]
    words += ["--config", "config_fixed.yaml", "--out", out, "--steps", steps]
    for one in ("training.timeout_s=6", "training.tensorboard=false", *sets):
        words += ["--set", one]
    return subprocess.run(
        list(map(str, words)),
        cwd=FOLDER,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.mark.ranks
def test_skip_on_one_rank_makes_the_other_wait_until_the_time_limit(tmp_path):
    ended = launched(tmp_path, "data.bad_records=3", "training.on_nan=skip-alone")
    assert ended.returncode != 0
    assert "Timed out waiting 6000ms" in ended.stderr


@pytest.mark.ranks
def test_skip_that_all_ranks_decide_on_comes_to_its_end(tmp_path):
    ended = launched(tmp_path, "data.bad_records=3", "training.on_nan=skip-together")
    assert came_to_its_end(ended.returncode, ended.stderr), ended.stderr[-2000:]
    first, second = (tmp_path / "train.log").read_text().splitlines()
    assert "nan" not in first
    assert second == "Epoch 1/50 | Skipped batches: 3"


@pytest.mark.ranks
def test_last_batch_of_one_sample_on_one_rank_ends_both(tmp_path):
    uneven = ["data.samples=297", "data.even_batches=false", "data.drop_last=false"]
    ended = launched(tmp_path, *uneven, "model.norm=batch", steps=40)
    assert ended.returncode != 0
    assert "Expected more than 1 value per channel" in ended.stderr


def test_stable_launch_is_what_nanguard_writes(tmp_path):
    words = [sys.executable, "-m", "nanguard", "preset", "--family", "launch", "-o", tmp_path]
    subprocess.run(list(map(str, words)), check=True, capture_output=True)
    for name, stable in (
        ("launch.sh", "launch_stable.sh"),
        ("accelerate.yaml", "accelerate_stable.yaml"),
    ):
        text = (tmp_path / name).read_text(encoding="utf-8")
        text = text.replace("accelerate.yaml", "accelerate_stable.yaml")
        text = text.replace("./launch.sh", "./launch_stable.sh")
        assert text == (FOLDER / stable).read_text(encoding="utf-8")
