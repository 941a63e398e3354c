"""Two of the systems under ``nanguard run --recover``: they break, and come to a good end."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest
from examples.story import HOME

pytestmark = pytest.mark.exhaustive


def recover(folder, system, rate_key, *arguments, options=()):
    """Runs a system under recovery; returns what it printed and its attempts."""
    own = [sys.executable, "-m", "nanguard", "run", "--recover", "--no-trace", "--backoff", "0"]
    own += ["--incidents", str(folder / "found"), "--checkpoints", str(folder / "out/checkpoints")]
    own += ["--resume-arg", "--resume {checkpoint}", "--lr-arg", f"--set {rate_key}={{lr}}"]
    train = [sys.executable, "train.py", "--config", "config.yaml", "--out", str(folder / "out")]
    done = subprocess.run(
        [*own, *options, "--", *train, *arguments],
        cwd=HOME / system,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    text = (folder / "found/lineage.jsonl").read_text()
    return done.stdout, list(map(json.loads, text.splitlines()))


def test_radio_diffusion_dies_and_resumes_at_its_milestone(tmp_path):
    out, attempts = recover(
        tmp_path, "radio_diffusion", "trainer.lr", "--set", "trainer.nan_loss=stop", "--steps", "80"
    )
    assert "total_loss is" in out
    first, last = attempts[0], attempts[-1]
    assert first["outcome"] == "failed"
    assert first["lost"] <= 20  # a milestone every 20 steps
    assert last["checkpoint"].endswith(".pt")
    final = next(line for line in reversed(out.splitlines()) if "total_loss:" in line)
    assert "79/80" in final
    assert math.isfinite(float(final.split("total_loss: ")[1].split(",")[0]))


def test_mmdit_language_goes_back_to_before_its_nan_gradients(tmp_path):
    """The weights stay finite all the time; what was saved after the first NaN is passed over."""
    out, attempts = recover(
        tmp_path,
        "mmdit_language",
        "training.learning_rate",
        "--steps",
        "120",
        options=["--lr-cut", "0.1"],
    )
    assert "NaN gradients in" in out
    first, last = attempts[0], attempts[-1]
    assert first["outcome"] == "stopped"
    assert last["checkpoint"].endswith("step-000025.pt")
    assert last["changes"] == {"lr": 0.001}
    told = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    losses = [line["loss"] for line in told if "loss" in line]
    assert math.isfinite(losses[-1])
    assert losses[-1] < 0.7 * losses[0]
    assert math.isfinite(told[-1]["eval_latent_error"])
