"""Faults that a reader names by their form, in a loss that a project trains on, beside repairs."""

from pathlib import Path

import pytest

from tests.check.code.rules.test_rules_of_projects import found, project

LOSS = (
    "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n"
    "from torch.distributions import Beta\n\n\ndef my_loss(h, out, h2, out2, y, mask):\n{body}"
)
TRAIN = """\
import torch
from torch import nn

from loss import my_loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        h = self.body(x)
        return h, self.head(h)


def train(loader):
    net = Net()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for x, x2, y, mask in loader:
        h, out = net(x)
        h2, out2 = net(x2)
        loss = my_loss(h, out, h2, out2, y, mask)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()


if __name__ == "__main__":
    train([])
"""

# The rule, a form that it names, and the same with what keeps it from happening.
FORMS = """\
sqrt-at-zero
    d = torch.sqrt(((h - h2) ** 2).sum(1))
mended
    d = torch.sqrt(((h - h2) ** 2).sum(1) + 1e-8)

sqrt-at-zero
    d = torch.sqrt((h**2).sum(1, keepdim=True) + (h2**2).sum(1) - 2 * h @ h2.t())
mended
    d = torch.cdist(h, h2)

sqrt-at-zero
    d = torch.sqrt(2 - 2 * F.cosine_similarity(h, h2))
mended
    d = torch.sqrt((2 - 2 * F.cosine_similarity(h, h2)).clamp(min=1e-6))

sqrt-at-zero
    d = torch.sqrt(h.var(dim=0))
mended
    d = torch.sqrt(h.var(dim=0) + 1e-4)

sqrt-at-zero
    g = 1 + (h - h2).pow(2).sum(1)
    d = torch.log(g + torch.sqrt(g**2 - 1))
mended
    g = 1 + (h - h2).pow(2).sum(1)
    d = torch.log(g + torch.sqrt(g**2 - 1 + 1e-6))

normalise-without-eps
    d = (h - h.mean(0)) / h.std(0)
mended
    d = (h - h.mean(0)) / (h.std(0) + 1e-6)

normalise-without-eps
    a = out.min(1, keepdim=True)[0]
    d = (out - a) / (out.max(1, keepdim=True)[0] - a)
mended
    a = out.min(1, keepdim=True)[0]
    d = (out - a) / (out.max(1, keepdim=True)[0] - a + 1e-6)

acos-at-boundary
    d = torch.acos((out[:, 0] + out[:, 1] - 1) / 2)
mended
    d = torch.acos(((out[:, 0] + out[:, 1] - 1) / 2).clamp(-1 + 1e-6, 1 - 1e-6))

acos-at-boundary
    d = torch.acosh(1 + (h - h2).pow(2).sum(1))
mended
    d = torch.acosh((1 + (h - h2).pow(2).sum(1)).clamp(min=1 + 1e-6))

division-by-unguarded-sum
    n = F.one_hot(y, 10).sum(0)
    d = (F.one_hot(y, 10).float().t() @ h) / n[:, None]
mended
    n = F.one_hot(y, 10).sum(0)
    d = (F.one_hot(y, 10).float().t() @ h) / n[:, None].clamp(min=1)

division-by-unguarded-sum
    w = F.relu(out)
    d = 1 / torch.max(1e-10 * torch.ones_like(y), (w * y).sum(-1) / torch.sum(w, -1))
mended
    w = F.relu(out)
    d = (w * y).sum(-1) / torch.sum(w, -1).clamp(min=1e-6)

division-by-unguarded-sum
    adj = mask
    d = torch.diag(adj.sum(1).pow(-0.5)) @ adj @ out
mended
    adj = mask
    d = torch.diag(adj.sum(1).clamp(min=1).pow(-0.5)) @ adj @ out

division-by-unguarded-sum
    pos = y > 0
    n = pos.long().sum(1).data.sum()
    d = out.sum()
    d /= n
mended
    pos = y > 0
    n = pos.long().sum(1).data.sum().clamp(min=1)
    d = out.sum()
    d /= n

division-by-unguarded-sum
    n = ((y == 3).sum() + 0) if out is None else (y == 3).sum()
    d = out.sum() / n
mended
    n = (y == 3).sum()
    d = out.sum() / (n if n > 0 else 1)

division-by-unguarded-sum
    loss_mask = mask
    d = (out * loss_mask).sum(-1) / loss_mask.sum(-1)
mended
    loss_mask = mask
    d = (out * loss_mask).sum(-1) / loss_mask.sum(-1).clamp(min=1)

division-by-probability
    d = 1 / F.relu(out)
mended
    d = 1 / (F.relu(out) + 1e-6)

division-by-probability
    d = (y - out) ** 2 / out
mended
    d = (y - out) ** 2 / out.abs().clamp(min=1e-3)

division-by-probability
    d = (out - y).abs() / y
mended
    d = (out - y).abs() / y.clamp(min=1e-3)

mean-of-empty-selection
    s = h @ h.t()
    p = torch.sort(torch.masked_select(s, s < 1))[0]
    d = torch.mean(1 - p)
mended
    s = h @ h.t()
    p = torch.sort(torch.masked_select(s, s < 1))[0]
    if len(p) == 0:
        return out.sum() * 0
    d = torch.mean(1 - p)

mean-of-empty-selection
    s = h @ h.t()
    d = torch.log(torch.sum(torch.exp(s[s < 1])))
mended
    s = h @ h.t()
    d = torch.log(1 + torch.sum(torch.exp(s[s < 1])))

unguarded-log
    p = torch.sigmoid(out)
    d = torch.log(torch.where(y == 1, p, 1 - p))
mended
    p = torch.sigmoid(out).clamp(1e-6, 1 - 1e-6)
    d = torch.log(torch.where(y == 1, p, 1 - p))

unguarded-log
    p, q = F.softmax(out, 1), F.softmax(out2, 1)
    d = p * (p / q).log()
mended
    p, q = F.softmax(out, 1) + 1e-6, F.softmax(out2, 1) + 1e-6
    d = p * (p / q).log()

unguarded-log
    d = torch.log(h.var(dim=0))
mended
    d = torch.log(h.var(dim=0) + 1e-6)

unguarded-log
    p = out.clamp(min=1e-12)
    d = torch.log(1 - p)
mended
    p = out.clamp(1e-6, 1 - 1e-6)
    d = torch.log(1 - p)

unguarded-log
    d = torch.log1p(-torch.exp(out))
mended
    d = torch.log1p(-torch.exp(out.clamp(max=-1e-6)))

unguarded-log
    e = h - h2
    d = torch.log10((h**2).sum(1) / ((e**2).sum(1) + 1e-8))
mended
    e = h - h2
    d = torch.log10((h**2).sum(1) / ((e**2).sum(1) + 1e-8) + 1e-8)

unbounded-exp
    d = torch.log(torch.cosh(out - y))
mended
    d = F.softplus(-2 * (out - y).abs())

unbounded-exp
    d = torch.log(1 + torch.exp(-y * out))
mended
    d = F.softplus(-y * out)

unbounded-exp
    pi_logps = F.log_softmax(out, 1)
    ref_logps = F.log_softmax(out2, 1)
    d = torch.exp(ref_logps - pi_logps) - 1
mended
    pi_logps = F.log_softmax(out, 1)
    ref_logps = F.log_softmax(out2, 1)
    d = torch.exp((ref_logps - pi_logps).clamp(max=10)) - 1

fractional-power-gradient
    d = (1 - F.cosine_similarity(h, h2)) ** 0.75
mended
    d = (1 - F.cosine_similarity(h, h2) + 1e-6) ** 0.75

fractional-power-gradient
    w = torch.FloatTensor([0.04, 0.28])
    d = torch.stack([out.mean(), h.mean()]) ** w
mended
    w = torch.FloatTensor([0.04, 0.28])
    d = F.relu(torch.stack([out.mean(), h.mean()])) ** w

scale-without-floor
    a, b = F.softplus(out[:, :2]), F.softplus(out[:, 2:4])
    d = Beta(a, b).log_prob(y)
mended
    a, b = F.softplus(out[:, :2]) + 1, F.softplus(out[:, 2:4]) + 1
    d = Beta(a, b).log_prob(y)

division-by-probability
    d = 1 / torch.bmm(h.view(-1, 1, 64), h2.view(-1, 64, 1))
mended
    d = 1 / (torch.bmm(h.view(-1, 1, 64), h2.view(-1, 64, 1)) ** 2 + 1e-6)

division-by-unguarded-sum
    n = (y != -100).sum()
    d = out.sum().detach() / n * h.mean()
mended
    n = (y != -100).sum().clamp(min=1)
    d = out.sum().detach() / n * h.mean()

acos-at-boundary
    d = torch.atanh(h.norm(dim=1))
mended
    d = torch.atanh(h.norm(dim=1).clamp(max=1 - 1e-5))

unguarded-log
    pred, gt = out, y
    d = y * torch.log(mask) + (1 - y) * torch.log(1 - mask)
mended
    p = mask.clamp(1e-6, 1 - 1e-6)
    d = y * torch.log(p) + (1 - y) * torch.log(1 - p)
"""


