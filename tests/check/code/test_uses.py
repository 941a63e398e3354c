"""What becomes of a value decides how much a finding about it weighs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nanguard.check.code_check import check_python
from nanguard.check.selection import Selection
from nanguard.source.text import Text
from tests.check.code.test_project import found, project

if TYPE_CHECKING:
    from pathlib import Path

# What a training step works out, and the code that trains on what the step gives back.
CHANCE = "    acc = torch.softmax(x, -1).log().mean()\n"
TRAINED = "\n\ndef fit(x, y, opt):\n    training_step(x, y).backward()\n    opt.step()\n"


def severities(body: str, path: str = "a.py") -> list[str]:
    text = Text(path, f"import torch\n\n\ndef training_step(x, y):\n{body}{TRAINED}")
    seen = check_python(text, Selection()).seen
    return [s.finding.severity.value for s in seen if s.finding.name == "log-of-softmax"]


@pytest.mark.parametrize(
    "after",
    [
        "    log_dict({'acc': acc.item()})\n",
        "    print(f'{acc}')\n",
        "    log('acc', acc)\n",
        "    y.gathered = acc.mean(0).data\n",
    ],
)
def test_what_is_only_shown_is_a_remark(after: str):
    assert severities(CHANCE.replace("acc", "share") + after.replace("acc", "share")) == ["info"]
    assert severities(CHANCE + after) == ["info"]


def test_what_goes_into_the_loss_is_a_warning():
    body = CHANCE.replace("acc", "scale") + "    print(scale)\n    return x.mean() * scale\n"
    assert severities(body) == ["warning"]


def test_nan_that_is_replaced_at_once_is_nothing():
    text = (
        "import torch\n\n\ndef share(x, y):\n    kept = y != 0\n"
        "    return torch.nan_to_num((x * kept).sum() / kept.sum())\n"
    )
    assert [s.finding.name for s in check_python(Text("a.py", text), Selection()).seen] == []
    text = text.replace("torch.nan_to_num", "")
    (seen,) = check_python(Text("a.py", text), Selection()).seen
    assert (seen.finding.name, seen.finding.severity.value) == ("division-by-unguarded-sum", "info")


def test_what_goes_under_the_key_of_a_log_is_a_remark():
    body = CHANCE.replace("acc =", "out['print/share%d' % 1] =") + "    return out\n"
    assert severities(body) == ["info"]
    body = CHANCE.replace("acc =", "out['scale'] =") + "    return out\n"
    assert severities(body) == ["warning"]


@pytest.mark.parametrize(("folder", "severity"), [("third_party/", "info"), ("", "warning")])
def test_what_was_copied_from_elsewhere_is_a_remark(folder: str, severity: str):
    body = CHANCE.replace("acc", "loss") + "    return loss\n"
    assert severities(body, f"{folder}a.py") == [severity]


STEP = "\n\ndef step(x, y, opt):\n    {}.sum().backward()\n    opt.step()\n"
FLOW = (
    "import torch\nfrom torch import nn\n\n\nclass Coupling(nn.Module):\n"
    "    def __init__(self):\n        super().__init__()\n        self.net = nn.Linear(4, 8)\n\n"
    "    def forward(self, x, y, reverse=False, train=True):\n"
    "        logs, m = self.net(x).chunk(2, -1)\n"
    "        {branch}\n            return (y - m) * torch.exp(-logs)\n"
    "        {other}\n            return m + torch.exp(logs) * y\n"
)


@pytest.mark.parametrize(
    ("branch", "other", "lines"),
    [
        ("if reverse:", "else:", {13: "info", 15: "warning"}),
        ("if not reverse:", "else:", {13: "warning", 15: "info"}),
        ("if train:", "else:", {13: "warning", 15: "info"}),
        ("if y is None:", "else:", {13: "warning", 15: "warning"}),
        ("if reverse or train:", "else:", {13: "warning", 15: "info"}),
    ],
)
def test_a_branch_that_samples_is_a_remark(branch: str, other: str, lines: dict[int, str]):
    text = Text("a.py", FLOW.format(branch=branch, other=other) + STEP.format("Coupling()(x, y)"))
    seen = check_python(text, Selection()).seen
    found = {s.finding.line: s.finding.severity.value for s in seen}
    assert {line: found[line] for line in lines} == lines


@pytest.mark.parametrize(("call", "severity"), [("else", "info"), ("if x is None", "warning")])
def test_what_is_called_to_evaluate_is_a_remark(call: str, severity: str):
    text = Text(
        "a.py",
        "import torch\nfrom torch import nn\n\n\nclass Answers(nn.Module):\n"
        "    def forward(self, x, train=True):\n        if train:\n"
        "            return x.sum()\n"
        f"        {call}:\n            return self.rank(x)\n\n"
        "    def rank(self, x):\n        return torch.softmax(x, -1).log()\n"
        + STEP.format("Answers()(x)"),
    )
    (seen,) = check_python(text, Selection()).seen
    assert (seen.finding.name, seen.finding.severity.value) == ("log-of-softmax", severity)


TRAP = (
    "import torch\nfrom torch import nn\nfrom torch.distributions import Categorical, Normal\n\n\n"
    "class Policy(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.net = nn.Linear(4, 8)\n\n    def forward(self, x, y):\n"
    "        p = torch.relu(self.net(x))\n"
    "        score = torch.where(p > 0, torch.log(p), torch.full_like(p, -1e9))\n"
    "{uses}\n\n"
    "def step(x, y, opt):\n    Policy()(x, y).sum().backward()\n    opt.step()\n"
)


@pytest.mark.parametrize(
    "uses",
    [
        "draw = Categorical(logits=score / 0.7)\ntaken = draw.sample()\nreturn p[taken]",
        "taken = torch.multinomial(torch.softmax(score, -1), 1)\nreturn p.gather(-1, taken)",
        "return p * (score > y)",
        "best = score.argmax(-1)\nreturn p[:, best]",
        "return p + score.detach()",
        "spread = Normal(score, 1.0)\nreturn p * spread.sample()",
        "with torch.no_grad():\n    weight = torch.softmax(score, -1)\nreturn p * weight",
        "if score.max() > 3:\n    return p\nreturn p * 2",
        "return p * self.pick(score)\n\ndef pick(self, s):\n    return s.argmax(-1)",
        "return p * self.pick(y, s=score)\n\ndef pick(self, y, s):\n    return y * s.argmax(-1)",
        "return p * self.scaled(score)[1].argmax(-1)\n\ndef scaled(self, s):\n    return 1, s / 2",
    ],
)
def test_a_value_that_is_only_read_gets_no_gradient(uses: str):
    assert trap(uses) in ([], ["info"])


@pytest.mark.parametrize(
    "uses",
    [
        "draw = Categorical(logits=score)\nreturn draw.log_prob(draw.sample())",
        "spread = Normal(score, 1.0)\nreturn p * spread.rsample()",
        "taken = score.argmax(-1)\nreturn score[taken]",
        "return score.round()",  # its gradient is 0, and 0 times Inf is NaN
        "draw = self.latent(score)\nreturn draw.sample()",  # may be one that is differentiated
        "return self.other(score)",
        "return p * self.pick(score)\n\ndef pick(self, s):\n    return s.exp()",
        "return p * self.pick(y, s=score)\n\ndef pick(self, y, s):\n    return y * s",
        "return score",
    ],
)
def test_a_value_that_one_use_differentiates_is_a_warning(uses: str):
    assert trap(uses) == ["warning"]


def trap(uses: str) -> list[str]:
    own, _, method = uses.partition("\n\n")
    body = "".join(f"        {line}\n" for line in own.split("\n"))
    body += "\n" + "".join(f"    {line}\n" for line in method.split("\n")) if method else ""
    seen = check_python(Text("a.py", TRAP.format(uses=body)), Selection()).seen
    return [s.finding.severity.value for s in seen if s.finding.name == "where-gradient-trap"]


@pytest.mark.parametrize(("asked", "severity"), [("reverse", "info"), ("wide", "warning")])
def test_a_branch_that_nobody_trains_wants_no_gradient(asked: str, severity: str):
    score = "        score = torch.where(p > 0, torch.log(p), torch.full_like(p, -1e9))\n"
    text = TRAP.format(uses="        return score\n").replace(
        score, f"        score = p\n        if self.{asked}:\n    {score}"
    )
    seen = check_python(Text("a.py", text), Selection()).seen
    found = [s.finding for s in seen if s.finding.name == "where-gradient-trap"]
    assert [one.severity.value for one in found] == [severity]


@pytest.mark.parametrize(("after", "severity"), [(".item()", "info"), (" * 2", "warning")])
def test_a_name_that_is_set_again_ends_a_value(after: str, severity: str):
    body = (
        "    for part in y:\n        chance = torch.softmax(part, -1).log()\n"
        f"        chance = chance.mean(){after}\n        x = x + chance\n    return x.mean()\n"
    )
    assert severities(body) == [severity]


def test_losses_in_a_file_of_metrics_are_trained_on(tmp_path: Path):
    metrics = (
        "import torch\nimport torch.nn.functional as F\n\n\ndef gaussian_loss(x, y):\n"
        "    sigma = F.softplus(x)\n    return (torch.log(sigma) + (y / sigma) ** 2).mean()\n"
    )
    use = "import metrics\n\n\nmetrics.{}(0, 1).backward()\n"
    for called, severity in (("gaussian_loss", "warning"), ("mean", "info")):
        made = project(tmp_path, metrics=metrics, use=use.format(called))
        assert ("unguarded-log", 7, severity) in found(made, tmp_path / "metrics.py")


@pytest.mark.parametrize(
    ("used", "severity"),
    [
        ("masked_mae(x, y).backward()\nshown = masked_mae(x, y).item()", "warning"),
        ("x.backward()\nshown = masked_mae(x, y).item()", "info"),
        ("loss = masked_mae\nloss(x, y).backward()\nshown = masked_mae(x, y).item()", "warning"),
    ],
)
def test_a_measure_in_which_nan_is_replaced_is_a_remark(tmp_path: Path, used: str, severity: str):
    text = (
        "import torch\n\n\ndef masked_mae(pred, real):\n    loss = (pred - real).abs()\n"
        "    loss = torch.where(torch.isnan(loss), torch.zeros_like(loss), loss)\n"
        "    return loss.mean()\n"
    )
    use = f"import util\n\nx, y = 0, 1\n{used.replace('masked_mae', 'util.masked_mae')}\n"
    made = project(tmp_path, util=text, use=use)
    assert ("nan-loss-replaced", 6, severity) in found(made, tmp_path / "util.py")
