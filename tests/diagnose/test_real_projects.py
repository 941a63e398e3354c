"""What whole projects have and small scripts do not: layers twice, optimizers of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.diagnose.running import found_in

pytestmark = pytest.mark.slow

TWO_LAYERS = """
import torch
import torch.nn.functional as F
from torch import nn


class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.drop = 0.0

    def forward(self, x):
        logits = self.gate(x)
        if self.drop:
            gone = torch.rand(len(x), 3) < self.drop
            logits = logits.masked_fill(gone, float("-inf"))
        weight = F.softmax(logits, dim=-1)
        return sum(w[:, None] * one(x) for w, one in zip(weight.T, self.experts))


torch.manual_seed(0)
model = nn.Sequential(Mixture(), Mixture())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(30):
    for layer in model:
        layer.drop = 0.6 if step == 20 else 0.0
    x = torch.randn(16, 8)
    loss = (model(x) - x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_mask_of_a_layer_that_comes_twice_is_changed_once(tmp_path):
    found = found_in(tmp_path, TWO_LAYERS, 20)
    first, *_ = found["fixes"]
    assert first["verified"]
    assert first["silences"]
    assert "+            logits = logits.masked_fill(gone, -1e9)\n" in first["diff"]
    assert found["cause"]["code"] == "fully-masked-softmax"
    assert found["cause"]["confidence"] >= 0.9


GRID = """
import torch
from torch import nn

axis = torch.arange(16.0)
down, across = torch.meshgrid(axis, axis, indexing="ij")


def target(where):
    far = (down - where[:, 0, None, None]) ** 2 + (across - where[:, 1, None, None]) ** 2
    heat = torch.exp(-far / 2).flatten(1)
    return heat / heat.sum(-1, keepdim=True)


def main():
    rows, columns = down, across  # names of the loop's own, as big as its batches
    torch.manual_seed(0)
    model = nn.Linear(2, 256)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(30):
        where = torch.rand(16, 2) * 15
        if step == 20:
            where[5] += 400
        loss = -(target(where) * model(where).log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


main()
"""


def test_tables_that_repeat_their_rows_are_no_samples(tmp_path):
    found = found_in(tmp_path, GRID, 20)
    assert found["replay"]["method"] == "in-place"
    assert found["cause"]["code"] == "division-by-zero"
    assert found["samples"] == [5]
    assert found["fixes"][0]["verified"]


OWN_OPTIMIZER = """
import torch
from torch import nn


class Normalised(torch.optim.Optimizer):
    def __init__(self, params, lr, eps=1e-8):
        super().__init__(params, dict(lr=lr, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad.half()
                power = g.square().mean()
                state = self.state[p]
                if not state:
                    state["power"] = power
                else:
                    state["power"].mul_(0.9).add_(power, alpha=0.1)
                width = state["power"].sqrt().add_(group["eps"])
                p.add_((g / width).float(), alpha=-group["lr"])


torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = Normalised(model.parameters(), lr=1e-4)
for step in range(60):
    x = torch.randn(8, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    if step == 40:
        optimizer.state.clear()  # a warm restart
        loss = loss * 1e-5
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_update_after_the_state_was_emptied_is_replayed_without_it(tmp_path):
    found = found_in(tmp_path, OWN_OPTIMIZER, 40)
    assert found["replay"]["method"] == "in-place"
    assert found["cause"]["code"] == "half-precision-underflow"
    first, *_ = found["fixes"]
    assert first["verified"]
    # Where it is made, and not where its class hands its settings on.
    assert "+optimizer = Normalised(model.parameters(), lr=1e-4, eps=1e-4)\n" in first["diff"]


MORE_TO_TRAIN = """
import torch
from torch import nn

torch.manual_seed(0)
model, branch = nn.Linear(4, 4), None
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, eps=0.0)
for step in range(42):
    if step == 40:
        branch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        nn.init.zeros_(branch[1].weight)
        optimizer.add_param_group({"params": branch.parameters()})
    x = torch.randn(8, 4)
    out = model(x)
    if branch is not None:
        out = out + branch(x)
    loss = (out - x.flip(1)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_update_of_what_was_added_later_is_replayed(tmp_path):
    found = found_in(tmp_path, MORE_TO_TRAIN, 40)
    assert found["replay"]["method"] == "in-place"
    assert found["cause"]["code"] == "optimizer-misuse"
    assert found["fixes"][0]["verified"]


SUM_IN_HALF = """
import torch
from torch import nn


class Pool(nn.Module):
    def forward(self, x):
        return (x * x).sum(-1) / x.shape[-1]


torch.manual_seed(0)
model = nn.Sequential(nn.Conv1d(2, 4, 3), Pool())
head = nn.Linear(4, 1)
optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()], lr=1e-4)
for step in range(30):
    x = torch.randn(4, 2, 2000)
    if step == 20:
        x[2] *= 20
    with torch.autocast("cpu", dtype=torch.float16):
        pooled = model(x)
    loss = (head(pooled.float().clamp(max=100)) - 1).pow(2).mean()
    loss = loss + 1e-6 * pooled.float().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_sum_that_is_too_large_for_float16_is_taken_in_float32(tmp_path):
    found = found_in(tmp_path, SUM_IN_HALF, 20)
    assert found["cause"]["code"] == "half-precision-overflow"
    first, *_ = found["fixes"]
    assert first["verified"]
    assert "+        return (x * x).float().sum(-1) / x.shape[-1]\n" in first["diff"]


CLIPPED_UNDER_A_SCALER = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for step in range(30):
    x = torch.randn(16, 8)
    if step == 20:
        x[3] = 0
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(x)
    unit = x / x.norm(dim=1, keepdim=True)
    loss = (out.float() - unit).pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


def test_repair_is_tried_where_a_scaler_unscales_before_clipping(tmp_path):
    found = found_in(tmp_path, CLIPPED_UNDER_A_SCALER, 20)
    assert found["replay"]["method"] == "in-place"
    assert found["cause"]["code"] == "division-by-zero"
    assert found["fixes"][0]["verified"]


WEIGHTS_OF_ADVANTAGES = """
import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Linear(4, 2)
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
for step in range(30):
    x, gain = torch.randn(16, 4), torch.randn(16)
    if step == 20:
        gain[5] += 100
    with torch.no_grad():
        weight = torch.exp(gain * 1.0)
        weight = weight / weight.sum()
    loss = -(weight * policy(x).log_softmax(-1)[:, 0]).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_exponents_that_are_only_compared_lose_their_largest(tmp_path):
    found = found_in(tmp_path, WEIGHTS_OF_ADVANTAGES, 20)
    assert found["cause"]["code"] == "exp-overflow"
    first, *_ = found["fixes"]
    assert first["verified"]
    changed = "+        weight = torch.exp((exponent := gain * 1.0) - exponent.max().detach())\n"
    assert changed in first["diff"]


def test_exponents_that_count_by_themselves_keep_it(tmp_path):
    script = WEIGHTS_OF_ADVANTAGES.replace("        weight = weight / weight.sum()\n", "")
    found = found_in(tmp_path, script, 20)
    assert found["cause"]["code"] == "exp-overflow"
    assert not any("largest exponent" in fix["summary"] for fix in found["fixes"])


LOGIT_TWICE = """
import torch
from torch import nn


def to_logits(x):
    y = torch.log(x) - torch.log1p(-x)
    volume = (-torch.log(x) - torch.log1p(-x)).sum(1)
    return y, volume


torch.manual_seed(0)
model = nn.Linear(4, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(30):
    x = torch.rand(16, 4) * 0.9 + 0.05
    if step == 20:
        x[2, 1] = 1.0
    y, volume = to_logits(x)
    loss = model(y).pow(2).mean() - 1e-3 * volume.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def test_what_is_written_twice_is_bounded_twice(tmp_path):
    found = found_in(tmp_path, LOGIT_TWICE, 20)
    assert found["cause"]["code"] == "log-or-sqrt-domain"
    first, *_ = found["fixes"]
    assert first["verified"]
    assert first["diff"].count("log1p((-x).clamp(") == 2


RATE_OF_ITS_OWN = """
import numpy as np
import torch
from torch import nn


class Poly:
    def __init__(self, optimizer, total):
        self.optimizer, self.total, self.done = optimizer, total, 0

    def factor(self):
        return np.power(np.float64(1.0 - self.done / self.total), 0.9)

    def step(self):
        self.done += 1
        factor = self.factor()
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-3 * factor


torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
schedule = Poly(optimizer, 20)
for step in range(24):
    loss = model(torch.randn(8, 4)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
"""


def test_schedule_that_sets_the_rate_by_itself_is_named_and_repaired(tmp_path):
    found = found_in(tmp_path, RATE_OF_ITS_OWN, 21)
    assert found["cause"]["code"] == "optimizer-misuse"
    assert "max(1.0 - self.done / self.total, 0.0)" in found["fixes"][0]["diff"]
    assert found["origin"]["line"] == 18  # and not the one that calls the optimizer


INFINITE_MOMENT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(20):
    loss = model(torch.randn(8, 4)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    if step == 8:
        for p in model.parameters():
            p.grad.fill_(1e25)
    optimizer.step()
print("moment", float(optimizer.state[model.weight]["exp_avg_sq"].max()))
"""


@pytest.mark.parametrize(
    ("options", "code", "last"), [((), 0, "moment 0."), (("--on-bad", "stop"), 3, "")]
)
def test_an_infinite_moment_is_undone_unless_the_run_is_to_stop(tmp_path, options, code, last):
    (tmp_path / "train.py").write_text(INFINITE_MOMENT)
    words = [sys.executable, "-m", "nanguard", "run", *options, "--", sys.executable, "train.py"]
    done = subprocess.run(
        words, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == code, done.stderr
    assert done.stderr.count("optimizer state Adam is not finite") == 1
    assert last in done.stdout
    assert "inf" not in done.stdout
