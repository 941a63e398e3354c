"""What is known about values without running anything."""

from __future__ import annotations

import math

import pytest

from nanguard.check.code.code import Code
from nanguard.errors import SourceError
from nanguard.source.text import Text

HEAD = "import math\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"


def read(body: str) -> Code:
    return Code.parse(Text("train.py", HEAD + body))


def last(code: Code, operation: str):
    return list(code.of(operation))[-1]


@pytest.mark.parametrize(
    ("expression", "operation"),
    [
        ("torch.softmax(x, -1)", "softmax"),
        ("F.softmax(x, dim=-1)", "softmax"),
        ("x.softmax(-1)", "softmax"),
        ("nn.functional.softmax(x)", "softmax"),
        ("nn.Softmax(dim=-1)(x)", "softmax"),
        ("torch.special.expit(x)", "expit"),
        ("x.clamp_(0, 1)", "clamp"),
        ("x ** 2", "pow"),
        ("torch.arccos(x)", "acos"),
        ("torch.linalg.norm(x)", "norm"),
    ],
)
def test_operations_have_one_spelling(expression, operation):
    code = read(f"def f(x):\n    return {expression}\n")
    assert code.operations.get(operation), sorted(code.operations)


@pytest.mark.parametrize(
    ("expression", "lo", "hi"),
    [
        ("x.sigmoid()", 0, 1),
        ("1 - x.sigmoid()", 0, 1),
        ("x.clamp(-2, 0).sigmoid()", 1 / (1 + math.exp(2)), 0.5),
        ("x.clamp(-90, 20).sigmoid()", 0, 1),
        ("x.clamp(-2, 3) * 2", -4, 6),
        ("x.clamp(min=1e-3)", 1e-3, math.inf),
        ("x.abs() + 1e-6", 1e-6, math.inf),
        ("x.tanh() - 1", -2, 0),
        ("x.square().sum()", 0, math.inf),
        ("-x.relu()", -math.inf, 0),
        ("torch.clamp(x, max=5.0)", -math.inf, 5),
        ("x.clamp(0, 20).exp()", 1, math.exp(20)),
        ("torch.maximum(x.relu(), x.sigmoid())", 0, math.inf),
        ("max(len(x), 1)", 1, math.inf),
        ("torch.empty(3).uniform_(0.25, 0.5)", 0.25, 0.5),
        ("torch.full((2,), 4.0)", 4, 4),
        ("x.clamp(min=2.0) ** 3", 8, math.inf),
        ("x.clamp(min=2.0) ** 1e4", 2, math.inf),  # too large for a float
        ("x.clamp(min=2.0) ** 9001", 2, math.inf),
    ],
)
def test_bounds(expression, lo, hi):
    code = read(f"def f(x):\n    y = {expression}\n    return y.marked()\n")
    value = last(code, "marked").inputs[0]
    assert (value.lo, value.hi) == pytest.approx((lo, hi))


def test_a_branch_that_leaves_guards_what_follows():
    code = read("def f(x, n):\n    if n == 0:\n        return x\n    return x / n\n")
    assert "n" in last(code, "div").guards


def test_branches_are_joined():
    code = read(
        "def f(x, flag):\n    if flag:\n        y = x.clamp(min=1.0)\n    else:\n"
        "        y = x.clamp(min=2.0)\n    return y.log()\n"
    )
    assert last(code, "log").inputs[0].lo == 1.0


def test_a_condition_bounds_a_name():
    code = read("def f(n):\n    if n > 0:\n        return torch.log(n)\n    return n\n")
    assert last(code, "log").inputs[0].lo > 0


def test_attributes_are_followed_through_the_class():
    code = read(
        "class Net(nn.Module):\n    def __init__(self, eps=1e-6):\n        super().__init__()\n"
        "        self.eps = eps\n        self.act = nn.Sigmoid()\n\n"
        "    def forward(self, x):\n        return self.act(x) / (x.std() + self.eps)\n"
    )
    division = last(code, "div")
    assert division.inputs[0].core.op == "sigmoid"
    assert division.inputs[1].lo == pytest.approx(1e-6)


def test_the_last_assignment_of_an_attribute_counts():
    code = read(
        "class D:\n    def __init__(self, p):\n        self.logvar = p\n"
        "        self.logvar = torch.clamp(self.logvar, -30, 20)\n"
        "        self.std = torch.exp(0.5 * self.logvar)\n"
    )
    assert last(code, "exp").inputs[0].hi == 10


def test_what_a_function_returns_is_known_where_it_is_called():
    code = read(
        "def safe(x):\n    return x.clamp(min=1e-8)\n\n\ndef f(x):\n    return safe(x).log()\n"
    )
    assert last(code, "log").inputs[0].lo == pytest.approx(1e-8)


def test_a_named_lambda_is_read_where_it_is_called():
    code = read(
        "def f(p):\n    p = p.clamp(min=1e-8)\n    log = lambda a: a.log()\n    return log(p)\n"
    )
    assert last(code, "log").inputs[0].lo == pytest.approx(1e-8)


def test_gradients_and_autocast_are_regions():
    code = read(
        "def f(x):\n    with torch.no_grad():\n        a = x.exp()\n"
        "    with torch.autocast('cuda', dtype=torch.float16):\n        b = x.sqrt()\n"
        "    return a, b.abs()\n"
    )
    assert last(code, "exp").grad is False
    assert last(code, "sqrt").grad is True
    assert last(code, "sqrt").autocast == "float16"
    assert last(code, "abs").autocast == ""


@pytest.mark.parametrize(
    ("expression", "half"),
    [
        ("x.half()", True),
        ("x.to(torch.float16) * 2", True),
        ("x.half().float()", False),
        ("x + 1", None),
        ("torch.zeros(3, dtype=torch.half)", True),
    ],
)
def test_half_precision_is_followed(expression, half):
    code = read(f"def f(x):\n    return ({expression}).marked()\n")
    assert last(code, "marked").inputs[0].half is half


def test_events_run_through_the_functions_that_are_called():
    code = read(
        "def clip(model):\n    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n\n\n"
        "def step(model, loss, opt):\n    loss.backward()\n    clip(model)\n    opt.step()\n"
    )
    step = next(function for function in code.functions if function.name == "step")
    order = [event.op for event in code.events(step)]
    wanted = [op for op in order if op in ("backward", "clip_grad_norm", "step")]
    assert wanted == ["backward", "clip_grad_norm", "step"]


def test_positions_count_characters_and_not_bytes():
    code = read("def f(x):\n    s = 'äöü'; y = x.log()\n    return y\n")
    node = last(code, "log").node
    assert code.segment(node) == "x.log()"


def test_recursion_ends():
    code = read("def f(x, n):\n    return f(x.exp(), n - 1) if n else x\n")
    assert last(code, "exp").line == 8


@pytest.mark.parametrize(
    "text",
    [
        "def f(:\n",
        "print 'two'\n",
        "x = " + "(" * 5000 + ")" * 5000,
        "x = " + "-" * 50_000 + "1",
        "a\0b",
    ],
)
def test_what_is_not_python_is_an_error_with_a_place(text):
    with pytest.raises(SourceError) as caught:
        Code.parse(Text("bad.py", text))
    assert "bad.py" in caught.value.where


def test_long_chains_do_not_end_the_check():
    code = read("def f(x):\n    return x" + ".abs()" * 400 + "\n")
    assert code.relevant


def test_code_without_torch_is_not_read():
    code = Code.parse(Text("a.py", "import os\nprint(os.sep)\n"))
    assert not code.relevant
    assert code.operations == {}
