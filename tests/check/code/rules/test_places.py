"""What a place in code is for decides whether a finding is a warning or a remark."""

from __future__ import annotations

import pytest

from nanguard.check.code.code import Code
from nanguard.check.rule import rules_for
from nanguard.source.text import Text


def told(text: str, path: str = "train.py") -> dict[str, str]:
    code = Code.parse(Text(path, "import torch\nfrom torch import nn\n" + text))
    return {f.name: f.severity.value for rule in rules_for("code") for f in rule.check(code)}


MODULE = "class M(nn.Module):\n"
LOSS = "def chance_loss(p, y):\n    return -(torch.softmax(p, -1).log() * y).sum()\n"
TRAINED = "\n\ndef main(m, x, o):\n    {}.backward()\n    o.step()\n"


@pytest.mark.parametrize(
    "path",
    [
        "losses.py",  # nothing is seen to train with it
        "eval/losses.py",
        "metrics.py",
        "scripts/visualize_all.py",
        "tests/test_losses.py",
        "test_losses.py",
    ],
)
def test_files_that_do_not_train_get_remarks(path: str):
    assert told(LOSS, path) == {"log-of-softmax": "info"}


def test_a_script_called_test_that_trains_is_not_a_test():
    text = LOSS + TRAINED.format("chance_loss(m(x), x)")
    assert told(text, "test_net.py") == {"log-of-softmax": "warning"}


def test_a_registered_buffer_is_a_constant():
    text = MODULE + (
        "    def __init__(self, gamma):\n        super().__init__()\n"
        '        self.register_buffer("log_gamma", torch.tensor(float(gamma)).log())\n'
        "    def forward(self, x):\n        return x * self.log_gamma.exp()\n"
    )
    assert told(text) == {}
    assert told(text.replace("self.register_buffer", "self.other")) == {"unbounded-exp": "info"}


def test_a_registered_triangle_is_causal_under_any_name():
    text = MODULE + (
        "    def __init__(self, n):\n        super().__init__()\n"
        '        self.register_buffer("shape_of_it", torch.tril(torch.ones(n, n)))\n'
        "    def forward(self, s):\n"
        '        s = s.masked_fill(self.shape_of_it == 0, float("-inf"))\n'
        "        return s.softmax(-1)\n"
    )
    assert told(text) == {}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("    return torch.log(1 - t).clip(-20, 20)\n", {}),
        ("    return -torch.log(1 - t)\n", {"unguarded-log": "info"}),
        ("    return torch.log(1 - p).clamp(-20, 20)\n", {"unguarded-log": "info"}),
        ("    return torch.log(1 - p)\n", {"unguarded-log": "warning"}),
    ],
)
def test_the_log_of_a_time_and_what_is_clipped_at_once(body: str, expected: dict[str, str]):
    loss = f"def elbo_loss(p, t):\n    p = torch.sigmoid(p)\n    t = t[:, None]\n{body}"
    assert told(loss + TRAINED.format("elbo_loss(m(x), x)")) == expected


def test_the_mean_square_of_unit_vectors_stays_below_its_bound():
    text = (
        "import torch.nn.functional as F\n\n\ndef unit_loss(a, b):\n"
        "    a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)\n"
        "    loss = F.mse_loss(a, b)\n    return torch.clamp(loss, max=10.0)\n"
    )
    assert told(text) == {}
    assert told(text.replace("max=10.0", "max=1.0")) == {"loss-clamped": "warning"}


STEP = (
    "def train(model, loader, opt):\n    for x in loader:\n        model(x).backward()\n"
    "        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
    "        if torch.isnan(norm):\n            for p in model.parameters():\n"
    "                p.grad.zero_()\n"
)
LATER = "        if torch.isnan(norm) or torch.isinf(norm):\n            continue\n"


def test_gradients_are_not_stepped_on_where_the_loop_goes_on_below():
    assert "step-after-zeroed-grads" in told(STEP + "        opt.step()\n")
    assert "step-after-zeroed-grads" not in told(STEP + LATER + "        opt.step()\n")


def test_isfinite_is_a_safe_fix_only_where_the_run_ends():
    def safe(then: str) -> bool:
        text = f"import torch\n\n\ndef f(loss, o):\n    if torch.isnan(loss):\n        {then}\n"
        code = Code.parse(Text("a.py", text + "    loss.backward()\n    o.step()\n"))
        (found,) = (
            f for r in rules_for("code") for f in r.check(code) if f.name == "nan-check-misses-inf"
        )
        return found.fixes[0].safe

    assert safe('raise ValueError("nan")')
    assert not safe("return None")
    assert not safe("loss = torch.nan_to_num(loss)")


@pytest.mark.parametrize(
    ("made", "speaks"),
    [
        ("(1 - nn.functional.cosine_similarity(m(x), x)).mean()", False),
        ("torch.sigmoid(m(x)).mean() + 2 * torch.tanh(m(x)).mean()", False),
        ("torch.log(torch.sigmoid(m(x))).mean()", True),  # bounded above only
        ("torch.exp(m(x)).mean()", True),
        ("0.0\n    for part in x:\n        loss += m(part)", True),
    ],
)
def test_a_bounded_loss_needs_no_question_for_inf(made: str, speaks: bool):
    text = (
        f"def step(m, x, o):\n    loss = {made}\n    if torch.isnan(loss):\n        return\n"
        "    loss.backward()\n    o.step()\n"
    )
    assert ("nan-check-misses-inf" in told(text)) is speaks


def test_the_number_that_a_loss_begins_with_is_no_bound():
    text = (
        "def fit(m, x, o, loss=0.0):\n    while True:\n        if torch.isnan(loss):\n"
        "            break\n        loss = m(x)\n        loss.backward()\n        o.step()\n"
    )
    assert "nan-check-misses-inf" in told(text)
    begun = text.replace(", loss=0.0):\n", "):\n    loss = torch.tensor(0.0)\n")
    assert "nan-check-misses-inf" in told(begun)
