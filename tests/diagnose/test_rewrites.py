"""The same thing in a form that stays finite: made in the text only where it is the same."""

from __future__ import annotations

import pytest

from nanguard.diagnose.cause import Case
from nanguard.diagnose.rewrites import (
    binary_cross_entropy,
    log_determinant,
    log_softmax,
    logs_without_probabilities,
    shifted_exp,
)
from nanguard.replay.task import ReplayOutcome
from nanguard.replay.tracer.origin import Origin
from nanguard.replay.tracer.sites import Site
from tests.diagnose.running import found_in

TRAINING = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(z, y):
BODY


for step in range(4):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    if step == 2:
        x *= 2000
    loss = loss_of(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
LOG = """\
    p = torch.softmax(z, dim=-1)
    return -torch.log(p.gather(1, y[:, None])).mean()"""
EXP = """\
    e = torch.exp(z)
    a = e / e.sum(-1, keepdim=True)
    return (a - nn.functional.one_hot(y, 3)).square().mean()"""


def changed(repairs, folder, body, line):
    path = folder / "train.py"
    text = "def f(z, y):\n" + "".join(f"    {row}\n" for row in body)
    path.write_text(text)
    site = Site(str(path), line, "f")
    origin = Origin(
        index=0, step=0, op="aten.op", kernel="aten.op", phase="forward", module="loss",
        site=site, detail=None,
    )  # fmt: skip
    found = repairs(Case(ReplayOutcome(), origin, lab=None))
    if not found:
        return None
    (repair,) = found
    assert repair.exact
    return repair.source[1].splitlines()[line - 1].strip()


@pytest.mark.parametrize(
    ("body", "new"),
    [
        (["return torch.log(torch.softmax(z, 1))"], "return torch.log_softmax(z, 1)"),
        (["return z.softmax(dim=1).log()"], "return z.log_softmax(dim=1)"),
        (["return (z + y).softmax(-1).log()"], "return (z + y).log_softmax(-1)"),
        (["p = F.softmax(z, 1)", "return p.log()"], "return F.log_softmax(z, 1)"),
        (["p = z.softmax(1)", "return -p[0, y].log()"], "return -z.log_softmax(1)[0, y]"),
        (
            ["p = z.softmax(1)", "q = p.gather(1, y)", "return q.squeeze(1).log()"],
            "return z.log_softmax(1).gather(1, y).squeeze(1)",
        ),
        (["p = z.softmax(1)", "q = p.gather(1, y)", "z = z + 1", "return q.log()"], None),
        (["p = z.softmax(1)", "q = p.gather(1, y)", "y = y + 1", "return q.log()"], None),
        (["p = z.softmax(1)", "z = z + 1", "return p.log()"], None),
        (["p = z.softmax(1)", "p = p + 0.1", "return p.log()"], None),
        (["p = z.softmax(1)", "return (p * y).log()"], None),
        (["p = self.softmax(z)", "return p.log()"], None),
        (["p = softmax(z)", "return p.log()"], None),
        (["return y.log()"], None),
    ],
)
def test_log_of_a_softmax(tmp_path, body, new):
    assert changed(log_softmax, tmp_path, body, len(body) + 1) == new


@pytest.mark.parametrize(
    ("body", "new"),
    [
        (["return torch.log(torch.linalg.det(z))"], "return torch.linalg.slogdet(z)[1]"),
        (["return 0.5 * z.det().log()"], "return 0.5 * z.slogdet()[1]"),
        (["d = torch.det(z @ z.T).abs()", "return d.log()"], "return torch.slogdet(z @ z.T)[1]"),
        (["return torch.log(abs(z))"], None),
        (["d = torch.det(z)", "z = z + 1", "return d.log()"], None),
        (["return self.det(z).log()"], None),
        (["return (z.det() + y).log()"], None),
    ],
)
def test_log_of_a_determinant(tmp_path, body, new):
    assert changed(log_determinant, tmp_path, body, len(body) + 1) == new


ENTROPY = "torch.nn.functional.binary_cross_entropy"


@pytest.mark.parametrize(
    ("body", "new"),
    [
        (["return torch.log(torch.sigmoid(z))"], "return torch.nn.functional.logsigmoid(z)"),
        (
            ["p = z.sigmoid()", "return (1 - p).log()"],
            "return torch.nn.functional.logsigmoid(-(z))",
        ),
        (
            ["p = z.sigmoid()", "return -(y * p.log() + (1 - y) * (1 - p).log()).mean()"],
            f"return {ENTROPY}_with_logits(z, y)",
        ),
        (
            ["return -torch.mean((1 - y) * torch.log(1 - z) + y * torch.log(z))"],
            f"return {ENTROPY}(z, y)",
        ),
        (
            ["return -(y * z.log() + (1 - y) * (1 - z).log()).sum(1)"],
            f'return -((-{ENTROPY}(z, y, reduction="none"))).sum(1)',
        ),
        (["return -(y * z.log() + (1 - z) * (1 - y).log()).mean()"], None),
        (["return -(y * z.log() + (2 - y) * (1 - z).log()).mean()"], None),
        (["p = self.sigmoid(z)", "return p.log()"], None),
    ],
)
def test_log_of_a_sigmoid(tmp_path, body, new):
    assert changed(logs_without_probabilities, tmp_path, body, len(body) + 1) == new


@pytest.mark.parametrize(
    ("body", "new"),
    [
        (
            ["e = torch.exp(z)", "return e / e.sum(dim=1, keepdim=True)"],
            "e = torch.exp(z - z.amax(1, keepdim=True))",
        ),
        (
            ["e = z.exp()", "n = torch.sum(e, -1, keepdim=True) + 1e-8", "return e / n"],
            "e = (z - z.amax(-1, keepdim=True)).exp()",
        ),
        (
            ["e = torch.exp(z / 2)", "return e / e.sum(1, True)"],
            "e = torch.exp((z / 2) - (z / 2).amax(1, keepdim=True))",
        ),
        (["e = torch.exp(z)", "return e / e.sum(1, keepdim=True), e"], None),
        (["e = torch.exp(z)", "return e / (e.sum(1, keepdim=True) + 1.0)"], None),
        (["e = torch.exp(z)", "return e / y.sum(1, keepdim=True)"], None),
        (["e = torch.exp(z)", "return e / e.sum()"], None),
        (["e = torch.exp(drop(z))", "return e / e.sum(1, keepdim=True)"], None),
    ],
)
def test_exp_over_its_sum(tmp_path, body, new):
    assert changed(shifted_exp, tmp_path, body, 2) == new


@pytest.mark.parametrize(
    ("body", "line", "second"),
    [
        (LOG, "+    return -torch.log_softmax(z, dim=-1).gather(1, y[:, None]).mean()\n", "(min="),
        (EXP, "+    e = torch.exp(z - z.amax(-1, keepdim=True))\n", "(max="),
    ],
)
def test_comes_before_a_bound(tmp_path, body, line, second):
    found = found_in(tmp_path, TRAINING.replace("BODY", body), 2)
    first, then, *_ = found["fixes"]
    assert line in first["diff"]
    assert first["verified"]
    assert second in then["diff"]


@pytest.mark.parametrize(
    ("loss", "new"),
    [
        ("-(y * p.log() + (1 - y) * (1 - p).log()).mean()", "NAME(z, y)"),
        ("torch.mean(-y * torch.log(p) - (1 - y) * torch.log(1 - p))", "NAME(z, y)"),
        ("(-y * p.log() - (1 - y) * (1 - p).log()).mean()", "NAME(z, y)"),
        ("(-(y * p.log()) - (1 - y) * (1 - p).log()).sum()", "NAME(z, y, NONE).sum()"),
        ("-(y * p.log() + (1 - y) * (1 - p).log()).sum()", "-((-NAME(z, y, NONE))).sum()"),
        ("(y * p.log() - (1 - y) * (1 - p).log()).mean()", None),
    ],
)
def test_binary_cross_entropy_in_the_forms_people_write(tmp_path, loss, new):
    body = ["p = torch.sigmoid(z)", f"return {loss}"]
    name = "torch.nn.functional.binary_cross_entropy_with_logits"
    made = changed(binary_cross_entropy, tmp_path, body, 3)
    if new is None:
        assert made is None
    else:
        text = new.replace("NAME", name).replace("NONE", 'reduction="none"')
        assert made == f"return {text}"
