"""Rules that ask the other files of a project, and limits that are those of float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from nanguard.check.code.code import Code
from nanguard.check.rule import rules_for
from nanguard.source.text import Text
from tests.check.code.test_project import found, project

if TYPE_CHECKING:
    from pathlib import Path

AUTOCAST = (
    "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n"
    "        with torch.cuda.amp.autocast():\n            loss = model(x).mean()\n"
    "        loss.backward()\n        opt.step()\n"
)


@pytest.mark.parametrize(
    ("other", "speaks"),
    [
        ("def note(x):\n    return x\n", True),
        ("from torch.cuda.amp import GradScaler\n\nscaler = GradScaler()\n", False),
        ("from accelerate import Accelerator\n\nfast = Accelerator()\n", False),
        ("import deepspeed\n", False),
    ],
)
def test_a_loss_may_be_scaled_in_another_file(other: str, speaks: bool, tmp_path: Path):
    made = project(tmp_path, train=AUTOCAST, other=other)
    told = found(made, tmp_path / "train.py")
    assert (("fp16-loss-not-scaled", 8, "warning") in told) == speaks
    assert speaks or not [one for one in told if one[0] == "fp16-loss-not-scaled"]


CLAMPED = (
    "import torch\n\n\ndef bce_loss(p, y):\n    p = p.clamp(1e-8, 1 - 1e-8)\n"
    "    return -(y * p.log() + (1 - y) * (1 - p).log()).mean()\n"
)


@pytest.mark.parametrize(
    ("main", "speaks"),
    [
        ("torch.set_default_dtype(torch.float32)\n", True),
        ("torch.set_default_dtype(torch.float64)\n", False),
        ("torch.set_default_tensor_type(torch.DoubleTensor)\n", False),
    ],
)
def test_an_eps_is_kept_where_a_project_computes_in_double(main: str, speaks: bool, tmp_path: Path):
    made = project(tmp_path, losses=CLAMPED, main="import torch\nimport losses\n\n" + main)
    told = [name for name, *_ in found(made, tmp_path / "losses.py")]
    assert ("eps-lost-in-float32" in told) == speaks


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "eps", [1e-6, 1.2e-7, 6.1e-8, 5.9e-8, 5e-8, 3.1e-8, 2.9e-8, 1e-8, 1e-12, 1e-17, 1e-30]
)
def test_an_eps_is_lost_exactly_where_float32_has_no_number_for_it(eps: float, sign: int):
    bound = f"1 {'+' if sign > 0 else '-'} {eps!r}"
    code = Code.parse(
        Text("a.py", f"import torch\n\n\ndef f(x):\n    return x.clamp(max={bound})\n")
    )
    (rule,) = (rule for rule in rules_for("code") if rule.name == "eps-lost-in-float32")
    lost = bool(np.float32(1 + sign * eps) == np.float32(1))
    assert bool([*rule.check(code)]) == lost


NET = (
    "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
    "        super().__init__()\n        self.out = nn.Sequential(nn.Linear(3, 3), {last})\n\n"
    "    def forward(self, x):\n        return self.out(x)\n"
)
WEIGHTED = "import torch\n\n\ndef weighted_loss(p, r):\n    return (r / p).mean()\n"
TRAIN = (
    "from losses import weighted_loss\nfrom nets import Net\n\n\n"
    "def train(loader, opt):\n    net = Net()\n    for x, r in loader:\n"
    "        weighted_loss({given}, r).backward()\n        opt.step()\n\n\n"
    "if __name__ == '__main__':\n    train([], None)\n"
)


@pytest.mark.parametrize(
    ("last", "given", "speaks"),
    [
        ("nn.Softmax(-1)", "net(x)", True),
        ("nn.Sigmoid()", "net(x)", True),
        ("nn.Linear(3, 3)", "net(x)", True),
        ("nn.Softplus()", "net(x)", False),
        ("nn.Sigmoid()", "net(x) + 1e-6", False),
        ("nn.Sigmoid()", "net(x).clamp(min=1e-6)", False),
    ],
)
def test_a_probability_that_another_file_makes_is_one(
    last: str, given: str, speaks: bool, tmp_path: Path
):
    files = {"losses": WEIGHTED, "nets": NET.format(last=last), "train": TRAIN.format(given=given)}
    told = found(project(tmp_path, **files), tmp_path / "losses.py")
    assert (("division-by-probability", 5, "warning") in told) == speaks


ARC = (
    "import torch\n\n\nclass Margin(torch.nn.Module):\n    def forward(self, x, label):\n"
    "        {condition}\n        cosine = torch.nn.functional.cosine_similarity(x, label)\n"
    "        sine = torch.sqrt(1.0 - cosine**2)\n        loss = (cosine + sine).mean()\n"
    "        loss.backward()\n        return loss\n"
)


@pytest.mark.parametrize(
    ("condition", "speaks"),
    [
        ("assert x.size()[0] == label.size()[0]", True),
        ("assert x.shape == label.shape and len(x) == 4", True),
        ("assert x.dim() == 2 and x.get_device() == label.get_device()", True),
        ("assert x.dtype is torch.float32, x.dtype", True),
        ("assert x.abs().max() < 1", False),
    ],
)
def test_only_a_condition_about_values_guards_them(condition: str, speaks: bool, tmp_path: Path):
    made = project(tmp_path, loss=ARC.format(condition=condition))
    assert ("sqrt-at-zero" in [name for name, *_ in found(made, tmp_path / "loss.py")]) == speaks


def test_each_sum_that_divides_is_said_once(tmp_path: Path):
    text = (
        "import torch\n\n\ndef loss_of(a, b, mask, labels):\n"
        "    one = (a * mask).sum() / mask.sum()\n    two = (b * mask).sum() / mask.sum()\n"
        "    mask = (labels == 3).float()\n    three = (b * mask).sum() / mask.sum()\n"
        "    (one + two + three).backward()\n"
    )
    made = project(tmp_path, loss=text)
    told = [one for one in found(made, tmp_path / "loss.py") if one[0].startswith("division")]
    assert [line for _, line, _ in told] == [5, 8]


MIX = (
    "import torch\nfrom torch import nn\n\n\nclass Mix(nn.Module):\n"
    "    def forward(self, queries, keys):\n        q = queries.permute(0, 2, 1){cast}\n"
    "        return torch.fft.rfft(q, dim=-1) * keys\n\n\nclass Layer(nn.Module):\n"
    "    def __init__(self, mix):\n        super().__init__()\n        self.mix = mix\n"
    "        self.go = nn.Linear(8, 8)\n\n    def forward(self, x):\n"
    "        return self.mix(self.go(x).view(4, 8, 8), x).abs()\n"
)
SCALED = (
    "import torch\nfrom layers import Layer, Mix\n\n\ndef train(loader, opt):\n"
    "    net = Layer(Mix())\n    scaler = torch.cuda.amp.GradScaler()\n    for x in loader:\n"
    "        with torch.cuda.amp.autocast({type}):\n            loss = net(x).mean()\n"
    "        scaler.scale(loss).backward()\n        scaler.step(opt)\n"
)


@pytest.mark.parametrize(
    ("cast", "type_", "expected"),
    [("", "", "warning"), (".float()", "", ""), ("", "dtype=torch.bfloat16", "info")],
)
def test_a_transform_of_what_a_layer_hands_on_is_in_half(
    cast: str, type_: str, expected: str, tmp_path: Path
):
    made = project(tmp_path, layers=MIX.format(cast=cast), train=SCALED.format(type=type_))
    told = found(made, tmp_path / "layers.py")
    assert [s for name, _, s in told if name == "fft-in-half"] == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("other", "severity"),
    [
        ("", "info"),
        ("import torch\n\nnet = torch.nn.LSTM(4, 4)\n", "warning"),
        ("import torch\n\n\ndef kl(logvar):\n    return torch.exp(0.5 * logvar)\n", "warning"),
    ],
)
def test_no_clipping_is_a_remark_without_signs_of_large_gradients(
    other: str, severity: str, tmp_path: Path
):
    made = project(tmp_path, train=SCALED.format(type=""), other=other)
    told = found(made, tmp_path / "train.py")
    assert [s for name, _, s in told if name == "nothing-clips-gradients"] == [severity]


HALVED = (
    "from torch import nn\n\n\nclass Wrapper(nn.Module):\n    def __init__(self, args):\n"
    "        super().__init__()\n        self.model = nn.Linear(3, 3)\n        if {option}:\n"
    "            self.model.half()\n\n    def forward(self, x):\n        return self.model(x)\n"
)
MAKES = (
    "import torch\n\n\ndef optimizer_of(args, target):\n"
    "    trained = filter(lambda p: p.requires_grad, target.parameters())\n"
    "    return torch.optim.Adam(trained, lr=args.lr{eps})\n"
)
RUNS = (
    "import make\nimport model\n\n\ndef main(args, loader):\n    net = model.Wrapper(args)\n"
    "    opt = make.optimizer_of(args, net)\n    for x in loader:\n        opt.zero_grad()\n"
    "        net(x).mean().backward()\n        opt.step()\n"
)


@pytest.mark.parametrize(
    ("option", "eps", "speaks"),
    [
        ("args.precision == 'half'", "", True),
        ("args.precision == 'half'", ", eps=1e-4", False),
        ("args.evaluate", "", False),
    ],
)
def test_a_model_may_be_half_in_another_file(option: str, eps: str, speaks: bool, tmp_path: Path):
    made = project(
        tmp_path, model=HALVED.format(option=option), make=MAKES.format(eps=eps), run=RUNS
    )
    told = [name for name, *_ in found(made, tmp_path / "make.py")]
    assert ("half-precision-optimizer-state" in told) == speaks