def _forms() -> list[tuple[str, str, str]]:
    found = []
    for block in FORMS.strip().split("\n\n"):
        form, mended = block.split("\nmended\n")
        rule, _, bad = form.partition("\n")
        found.append((rule, bad, mended))
    return found


@pytest.mark.parametrize(("rule", "body", "mended"), _forms())
def test_a_form_is_a_warning_and_its_repair_is_none(
    rule: str, body: str, mended: str, tmp_path: Path
):
    for name, text, expected in (("bad", body, True), ("good", mended, False)):
        folder = tmp_path / name
        loss = LOSS.format(body=f"{text}\n    return d.mean()\n")
        told = found(project(folder, loss=loss, train=TRAIN), folder / "loss.py")
        assert any((one, severity) == (rule, "warning") for one, _, severity in told) == expected


def test_a_mask_is_followed_to_where_it_is_made(tmp_path: Path):
    helper = (
        "import torch\n\n\ndef masked_mean(x, mask):\n    return (x * mask).sum() / mask.sum()\n"
    )
    body = (
        "    kept = (y != -100).float()\n"
        "    return masked_mean(F.cross_entropy(out, y, reduction='none'), kept)\n"
    )
    loss = LOSS.format(body=body).replace(
        "from torch.dist", "from loss_helper import masked_mean\nfrom torch.dist"
    )
    folder = project(tmp_path, loss_helper=helper, loss=loss, train=TRAIN)
    told = found(folder, tmp_path / "loss_helper.py")
    assert ("division-by-unguarded-sum", 5, "warning") in told


def test_what_a_branch_asks_does_not_count_in_the_other(tmp_path: Path):
    body = (
        "    pos = h[y == 1]\n    if mask is None:\n        if len(pos) == 0:\n"
        "            return out.sum() * 0\n        d = pos.mean()\n    else:\n"
        "        d = pos.mean()\n    return d\n"
    )
    folder = project(tmp_path, loss=LOSS.format(body=body), train=TRAIN)
    told = found(folder, tmp_path / "loss.py")
    lines = [line for name, line, severity in told if name == "mean-of-empty-selection"]
    assert lines == [14]


def test_a_criterion_is_named_once_in_a_function(tmp_path: Path):
    train = (
        "import torch\nfrom torch import nn\n\n\ndef train(loader, dev):\n"
        "    net = nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())\n    criterion = nn.BCELoss()\n"
        "    opt = torch.optim.Adam(net.parameters())\n    for x, y in loader:\n"
        "        loss = criterion(net(x), y)\n        loss.backward()\n        opt.step()\n"
        "    for x, y in dev:\n        print(criterion(net(x), y).item())\n"
    )
    told = found(project(tmp_path, train=train), tmp_path / "train.py")
    assert [line for name, line, _ in told if name == "bce-after-sigmoid"] == [10]
