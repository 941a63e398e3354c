"""Losses at the edge of what they are defined for: which part of the script is named for it."""

from __future__ import annotations

import pytest

from tests.diagnose.running import found_in

pytestmark = pytest.mark.slow

BEGIN = """
import torch
import torch.nn.functional as F
from torch import nn
torch.manual_seed(0)
model = nn.Linear(6, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
"""
END = """
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
ENTROPY = """
for step in range(12):
    logits = model(torch.randn(8, 6))
    if step == 7:
        logits = logits.masked_fill(torch.tensor([False, False, False, True]), float("-inf"))
    p = logits.softmax(-1)
    loss = (p * p.log()).sum(-1).mean() + logits[:, 0].square().mean()
"""
ACTION = """
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = model

    def log_prob(self, x, action):
        before = torch.atanh(action)
        return -((before - self.mean(x)) ** 2).sum(-1)

policy = Policy()
for step in range(12):
    action = torch.rand(8, 4) * 1.8 - 0.9
    if step == 7:
        action[3, 1] = 1.0
    loss = -policy.log_prob(torch.randn(8, 6), action).mean()
"""
SMOOTHED = """
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model

    def forward(self, x, y, allowed):
        logits = self.inner(x).masked_fill(~allowed, float("-inf"))
        return F.cross_entropy(logits, y, label_smoothing=0.1)

head = Head()
for step in range(12):
    allowed = torch.ones(4, dtype=torch.bool)
    allowed[3] = step != 7
    loss = head(torch.randn(8, 6), torch.randint(0, 3, (8,)), allowed)
"""
ADDED = """
offset = torch.zeros(4)
offset[2] = float("-inf")
for step in range(12):
    found = model(torch.randn(8, 6))
    loss = (found + offset if step == 7 else found).square().mean()
"""


HOOKED = """
model.weight.register_hook(lambda grad: grad / grad.norm())
for step in range(12):
    loss = model(torch.randn(8, 6) * float(step != 7)).square().mean()
"""


@pytest.mark.parametrize(
    ("body", "code", "causes"),
    [
        (ENTROPY, "loss = (p * p.log())", {"log-or-sqrt-domain"}),
        (ACTION, "before = torch.atanh(action)", {"label-out-of-range"}),
        (SMOOTHED, "return F.cross_entropy", {"label-out-of-range"}),
        (HOOKED, "model.weight.register_hook", {"division-by-zero"}),
        # No target has chosen anything here.
        (ADDED, "", {"unknown", "bad-input-data"}),
    ],
    ids=["entropy", "action", "smoothed", "hooked", "added"],
)
def test_edge(tmp_path, body, code, causes):
    incident = found_in(tmp_path, BEGIN + body.rstrip() + END, 7)
    assert incident["origin"]["code"].startswith(code)
    assert incident["cause"]["code"] in causes
    if code:
        assert any(fix["verified"] for fix in incident["fixes"])


EVALUATED = """
for step in range(6):
    loss = model(torch.randn(8, 6)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def evaluate(x):
    model.eval()
    with torch.no_grad():
        found = model(x)
        perplexity = torch.exp(found.abs().sum())
    return perplexity.item()

x = torch.randn(8, 6)
x[5] = 400.0
print("perplexity", evaluate(x))
"""


def test_number_that_only_an_evaluation_reads(tmp_path):
    incident = found_in(tmp_path, BEGIN + EVALUATED)
    assert incident["origin"]["code"].startswith("perplexity = torch.exp")
    assert incident["cause"]["code"] == "exp-overflow"


SPARSE = """
import torch
from torch import nn
torch.manual_seed(0)
table = nn.Embedding(50, 4, sparse=True)
optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.01)
for step in range(12):
    found = table(torch.randint(0, 50, (8,))) * float(step != 7)
    loss = found.square().sum(1).sqrt().mean()
"""


def test_sparse_gradient_is_traced(tmp_path):
    incident = found_in(tmp_path, SPARSE.rstrip() + END, 7)
    assert incident["origin"]["code"].startswith("loss = found.square()")
    assert incident["cause"]["code"] == "gradient-singularity"
    assert incident["replay"]["method"] == "in-place"
    assert incident["fixes"][0]["verified"]


def test_memory_that_was_never_filled_is_named_wherever_it_is_used(tmp_path):
    body = """
torch.use_deterministic_algorithms(True)  # so that it holds NaN
for step in range(12):
    x = torch.randn(8, 6)
    shift = torch.empty(6) * 0.1 if step == 7 else 0.0
    loss = model(x + shift).square().mean()
"""
    incident = found_in(tmp_path, BEGIN + body.rstrip() + END, 7)
    assert incident["origin"]["code"].startswith("shift = torch.empty(6)")
    assert incident["cause"]["code"] == "bad-initialization"
