"""Where a value comes from: through parameters, calls, tuples and models of other files."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from nanguard.check.code.code import Code
from nanguard.check.code.origins import Origins, origins
from nanguard.source.text import Text
from tests.check.code.test_project import found, project

if TYPE_CHECKING:
    from pathlib import Path

LOSS = "import torch\n\n\ndef loss_of(out, target):\n    return torch.log(out).mean()\n"
TRAIN = (
    "import torch\nfrom losses import loss_of\nfrom models import {model}\n\n\n"
    "def train(net, loader, opt):\n    for x, y in loader:\n        {call}\n"
    "        loss.backward()\n        opt.step()\n\n\n"
    "if __name__ == '__main__':\n    train({model}(), [], None)\n"
)
CALL = "loss = loss_of(net(x), y)"


def model(ends: str, forward: str = "return self.net(x)") -> str:
    return (
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        layers = [nn.Linear(3, 3)]\n"
        f"        {ends}\n\n    def forward(self, x):\n        {forward}\n\n\n"
        "def make():\n    return Net()\n"
    )


def origins_of(folder: Path, models: str, call: str = CALL, made_by: str = "Net") -> Origins:
    train = TRAIN.format(model=made_by, call=call)
    made = project(folder, losses=LOSS, models=models, train=train)
    code = Code.parse(Text(str(folder / "losses.py"), LOSS), made)
    (log,) = (v for node, v in code.values.items() if isinstance(node, ast.Call) and v.op == "log")
    return origins(code, log.inputs[0])


@pytest.mark.parametrize(
    ("ends", "operation"),
    [
        ("self.net = nn.Sequential(nn.Linear(3, 3), nn.Softplus())", "softplus"),
        ("layers.append(nn.Sigmoid()); self.net = nn.Sequential(*layers)", "sigmoid"),
        ("self.net = nn.Sequential(*[nn.Linear(3, 3), nn.Softmax(-1)])", "softmax"),
        ("self.net = nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.Dropout(0.1))", "sigmoid"),
        ("m = nn.Sequential(); m.add_module('s', nn.Sigmoid()); self.net = m", "sigmoid"),
        (
            "self.net = nn.Sequential()\n        for i in range(3):\n"
            "            self.net.add_module(name='l', module=nn.Linear(3, 3))\n"
            "            self.net.add_module(name='s', module=nn.Sigmoid())",
            "sigmoid",
        ),
        (
            "self.net = nn.Sequential()\n        self.net.append(nn.Linear(3, 3))\n"
            "        if self.training:\n            self.net.append(nn.Tanh())",
            "layer",
        ),
        ("self.net = nn.Linear(3, 3)", "layer"),
    ],
)
def test_the_last_layer_of_a_model_in_another_file_makes_its_output(
    ends: str, operation: str, tmp_path: Path
):
    seen = origins_of(tmp_path, model(ends))
    assert seen.network
    paths = [maker.path or maker.inputs[0].core.path for maker in seen.makers]
    assert seen.made_by(operation) or (operation == "layer" and paths == ["torch.nn.Linear"])


@pytest.mark.parametrize(
    ("forward", "call", "operation"),
    [
        ("return x, torch.sigmoid(x)", "a, b = net(x); loss = loss_of(b, y)", "sigmoid"),
        ("return x, torch.sigmoid(x)", "out = net(x); loss = loss_of(out[1], y)", "sigmoid"),
        ("return {'p': torch.sigmoid(x)}", "loss = loss_of(net(x)['p'], y)", "sigmoid"),
        ("return [torch.sigmoid(x)]", "loss = sum(loss_of(o, y) for o in net(x))", "sigmoid"),
    ],
)
def test_parts_of_what_a_model_gives_back_are_told_apart(
    forward: str, call: str, operation: str, tmp_path: Path
):
    seen = origins_of(tmp_path, model("self.net = None", forward), call)
    assert seen.made_by(operation)
    other = call.replace("loss_of(b", "loss_of(a").replace("out[1]", "out[0]")
    if other != call:
        assert not origins_of(tmp_path, model("self.net = None", forward), other).made_by("sigmoid")


@pytest.mark.parametrize("act", [None, "activation", "act_fn", "nonlinearity"])
def test_an_activation_that_a_module_is_made_with_may_bound_its_output(
    act: str | None, tmp_path: Path
):
    ends = f"self.net, self.{act} = nn.Linear(3, 3), {act}" if act else "self.net = nn.Linear(3, 3)"
    forward = f"return self.{act}(self.net(x))" if act else "return self.net(x)"
    made = model(ends, forward).replace("__init__(self)", f"__init__(self, {act or 'size'}=None)")
    assert origins_of(tmp_path, made).activated == bool(act)


def test_a_model_that_a_function_makes_is_known(tmp_path: Path):
    ends = "self.net = nn.Sequential(nn.Linear(3, 3), nn.Softplus())"
    assert origins_of(tmp_path, model(ends), made_by="make").made_by("softplus")


def test_what_is_bounded_on_the_way_is_not_what_it_was_before(tmp_path: Path):
    call = "loss = loss_of(net(x).clamp(min=1e-6), y)"
    seen = origins_of(tmp_path, model("self.net = nn.Softplus()"), call)
    assert not seen.made_by("softplus")


def test_functions_that_call_each_other_end(tmp_path: Path):
    train = "from losses import loss_of\n\n\ndef again(x):\n    return loss_of(again(x), x)\n"
    made = project(tmp_path, losses=LOSS, train=train)
    code = Code.parse(Text(str(tmp_path / "losses.py"), LOSS), made)
    (log,) = (v for node, v in code.values.items() if isinstance(node, ast.Call) and v.op == "log")
    assert not origins(code, log.inputs[0]).network


@pytest.mark.parametrize("where", ["pkg.losses", ".losses"])
@pytest.mark.parametrize("root", ["", "pkg/"])
def test_a_file_of_a_package_finds_its_neighbours_by_their_full_names(
    where: str, root: str, tmp_path: Path
):
    train = TRAIN.format(model="Net", call=CALL).replace("from losses", f"from {where}")
    train = train.replace("from models", "from pkg.models")
    ends = "self.net = nn.Sequential(nn.Linear(3, 3), nn.Softplus())"
    files = {
        "pkg/__init__": "", "pkg/losses": LOSS, "pkg/train": train, "pkg/models": model(ends),
    }  # fmt: skip
    if not root:
        files["setup"] = "from setuptools import setup\nsetup()\n"
    made = project(tmp_path, **files)
    assert ("unguarded-log", 5, "warning") in found(made, tmp_path / "pkg/losses.py")


TRAINER = (
    "import torch\nfrom torch import nn\n\n\nclass Trainer:\n    def __init__(self, net, opt):\n"
    "        self.net, self.opt = net, opt\n        self.loss = nn.BCELoss(reduction='none')\n\n"
    "    def fit(self, loader):\n        for x, y in loader:\n"
    "            score, keep = self.net(x)\n            loss = self.loss(score, y)\n"
    "            (loss * keep).sum().backward()\n            self.opt.step()\n"
)
START = (
    "from models import Net\nfrom trainer import Trainer\n\n\ndef start(net, opt):\n"
    "    return Trainer(net, opt)\n\n\nnet = Net()\nstart(net, None).fit([])\n"
)


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        ("return torch.sigmoid(self.net(x)), x[:, 0] > 0", True),
        ("keep = x > 0; return torch.sigmoid(self.net(x)) * keep.float(), keep", True),
        ("return torch.relu(self.net(x)), x[:, 0] > 0", False),
    ],
)
def test_a_model_that_a_constructor_is_given_is_followed(
    tmp_path: Path, forward: str, expected: bool
):
    made = project(
        tmp_path,
        models=model("self.net = nn.Linear(3, 3)", forward),
        trainer=TRAINER,
        start=START,
    )
    told = ("bce-after-sigmoid", 13, "warning") in found(made, tmp_path / "trainer.py")
    assert told is expected


def test_learned_numbers_that_a_module_gives_back_are_no_output(tmp_path: Path):
    head = (
        "import torch\nfrom torch import nn\n\n\nclass Shift(nn.Module):\n"
        "    def __init__(self, n):\n        super().__init__()\n"
        "        self.shift = nn.Parameter(torch.zeros(n))\n\n"
        "    def forward(self, x):\n        return x + self.shift\n\n\n"
        "class Head(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.mean = nn.Linear(4, 4)\n        self.logstd = Shift(4)\n\n"
        "    def forward(self, x):\n        mean = self.mean(x)\n"
        "        logstd = self.logstd({given})\n        return mean, logstd.exp()\n"
    )
    use = "import model\n\nmodel.Head()(0)[1].sum().backward()\n"
    for given, severity in (("torch.zeros(4)", "info"), ("self.mean(x)", "warning")):
        made = project(tmp_path, model=head.replace("{given}", given), use=use)
        assert ("unbounded-exp", 23, severity) in found(made, tmp_path / "model.py")


def test_an_activation_that_a_constructor_is_given_bounds_a_layer(tmp_path: Path):
    layer = (
        "import torch\nfrom torch import nn\n\n\nclass Layer(nn.Module):\n"
        "    def __init__(self, activation=None):\n        super().__init__()\n"
        "        self.activation = activation\n        self.linear = nn.Linear(4, 4)\n\n"
        "    def forward(self, x):\n        x = self.linear(x)\n"
        "        return x if self.activation is None else self.activation(x)\n\n\n"
        "class Coder(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.mu = Layer()\n        self.logvar = Layer(nn.Hardtanh(-6.0, 2.0))\n\n"
        "    def forward(self, x):\n"
        "        return self.mu(x) + self.noise(self.logvar(x))\n\n"
        "    def noise(self, logvar):\n        return torch.exp(logvar)\n"
    )
    use = "import layer\n\nlayer.Coder()(0).sum().backward()\n"
    made = project(tmp_path, layer=layer, use=use)
    assert ("unbounded-exp", 26, "warning") not in found(made, tmp_path / "layer.py")


@pytest.mark.parametrize(("asked", "severity"), [("self.training", "info"), ("x", "warning")])
def test_a_module_that_only_an_evaluation_calls_is_a_remark(
    tmp_path: Path, asked: str, severity: str
):
    decode = (
        "import torch\nfrom torch import nn\n\n\nclass Decode(nn.Module):\n"
        "    def forward(self, logvar):\n        return torch.exp(logvar)\n"
    )
    net = (
        "from torch import nn\nfrom decode import Decode\n\n\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.head, self.decode = nn.Linear(4, 4), Decode()\n\n"
        "    def forward(self, x):\n        out = self.head(x)\n"
        f"        if {asked}:\n            return out.sum()\n        else:\n"
        "            return self.decode(out)\n\n\nNet()(0).backward()\n"
    )
    made = project(tmp_path, decode=decode, net=net)
    assert ("unbounded-exp", 7, severity) in found(made, tmp_path / "decode.py")


@pytest.mark.parametrize(("search", "severity"), [("line_search", "info"), ("clip", "warning")])
def test_the_ratio_of_policies_within_a_trust_region_is_a_remark(
    tmp_path: Path, search: str, severity: str
):
    text = (
        "import torch\nfrom torch.distributions import Normal\n\n\n"
        f"def {search}(p):\n    return p\n\n\n"
        "def update(policy, obs, act, old_log_prob, gain):\n"
        "    log_prob = Normal(policy(obs), 1.0).log_prob(act)\n"
        "    ratio = torch.exp(log_prob - old_log_prob)\n"
        "    loss = (ratio * gain).mean()\n    loss.backward()\n\n\n"
        "update(None, 0, 0, 0, 0)\n"
    )
    made = project(tmp_path, agent=text)
    assert ("unbounded-exp", 11, severity) in found(made, tmp_path / "agent.py")
