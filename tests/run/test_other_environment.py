"""nanguard in one environment (``uvx``, ``pipx``) guards a command of another without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
# What nanguard needs, and what a user's environment need not have.
OURS = (
    "nanguard", "_editable_impl_nanguard", "rich", "pathspec", "yaml", "_yaml", "tomli", "polars",
)  # fmt: skip
SCRIPT = """
import importlib.util
import torch
from torch import nn
assert importlib.util.find_spec("rich") is None
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    weight = torch.ones(4) * (step != 5)
    loss = (model(torch.randn(4, 4)).pow(2).squeeze(1) * weight).sum() / weight.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """A Python that has torch, and nothing of nanguard's."""
    folder = tmp_path_factory.mktemp("theirs")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for entry in Path(torch.__file__).parents[1].iterdir():
        name = entry.name.partition(".")[0].partition("-")[0].lower()
        if name not in OURS and entry.suffix != ".pth" and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def test_a_command_of_an_environment_without_nanguard_is_guarded_and_explained(tmp_path, python):
    (tmp_path / "train.py").write_text(SCRIPT)
    usual = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    # Our own Python finds nanguard here; the one that trains starts without this folder.
    start = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); "
    start += "from nanguard.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", start, "run", "--run-dir", "found", "--", python, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env=usual,
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("found/*/incident.json")
    incident = json.loads(path.read_text())
    assert (incident["step"], incident["cause"]["code"]) == (5, "division-by-zero")
    assert incident["fixes"][0]["verified"]
    assert (tmp_path / "found/metrics.jsonl").read_text().count("\n") == 8
