"""The sample at fault, and the line that made it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.test_run import incidents, run

# A loader that draws a batch ahead, as those of Accelerate do.
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = torch.randn(40, 4)
data[21, 1] = float("nan")
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def ahead(loader):
    batches = iter(loader)
    now = next(batches)
    for after in batches:
        yield now
        now = after
    yield now

for (x,) in ahead(DataLoader(TensorDataset(data), batch_size=8)):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


# The forward pass is in a generator, over each of the batches of a step.
ADDED_UP = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def losses(model, loader):
    for (x,) in loader:
        x = (x - x.mean(1, keepdim=True)) / x.std(1, keepdim=True)
        yield model(x).square().mean() / 4

torch.manual_seed(0)
data = torch.randn(32, 4)
data[1] = 1.5
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, loss in enumerate(losses(model, DataLoader(TensorDataset(data), batch_size=4))):
    loss.backward()
    if step % 4 == 3:
        optimizer.step()
        optimizer.zero_grad()
"""


def test_sample_in_the_first_of_several_batches_of_a_step(tmp_path):
    (tmp_path / "train.py").write_text(ADDED_UP)
    done = run(tmp_path, sys.executable, "train.py")
    assert done.returncode == 0, done.stderr
    (found,) = incidents(tmp_path)
    assert (found["step"], found["cause"]["code"]) == (0, "degenerate-statistics")
    assert (found["samples"], found["dataset_indices"]) == ([1], [1])


def test_sample_of_a_loader_that_looks_ahead(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "nanguard", "run", "--incidents", "found", "--"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment,
        check=True,
        timeout=120,
        capture_output=True,
    )
    (path,) = tmp_path.glob("found/*/incident.json")
    found = json.loads(path.read_text())
    assert (found["step"], found["cause"]["code"]) == (2, "bad-input-data")
    assert (found["samples"], found["dataset_indices"]) == ([5], [21])
    assert found["fixes"][0]["verified"]


@pytest.mark.parametrize("device", ["cpu", "late"])
def test_bad_batch_is_made_again(tmp_path, device):
    done = run(tmp_path, sys.executable, Path(__file__).parent / "scripts" / "rates.py", device)
    check_rates(done, tmp_path)


def check_rates(done, folder):
    """Looks at what was said about ``rates.py``."""
    assert done.returncode == 0, done.stderr
    found = incidents(folder)[0]
    assert (found["step"], found["samples"], found["dataset_indices"]) == (3, [1], [13])
    assert (found["origin"]["op"], found["origin"]["line"]) == ("aten.div", 27)
    assert found["cause"]["code"] == "division-by-zero"
