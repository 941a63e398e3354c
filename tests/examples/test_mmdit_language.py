"""The language model goes on from a checkpoint bit for bit, and refuses what it cannot train on."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from examples.story import HOME

pytestmark = pytest.mark.exhaustive

FOLDER = HOME / "mmdit_language"
SMALL = {
    "data.documents": 200,
    "training.gradient_accumulation_steps": 2,
    "training.eval_steps": 2,
    "training.save_steps": 3,
}


def train(*arguments, **settings):
    """Runs the training script, which has to end by itself."""
    words = [sys.executable, "train.py", "--config", "config_fixed.yaml", *map(str, arguments)]
    for key, value in {**SMALL, **settings}.items():
        words += ["--set", f"{key}={value}"]
    return subprocess.run(
        words,
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of seven steps."""
    out = tmp_path_factory.mktemp("whole")
    assert train("--out", out, "--steps", 7).returncode == 0
    return out


def test_resumed_run_is_bit_identical(whole, tmp_path):
    resumed = train(
        "--out", tmp_path, "--steps", 7, "--resume", whole / "checkpoints/step-000003.pt"
    )
    assert resumed.returncode == 0, resumed.stderr
    states = [
        torch.load(out / "checkpoints/step-000007.pt", weights_only=True)
        for out in (whole, tmp_path)
    ]
    assert differences(*states) == []
    lines = (whole / "train.jsonl").read_text().splitlines()
    after = next(index for index, line in enumerate(lines) if line.startswith('{"step": 3, "lr"'))
    assert (tmp_path / "train.jsonl").read_text().splitlines() == lines[after:]


def test_rate_of_the_config_counts_when_it_is_resumed(whole, tmp_path):
    path = whole / "checkpoints/step-000003.pt"
    words = ("--out", tmp_path, "--steps", 4, "--resume", path)
    assert train(*words, **{"training.learning_rate": 5e-5}).returncode == 0
    line = (tmp_path / "train.jsonl").read_text().splitlines()[0]
    assert '"lr": 5e-06' in line  # a tenth of the warm-up has passed


@pytest.mark.parametrize(
    ("settings", "resume", "said"),
    [
        (
            {"training.learning_rate": "fast"},
            None,
            "learning_rate is 'fast', not a number",
        ),
        ({"training.lr": 1}, None, "training.lr is no setting of this run"),
        ({"training.batch_size": 900}, None, "training.batch_size is 900, but there are only 180"),
        ({}, "none.pt", "cannot be loaded"),
        ({"size": "small"}, "step-000003.pt", "width is 128 there, and 256 in the config"),
    ],
)
def test_bad_input_is_one_line_before_training(whole, tmp_path, settings, resume, said):
    words = ["--resume", whole / "checkpoints" / resume] if resume else []
    ended = train("--out", tmp_path, *words, **settings)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("train.py: ")
    assert said in line
    assert not (tmp_path / "train.jsonl").exists()


def differences(one, other, where=""):
    """Returns where two checkpoints differ."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, other) else [where]
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return [bad for key in one for bad in differences(one[key], other[key], f"{where}.{key}")]
    if isinstance(one, (list, tuple)):
        pairs = zip(one, other, strict=True)
        return [bad for pair in pairs for bad in differences(*pair, where)]
    return [] if one == other else [where]
