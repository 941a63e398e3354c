"""Fixes as they come out, where a careless edit would still parse and mean something else."""

from __future__ import annotations

import pytest

from nanguard.check.code.code import Code
from nanguard.check.rule import rules_for
from nanguard.source.edits import apply
from nanguard.source.text import Text

HEAD = (
    "import math\nimport torch\nfrom torch import nn\nimport torch.nn.functional as F\n"
    "from torch.nn.functional import softmax\n\n\n"
)
STEP = "def step(loss, opt):\n    loss.backward()\n    {}\n"


def repaired(name: str, content: str) -> str:
    text = Text("train.py", HEAD + content)
    rule = next(rule for rule in rules_for("code") if rule.name == name)
    found = list(rule.check(Code.parse(text)))
    assert len(found) == 1
    return apply(text.content, found[0].fixes[0].edits).removeprefix(HEAD)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x / x.sum()", "x / x.sum().clamp(min=1e-6)"),
        ("(w * x).sum() / w.sum()", "(w * x).sum() / w.sum().clamp(min=1e-6)"),
        ("mask / mask.mean()", "mask / mask.mean().clamp(min=1e-6)"),
        ("(x * mask).sum() / mask.sum()", "(x * mask).sum() / mask.sum().clamp(min=1)"),
    ],
)
def test_only_a_number_of_things_is_bounded_by_one(before: str, after: str):
    source = "def normalise(x, w, mask):\n    return {}\n"
    name = "division-by-unguarded-sum"
    assert repaired(name, source.format(before)) == source.format(after)


@pytest.mark.parametrize(
    ("rule", "before", "after"),
    [
        ("unbounded-exp", "torch.exp((logp) - (old))", "torch.exp(((logp) - (old)).clamp(max=20))"),
        (
            "normalise-without-eps",
            "logp / ((logp.max()) - (logp.min()))",
            "logp / (((logp.max()) - (logp.min())).clamp(min=1e-6))",
        ),
    ],
)
def test_the_whole_of_an_expression_that_begins_with_a_parenthesis_is_bounded(
    rule: str, before: str, after: str
):
    source = "def f(logp, old):\n    return {}\n"
    assert repaired(rule, source.format(before)) == source.format(after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torch.log(F.softmax(x, -1))", "F.log_softmax(x, -1)"),
        ("x.softmax(-1).log()", "x.log_softmax(-1)"),
        ("torch.log(softmax(x, -1))", None),
        ("torch.log(self.softmax(x))", None),
    ],
)
def test_log_softmax_is_written_only_where_there_is_one(before: str, after: str | None):
    source = (
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.softmax = nn.Softmax(dim=1)\n\n"
        "    def forward(self, x):\n        return {}\n"
    )
    assert repaired("log-of-softmax", source.format(before)) == source.format(after or before)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if not math.isnan(loss.item()): opt.step()", "if math.isfinite(loss.item()): opt.step()"),
        (
            "if not(math.isnan(loss.item())): opt.step()",
            "if not((not math.isfinite(loss.item()))): opt.step()",
        ),
        (
            "if math.isnan(loss.item()) == True: return",
            "if (not math.isfinite(loss.item())) == True: return",
        ),
    ],
)
def test_a_question_for_nan_is_turned_round_within_its_parentheses(before: str, after: str):
    assert repaired("nan-check-misses-inf", STEP.format(before)) == STEP.format(after)
