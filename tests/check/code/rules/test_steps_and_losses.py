"""Faults of a training step and of what a loss is given, seen over the files of a project."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.check.code.test_project import found, project

if TYPE_CHECKING:
    from pathlib import Path

MODEL = (
    "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"
    "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.fc = nn.Linear(4, 3)\n\n    def forward(self, x):\n        x = self.fc(x)\n"
    "        return {}\n\n\ndef build(name):\n    return nn.DataParallel(Net())\n"
)
TRAINER = (
    "import torch\nfrom torch import nn\nfrom model import build\n\n\n"
    "class Trainer:\n    def __init__(self, model, criterion):\n        self.model = model\n"
    "        self.criterion = criterion\n"
    "        self.opt = torch.optim.Adam(model.parameters())\n\n"
    "    def epoch(self, loader):\n        for x, y in loader:\n"
    "            loss = self.criterion(self.model(x), y)\n            self.opt.zero_grad()\n"
    "            loss.backward()\n            self.opt.step()\n\n\n"
    "Trainer(build('net'), nn.{}()).epoch([])\n"
)


def rules_told(tmp_path: Path, name: str, **files: str) -> list[tuple[str, str]]:
    """Returns which rules speak about a file, and how loudly."""
    told = found(project(tmp_path, **files), tmp_path / f"{name}.py")
    return [(rule, severity) for rule, _, severity in told]


@pytest.mark.parametrize(
    ("given", "loss", "speaks"),
    [
        ("F.softmax(x, dim=1)", "CrossEntropyLoss", True),
        ("x", "CrossEntropyLoss", False),
        ("F.log_softmax(x, dim=1)", "CrossEntropyLoss", False),
        ("x if self.training else F.softmax(x, dim=1)", "CrossEntropyLoss", False),
        ("x", "NLLLoss", True),
        ("F.log_softmax(x, dim=1)", "NLLLoss", False),
        ("torch.sigmoid(x)", "BCEWithLogitsLoss", True),
        ("x", "BCEWithLogitsLoss", False),
        ("x", "BCELoss", True),
    ],
)
def test_a_loss_is_told_what_the_model_of_another_file_gives(
    given: str, loss: str, speaks: bool, tmp_path: Path
):
    told = rules_told(tmp_path, "train", model=MODEL.format(given), train=TRAINER.format(loss))
    assert (("loss-of-wrong-input", "warning") in told) == speaks


STEP = (
    "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n{}\n\n"
    "train(torch.nn.Linear(2, 2), [], None)\n"
)
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("lines", "speaks"),
    [
        (("opt.zero_grad()", CLIP, "model(x).mean().backward()", "opt.step()"), True),
        (("opt.zero_grad()", "model(x).mean().backward()", "opt.step()", CLIP), True),
        (("model(x).mean().backward()", "opt.step()", CLIP, "opt.zero_grad()"), True),
        (("opt.zero_grad()", "model(x).mean().backward()", CLIP, "opt.step()"), False),
        ((CLIP, "opt.step()", "opt.zero_grad()", "model(x).mean().backward()"), False),
        (("opt.zero_grad()", "model.backward_all(x)", CLIP, "opt.step()"), False),
    ],
)
def test_what_is_clipped_has_a_gradient_that_is_stepped_on(
    lines: tuple[str, ...], speaks: bool, tmp_path: Path
):
    body = "\n".join(f"        {line}" for line in lines)
    told = rules_told(tmp_path, "train", train=STEP.format(body))
    assert (("clip-without-gradients", "warning") in told) == speaks


SCHEDULE = (
    "import torch\nfrom torch.optim.lr_scheduler import CosineAnnealingLR\n\n\n"
    "def plan_of(opt, args, loader):\n    return CosineAnnealingLR(opt, T_max={})\n"
)
EPOCHS = (
    "from plan import plan_of\nimport torch\n\n\ndef one_epoch(model, loader, opt, plan):\n"
    "    for x in loader:\n        opt.zero_grad()\n        model(x).mean().backward()\n"
    "        opt.step()\n        {}\n\n\ndef main(model, loader, opt, args):\n"
    "    plan = plan_of(opt, args, loader)\n    for epoch in range(args.epochs):\n"
    "        one_epoch(model, loader, opt, plan)\n        {}\n"
)


@pytest.mark.parametrize(
    ("length", "each", "speaks"),
    [
        ("args.epochs", "batch", True),
        ("args.epochs", "epoch", False),
        ("args.epochs * len(loader)", "batch", False),
        ("args.epochs * len(loader)", "epoch", True),
        ("args.max_steps", "batch", False),
    ],
)
def test_a_schedule_steps_as_often_as_it_is_long(
    length: str, each: str, speaks: bool, tmp_path: Path
):
    steps = ("plan.step()", "pass") if each == "batch" else ("pass", "plan.step()")
    told = rules_told(tmp_path, "train", plan=SCHEDULE.format(length), train=EPOCHS.format(*steps))
    assert (("schedule-in-wrong-unit", "warning") in told) == speaks


TEACHER = (
    "import torch\nfrom torch import nn\n\n\nclass Teacher(nn.Module):\n    def __init__(self):\n"
    "        super().__init__()\n        self.layer = nn.{}(3)\n\n    def forward(self, x):\n"
    "        return self.layer(x)\n\n\nclass Student(nn.Module):\n    def __init__(self):\n"
    "        super().__init__()\n        self.teacher = Teacher()\n        self.teacher.eval()\n"
    "        self.net = nn.Linear(3, 3)\n\n    def forward(self, x):\n"
    "        return self.net(x) - self.teacher(x)\n"
)
FIT = (
    "from student import Student\nimport torch\n\n\ndef fit(model, loader, opt):\n"
    "    model.{}()\n    for x in loader:\n        opt.zero_grad()\n"
    "        model(x).mean().backward()\n        opt.step()\n\n\nfit(Student(), [], None)\n"
)


@pytest.mark.parametrize(
    ("layer", "mode", "speaks"),
    [("BatchNorm1d", "train", True), ("LayerNorm", "train", False), ("BatchNorm1d", "eval", False)],
)
def test_a_frozen_part_is_woken_by_train_in_another_file(
    layer: str, mode: str, speaks: bool, tmp_path: Path
):
    told = rules_told(tmp_path, "student", student=TEACHER.format(layer), train=FIT.format(mode))
    assert (("eval-undone-by-train", "warning") in told) == speaks


SEGMENTS = (
    "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"
    "from losses import apart\n"
    "\nnet = nn.{}\n\n\ndef train(loader, opt):\n    for x, y in loader:\n"
    "        out = net(x)\n"
    "        loss = F.cross_entropy(out, y) + apart(out[:2], out[2:])\n        opt.zero_grad()\n"
    "        loss.backward()\n        opt.step()\n\n\ntrain([], None)\n"
)
APART = (
    "import torch.nn.functional as F\n\n\ndef apart(p, q):\n"
    "    return F.kl_div(F.log_softmax(p, dim={0}), F.softmax(q, dim={0}))\n"
)


@pytest.mark.parametrize(
    ("layer", "dim", "speaks"),
    [("Conv2d(3, 5, 3)", -1, True), ("Conv2d(3, 5, 3)", 1, False), ("Linear(3, 5)", -1, False)],
)
def test_classes_of_images_are_dimension_1_where_a_loss_is_called(
    layer: str, dim: int, speaks: bool, tmp_path: Path
):
    told = rules_told(tmp_path, "losses", losses=APART.format(dim), train=SEGMENTS.format(layer))
    assert (("softmax-over-wrong-dim", "warning") in told) == speaks


DENSITY = (
    "import torch\nfrom torch.distributions import Normal\n\n\ndef loss_fn(mu, sigma, y):\n"
    "    return -Normal(mu, sigma).log_prob(y).mean()\n"
)
DEEP = (
    "import torch\nfrom torch import nn\nimport density\n\n\nclass Net(nn.Module):\n"
    "    def __init__(self):\n        super().__init__()\n"
    "        self.mu, self.pre = nn.Linear(3, 1), nn.Linear(3, 1)\n"
    "        self.sigma = nn.Softplus()\n\n    def forward(self, x):\n"
    "        return self.mu(x), self.sigma(self.pre(x)){}\n\n\n"
    "def train(model, loss_fn, loader, opt):\n    for x, y in loader:\n"
    "        mu, sigma = model(x)\n        loss = loss_fn(mu, sigma, y)\n        opt.zero_grad()\n"
    "        loss.backward()\n        opt.step()\n\n\nloss_fn = density.loss_fn\n"
    "train(Net(), loss_fn, [], None)\n"
)


@pytest.mark.parametrize(("floor", "speaks"), [("", True), (" + 1e-3", False)])
def test_a_scale_is_followed_to_the_model_though_its_loss_is_handed_on(
    floor: str, speaks: bool, tmp_path: Path
):
    told = rules_told(tmp_path, "density", density=DENSITY, train=DEEP.format(floor))
    assert (("scale-without-floor", "warning") in told) == speaks


FLOW = (
    "import torch\nfrom torch import nn\n\n\nclass Flow(nn.Module):\n"
    "    def __init__(self, bounded=False):\n        super().__init__()\n"
    "        self.bounded = bounded\n        self.net = nn.Linear(3, 3)\n\n"
    "    def forward(self, x):\n        s = self.net(x)\n        if self.bounded:\n"
    "            s = torch.tanh(s)\n        return x * torch.exp(-s)\n"
)
FLOWS = (
    "import torch\nfrom flow import Flow\n\n\ndef train(loader, opt):\n    net = Flow({})\n"
    "    for x in loader:\n        opt.zero_grad()\n        net(x).mean().backward()\n"
    "        opt.step()\n\n\ntrain([], None)\n"
)


@pytest.mark.parametrize(("given", "speaks"), [("", True), ("bounded=True", False)])
def test_a_bound_under_an_option_that_is_off_is_none(given: str, speaks: bool, tmp_path: Path):
    told = rules_told(tmp_path, "flow", flow=FLOW, train=FLOWS.format(given))
    assert (("unbounded-exp", "warning") in told) == speaks
