"""What the training of a project reaches decides which findings may be warnings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from nanguard.check.code.project import Project
from nanguard.check.code_check import check_python
from nanguard.check.engine import Check, Plan
from nanguard.check.selection import Selection
from nanguard.source.text import Text

if TYPE_CHECKING:
    from pathlib import Path

VAE = """\
import torch
from torch import nn


class Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.to_logvar = nn.Linear(4, 4)

    def forward(self, x):
        logvar = self.to_logvar(x)
        return torch.exp(0.5 * logvar)
"""
EXP = 12  # the line of the exponential
LOOP = "def fit(model, x, opt):\n    model(x).sum().backward()\n    opt.step()\n"


def severity(folder: Path, line: int = EXP, path: str = "vae.py", **files: str) -> str:
    for name, content in {"vae": VAE, "loop": LOOP, **files}.items():
        (folder / f"{name}.py").write_text(content)
    made = Project([str(file) for file in sorted(folder.glob("*.py"))])
    text = Text(str(folder / path), (folder / path).read_text())
    seen = check_python(text, Selection(), made).seen
    (found,) = (one.finding for one in seen if one.finding.line == line)
    return found.severity.value


@pytest.mark.parametrize(
    ("main", "expected"),
    [
        ("import loop, vae\n\nloop.fit(vae.Vae(), 1, 2)\n", "warning"),
        (
            "import loop, vae\n\nif __name__ == '__main__':\n    loop.fit(vae.Vae(), 1, 2)\n",
            "warning",
        ),
        ("import loop\nfrom vae import Vae\n\nloop.fit(None, 1, 2)\n", "info"),
        ("import loop\n\nloop.fit(None, 1, 2)  # was Vae()\n", "info"),
        ("from vae import Vae\n\nprint(Vae())\n", "info"),
    ],
    ids=["named", "in a script", "only imported", "in a comment", "not where it is trained"],
)
def test_a_value_is_a_warning_where_training_names_its_class(
    tmp_path: Path, main: str, expected: str
):
    assert severity(tmp_path, main=main) == expected


OFFERED = (
    "import argparse\n\nimport loop\nfrom zoo import make\n\nparser = argparse.ArgumentParser()\n"
    "parser.add_argument('--model', type=str, default='one', choices=('one', 'two'{more}))\n"
    "args = parser.parse_args()\n{then}loop.fit(make(args), 1, 2)\n"
)
ZOO = (
    "from other import One, Two\nfrom vae import Vae\n\n\ndef make(args):\n    name = args.model\n"
    "    if name == 'one':\n        return One()\n    elif name == 'two':\n        return Two()\n"
    "    elif name == 'vae':\n        return Vae()\n"
)


@pytest.mark.parametrize(
    ("more", "then", "expected"),
    [
        ("", "", "info"),
        (", 'vae'", "", "warning"),
        ("", "args.model = 'vae'\n", "warning"),
        ("", "parser.add_argument('--model')\n", "warning"),
    ],
    ids=["not offered", "offered", "set by code", "free"],
)
def test_a_model_that_no_script_offers_is_not_trained(
    tmp_path: Path, more: str, then: str, expected: str
):
    main = OFFERED.format(more=more, then=then)
    assert severity(tmp_path, main=main, zoo=ZOO) == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [("torch.tanh(x)", "info"), ("nn.functional.normalize(x)", "info"), ("2 * x", "warning")],
)
def test_one_layer_of_what_is_bounded_is_a_remark(tmp_path: Path, given: str, expected: str):
    main = "import loop, vae\n\nloop.fit(vae.Vae(), 1, 2)\n"
    code = VAE.replace("to_logvar(x)", f"to_logvar({given})")
    assert severity(tmp_path, main=main, vae=code) == expected


RETURNS = (
    "import torch\nfrom torch import nn\n\n\nclass Vae(nn.Module):\n    def __init__(self):\n"
    "        super().__init__()\n        self.to_logvar = nn.Linear(4, 4)\n\n"
    "    def forward(self, x):\n        logvar = self.to_logvar({given})\n"
    "        return x, logvar\n"
)
TRAINS = (
    "import torch\nfrom registry import MODELS\n\n\nclass Trainer:\n"
    "    def __init__(self, model):\n        self.model = torch.nn.DataParallel(model)\n"
    "\n    def loss(self, x):\n"
    "        y, logvar = self.model(x)\n        return (y + logvar.exp()).sum()\n\n\n"
    "def main(x, name):\n    Trainer(MODELS[name]()).loss(x).backward()\n"
)


@pytest.mark.parametrize(("given", "expected"), [("torch.tanh(x)", "info"), ("x", "warning")])
def test_a_layer_of_what_is_bounded_is_one_where_its_output_is_used_too(
    tmp_path: Path, given: str, expected: str
):
    code = RETURNS.replace("{given}", given)
    registry = "from vae import Vae\n\nMODELS = {'vae': Vae}\n"
    found = severity(tmp_path, 11, "train.py", vae=code, train=TRAINS, registry=registry)
    assert found == expected


def test_what_makes_the_model_may_be_any_number_of_calls_away(tmp_path: Path):
    build = "from vae import Vae\n\n\ndef build():\n    return Vae()\n"
    main = "import loop\nfrom build import build\n\n\ndef main():\n    loop.fit(build(), 1, 2)\n"
    assert severity(tmp_path, build=build, main=main) == "warning"


def test_a_script_with_another_purpose_reaches_nothing(tmp_path: Path):
    use = "import loop\nfrom vae import Vae\n\nprint(loop.fit, Vae())\n"
    assert severity(tmp_path, evaluate=use) == "info"
    assert severity(tmp_path, again=use) == "warning"


def test_a_value_that_no_layer_is_seen_to_make_is_a_remark(tmp_path: Path):
    main = "import loop, vae\n\nloop.fit(vae.Vae(), 1, 2)\n"
    given = VAE.replace("logvar = self.to_logvar(x)", "logvar = x")
    assert severity(tmp_path, main=main, vae=given) == "info"


CLAMPED = (
    "import torch\n\n\ndef bounded(x, hard=False):\n"
    "    loss = torch.nn.functional.mse_loss(x, 2 * x)\n    if hard:\n"
    "        loss = loss.clamp(max=1.0)\n    return loss\n"
)


@pytest.mark.parametrize(
    ("call", "expected"),
    [("bounded(x)", "info"), ("bounded(x, True)", "warning"), ("bounded(x, hard=y)", "warning")],
)
def test_an_option_that_no_call_gives_is_a_remark(tmp_path: Path, call: str, expected: str):
    train = f"from losses import bounded\n\n\ndef train(x, y):\n    {call}.backward()\n"
    assert severity(tmp_path, 7, "losses.py", losses=CLAMPED, train=train) == expected


OPTIONAL = (
    "import torch\nfrom torch import nn\n\n\nclass Bounded(nn.Module):\n"
    "    def __init__(self, size, hard=False):\n        super().__init__()\n"
    "        self.hard = hard\n\n    def forward(self, x):\n"
    "        loss = nn.functional.mse_loss(x, 2 * x)\n        if {test}:\n"
    "            loss = loss.clamp(max=1.0)\n        return loss\n"
)


@pytest.mark.parametrize(
    ("test", "call", "expected"),
    [
        ("self.hard", "Bounded(3)", "info"),
        ("not self.hard", "Bounded(3)", "warning"),
        ("self.hard", "Bounded(3, hard=True)", "warning"),
        ("self.hard", "Bounded(3, y)", "warning"),
        ("self.hard", "Bounded(*y)", "warning"),
        ("self.hard", "Bounded(**y)", "warning"),
        ("self.hard", "set_hard(Bounded(3))", "warning"),
        ("self.hard", "Harder(Bounded(3))", "warning"),
    ],
)
def test_an_option_of_a_constructor_that_no_call_gives_is_a_remark(
    tmp_path: Path, test: str, call: str, expected: str
):
    train = f"from losses import Bounded\n\n\ndef train(x, y):\n    {call}(x).backward()\n"
    if call.startswith("set_hard"):
        train += "\n\ndef set_hard(loss):\n    loss.hard = True\n    return loss\n"
    if call.startswith("Harder"):
        train += "\n\nclass Harder(Bounded):\n    hard = True\n"
    losses = OPTIONAL.format(test=test)
    assert severity(tmp_path, 13, "losses.py", losses=losses, train=train) == expected


def test_an_option_that_its_function_changes_may_be_anything(tmp_path: Path):
    losses = CLAMPED.replace("    if hard", "    hard = hard or x.dim() > 2\n    if hard")
    train = "from losses import bounded\n\n\ndef train(x):\n    bounded(x).backward()\n"
    assert severity(tmp_path, 8, "losses.py", losses=losses, train=train) == "warning"


@pytest.mark.parametrize(
    ("scaled", "expected"),
    [
        ("return 2 * x", "info"),
        ("x.sum().backward()\n    return x", "warning"),
        ("x.log_()", "warning"),
    ],
)
def test_what_a_function_of_another_file_makes_of_a_value_is_followed(
    tmp_path: Path, scaled: str, expected: str
):
    used = VAE.replace("import torch\n", "import torch\nfrom scaling import scaled\n").replace(
        "return torch.exp(0.5 * logvar)",
        "std = torch.exp(0.5 * logvar)\n        return x + scaled(std).detach()",
    )
    main = "import loop, vae\n\nloop.fit(vae.Vae(), 1, 2)\n"
    scaling = f"def scaled(x):\n    {scaled}\n"
    assert severity(tmp_path, EXP + 1, main=main, vae=used, scaling=scaling) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("if reverse", "info"),
        ("if not self.training", "info"),
        ("if not reverse", "warning"),
        ("if self.training", "warning"),
        ("if reverse and x is not None", "info"),
        ("if reverse or x is not None", "warning"),
        ("if reverse == 'inverse'", "info"),
        ("if reverse != 'direct'", "info"),
        ("if reverse == 'direct'", "warning"),
        ("if reverse == 'small'", "warning"),
    ],
)
def test_a_branch_that_nobody_trains_is_a_remark(tmp_path: Path, asked: str, expected: str):
    used = VAE.replace(
        "        return torch.exp(0.5 * logvar)\n",
        f"        {asked}:\n            return torch.exp(0.5 * logvar)\n        return logvar\n",
    ).replace("forward(self, x)", "forward(self, x, reverse)")
    main = "import loop, vae\n\nloop.fit(vae.Vae(), flags.x, flags.reverse)\n"
    assert severity(tmp_path, EXP + 1, main=main, vae=used) == expected


@pytest.mark.parametrize(
    ("made", "expected"), [("Vae()", "info"), ("Vae(True)", "warning"), ("Vae(wide=y)", "warning")]
)
def test_a_function_that_is_called_only_behind_an_option_that_is_off_is_a_remark(
    tmp_path: Path, made: str, expected: str
):
    used = (
        VAE.replace("return torch.exp(0.5 * logvar)", "return widened(logvar)")
        .replace("class Vae", "from wide import widened\n\n\nclass Vae")
        .replace("def __init__(self)", "def __init__(self, wide=False)")
        .replace("        self.to_", "        self.wide = wide\n        self.to_")
        .replace("        return widened", "        if self.wide:\n            return widened")
        + "        return x\n"
    )
    wide = "import torch\n\n\ndef widened(logvar):\n    return torch.exp(0.5 * logvar)\n"
    main = f"import loop, vae\n\ny = 1\nloop.fit(vae.{made}, 1, 2)\n"
    assert severity(tmp_path, 5, "wide.py", main=main, vae=used, wide=wide) == expected


@pytest.mark.parametrize("calls", [1, 2, 3])
def test_a_function_that_a_loss_calls_is_differentiated_two_calls_deep(tmp_path: Path, calls: int):
    inner = "import torch\n\n\ndef f0(net, x):\n    return torch.exp(net(x))\n"
    for depth in range(1, calls):
        inner += f"\n\ndef f{depth}(net, x):\n    return f{depth - 1}(net, x)\n"
    inner += f"\n\ndef the_loss(net, x):\n    return f{calls - 1}(net, x).sum()\n"
    main = (
        "import torch\nfrom inner import the_loss\n\n\n"
        "def main(x):\n    the_loss(torch.nn.Linear(3, 3), x).backward()\n\n\nmain(1)\n"
    )
    expected = "warning" if calls <= 2 else "info"
    assert severity(tmp_path, 5, "inner.py", inner=inner, main=main) == expected


@pytest.mark.parametrize(
    ("call", "expected"), [("# bounded(x)", "info"), ("bounded(x)", "warning")]
)
def test_a_function_that_nothing_names_is_a_remark_in_any_project(
    tmp_path: Path, call: str, expected: str
):
    losses = (
        CLAMPED.replace("hard=False", "hard=True")
        + f"\n\ndef total(x):\n    {call}\n    return x\n"
    )
    main = "import importlib\n\nimportlib.import_module('los' + 'ses').total(1)\n"
    assert severity(tmp_path, 7, "losses.py", losses=losses, main=main) == expected


@pytest.mark.parametrize(
    "table",
    [
        "from vae import Vae\n\nMODELS = {'vae': Vae}\n",
        "import registry\nfrom vae import Vae\n\nregistry.add(Vae)\n",
    ],
)
def test_a_table_of_classes_is_reached_by_whoever_imports_its_file(tmp_path: Path, table: str):
    main = "import loop\nfrom table import *\n\nloop.fit(MODELS['vae'](), 1, 2)\n"
    assert severity(tmp_path, main=main, table=table) == "warning"


def test_a_class_that_is_registered_is_reached_by_whoever_imports_its_file(tmp_path: Path):
    main = "import loop, vae\nfrom registry import make\n\nloop.fit(make(name), 1, 2)\n"
    registered = VAE.replace("class Vae", "@MODELS.register\nclass Vae")
    assert severity(tmp_path, EXP + 1, main=main, vae=registered) == "warning"
    assert severity(tmp_path, main=main) == "info"


@pytest.mark.parametrize(
    ("imports", "expected"), [("from vae import *", "warning"), ("from vae import Vae", "info")]
)
def test_a_name_looked_up_at_run_time_may_be_any_of_a_module_that_is_imported_whole(
    tmp_path: Path, imports: str, expected: str
):
    main = (
        f"import sys\nimport loop\n{imports}\n\nkind = eval(sys.argv[1])\nloop.fit(kind(), 1, 2)\n"
    )
    assert severity(tmp_path, main=main) == expected


def test_a_notebook_reaches_what_it_names(tmp_path: Path):
    cells = ["import loop, vae\n", "loop.fit(vae.Vae(), 1, 2)\n"]
    book = {
        "cells": [
            {"cell_type": "code", "source": cell, "metadata": {}, "outputs": []} for cell in cells
        ],
        "metadata": {}, "nbformat": 4, "nbformat_minor": 5,
    }  # fmt: skip
    (tmp_path / "vae.py").write_text(VAE)
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "run.ipynb").write_text(json.dumps(book))
    outcome = Check(Plan(Selection(), jobs=1)).run([str(tmp_path)])
    (found,) = (one.finding for one in outcome.seen if one.finding.name == "unbounded-exp")
    assert found.severity.value == "warning"


def test_what_a_framework_trains_is_reached_though_it_is_made_by_a_path(tmp_path: Path):
    (tmp_path / "model.py").write_text(
        "class Vae:\n    def training_step(self, x):\n        return self.loss(x)\n"
    )
    (tmp_path / "run.py").write_text("import hydra\n\nhydra.utils.instantiate('model.Vae')\n")
    made = Project([str(file) for file in sorted(tmp_path.glob("*.py"))])
    assert made.reaches(str(tmp_path / "model.py"), "Vae") is True
