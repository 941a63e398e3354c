"""What becomes of a value decides how much a finding about it weighs."""

from __future__ import annotations

import pytest

from nanguard.check.code_check import check_python
from nanguard.check.selection import Selection
from nanguard.source.text import Text

COUNT = "    kept = y != 0\n    acc = ((y == x.argmax(-1)) * kept).sum() / kept.sum()\n"


def severities(body: str, head: str = "def training_step(self, x, y):\n") -> list[str]:
    text = Text("a.py", f"import torch\n\n\n{head}{body}")
    seen = check_python(text, Selection()).seen
    return [s.finding.severity.value for s in seen if s.finding.name == "division-by-unguarded-sum"]


@pytest.mark.parametrize(
    "after",
    [
        "    self.log_dict({'acc': acc.item()})\n",
        "    print(f'{acc}')\n",
        "    self.log('acc', acc)\n",
        "    self.gathered = acc.mean(0).data\n",
    ],
)
def test_what_is_only_shown_is_a_remark(after: str):
    assert severities(COUNT.replace("acc", "share") + after.replace("acc", "share")) == ["info"]
    assert severities(COUNT + after) == ["info"]


def test_what_goes_into_the_loss_is_a_warning():
    body = COUNT.replace("acc", "scale") + "    print(scale)\n    return x.mean() * scale\n"
    assert severities(body) == ["warning"]


def test_nan_that_is_replaced_below_is_a_remark():
    body = COUNT.replace("acc", "share") + "    share = torch.nan_to_num(share)\n    return share\n"
    assert severities(body) == ["info"]
    at_once = COUNT.replace("acc", "share").replace("= (", "= torch.nan_to_num((", 1)
    assert severities(at_once.rstrip() + ")\n    return share\n") == []


def test_what_goes_under_the_key_of_a_log_is_a_remark():
    body = COUNT.replace("acc =", "out['print/share%d' % 1] =") + "    return out\n"
    assert severities(body) == ["info"]
    body = COUNT.replace("acc =", "out['scale'] =") + "    return out\n"
    assert severities(body) == ["warning"]


@pytest.mark.parametrize(("folder", "severity"), [("third_party/", "info"), ("", "warning")])
def test_what_was_copied_from_elsewhere_is_a_remark(folder: str, severity: str):
    code = "import torch\n\n\ndef step(x):\n    torch.softmax(x, -1).log().sum().backward()\n"
    (seen,) = check_python(Text(f"{folder}a.py", code), Selection()).seen
    assert seen.finding.severity.value == severity


def test_nan_that_is_overwritten_below_is_a_remark():
    body = COUNT.replace("acc", "share") + "    share[torch.isnan(share)] = 0\n    return share\n"
    assert severities(body) == ["info"]


def test_a_mask_that_is_handed_in_is_a_remark():
    head = "def loss_of(x, mask):\n"
    assert severities("    return (x * mask).sum() / mask.sum()\n", head) == ["info"]
    assert severities("    mask = x > 0.5\n    return x.sum() / mask.sum()\n", head) == ["warning"]


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
    text = Text("a.py", FLOW.format(branch=branch, other=other))
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
        "    def rank(self, x):\n        return torch.softmax(x, -1).log()\n",
    )
    (seen,) = check_python(text, Selection()).seen
    assert (seen.finding.name, seen.finding.severity.value) == ("log-of-softmax", severity)
