"""Names of one file in another: what is found, and what it changes in a check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nanguard.check.code import project_index, scopes
from nanguard.check.code.project import Project
from nanguard.check.code.scopes import Class, Function
from nanguard.check.code.values import Value
from nanguard.check.code_check import check_python
from nanguard.check.engine import Check, Plan
from nanguard.check.selection import Selection
from nanguard.source.text import Text

if TYPE_CHECKING:
    from pathlib import Path

HEADS = (
    "import torch\nfrom torch import nn\n\nEPS = 1e-3\nSHOWN = ['a', 'b']\n\n\n"
    "class Head(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    "        self.out = nn.Sequential(nn.Linear(3, 1), nn.Sigmoid())\n\n"
    "    def forward(self, x):\n        return self.out(x)\n\n\n"
    "def chances(x):\n    return torch.softmax(x, -1)\n"
)
TRAIN = (
    "import torch\nfrom torch import nn\n{imports}\n\n"
    "criterion = nn.BCELoss()\n\n\ndef train(loader, opt):\n"
    "    net = nn.DataParallel({head}()).train(True)\n    for x, y in loader:\n"
    "        loss = criterion(net(x), y)\n        loss.backward()\n        opt.step()\n"
    "        opt.zero_grad()\n"
)


def project(folder: Path, **files: str) -> Project:
    for name, content in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return Project([str(path) for path in sorted(folder.rglob("*.py"))])


def found(made: Project, path: Path) -> list[tuple[str, int | None, str]]:
    text = Text(str(path), path.read_text())
    seen = check_python(text, Selection(), made).seen
    return [(s.finding.name, s.finding.line, s.finding.severity.value) for s in seen]


@pytest.mark.parametrize(
    ("imports", "head"),
    [
        ("from pkg.heads import Head", "Head"),
        ("import pkg.heads as H", "H.Head"),
        ("from pkg import Head", "Head"),  # passed on by the package
        ("from pkg.heads import *", "Head"),
    ],
)
def test_a_class_of_another_file_is_followed(tmp_path: Path, imports: str, head: str):
    made = project(
        tmp_path,
        **{
            "pkg/__init__": "from .heads import Head\n",
            "pkg/heads": HEADS,
            "train": TRAIN.format(imports=imports, head=head),
        },
    )
    assert ("bce-after-sigmoid", 11, "warning") in found(made, tmp_path / "train.py")
    alone = Project([str(tmp_path / "train.py")])
    assert found(alone, tmp_path / "train.py") == []


def test_what_a_name_stands_for(tmp_path: Path):
    made = project(tmp_path, **{"pkg/heads": HEADS, "main": "x = 1\n"})
    main = str(tmp_path / "main.py")
    assert isinstance(made.find(main, 0, ("pkg", "heads", "Head")), Class)
    assert isinstance(made.find(main, 0, ("pkg", "heads", "chances")), Function)
    number = made.find(main, 0, ("pkg", "heads", "EPS"))
    assert getattr(number, "const", None) == 1e-3
    assert made.find(main, 0, ("torch", "nn")) is None
    inside = str(tmp_path / "pkg" / "other.py")
    assert isinstance(made.find(inside, 1, ("heads", "Head")), Class)


def test_modules_that_import_each_other_end_and_are_judged_alike(tmp_path: Path):
    first = "import torch\nfrom b import g\n\n\ndef f_loss(x):\n    return g(x).log()\n"
    second = "import torch\nfrom a import f_loss\n\n\ndef g(x):\n    return torch.softmax(x, -1)\n"
    both = project(tmp_path, a=first, b=second)
    one_way = [found(both, tmp_path / "a.py"), found(both, tmp_path / "b.py")]
    again = Project([str(tmp_path / "b.py"), str(tmp_path / "a.py")])
    other_way = [found(again, tmp_path / "b.py"), found(again, tmp_path / "a.py")]
    assert one_way == other_way[::-1]
    assert one_way[0] == [("log-of-softmax", 6, "info")]


LAYER = (
    "import torch\nfrom torch import nn\n\n\nclass Coupling(nn.Module):\n"
    "    def __init__(self, mean_only=False):\n        super().__init__()\n"
    "        self.mean_only = mean_only\n        self.net = nn.Linear(4, 8)\n\n"
    "    def forward(self, x):\n        logs = self.net(x)\n"
    "        if not self.mean_only:\n            x = x * torch.exp(logs)\n        return x\n"
)


@pytest.mark.parametrize(("given", "warned"), [("mean_only=True", False), ("", True)])
def test_a_flag_that_everybody_gives_decides_a_branch(tmp_path: Path, given: str, warned: bool):
    use = (
        "import torch\nfrom layer import Coupling\n\n\ndef train(x, opt):\n"
        f"    loss = Coupling({given})(x).sum()\n    loss.backward()\n    opt.step()\n"
    )
    made = project(tmp_path, layer=LAYER, train=use)
    names = [name for name, _, _ in found(made, tmp_path / "layer.py")]
    assert ("unbounded-exp" in names) is warned


def test_what_no_training_calls_is_a_remark(tmp_path: Path):
    losses = (
        "import torch\n\n\ndef used_loss(x):\n    return torch.softmax(x, -1).log().mean()\n\n\n"
        "def forgotten_loss(x):\n    return torch.softmax(x, -1).log().mean()\n"
    )
    train = (
        "import torch\nfrom losses import used_loss\n\n\ndef train(x, opt):\n"
        "    used_loss(x).backward()\n    opt.step()\n"
    )
    made = project(tmp_path, losses=losses, train=train)
    severities = {line: severity for _, line, severity in found(made, tmp_path / "losses.py")}
    assert severities == {5: "warning", 9: "info"}


def test_defaults_of_options_are_known(tmp_path: Path):
    options = (
        "import argparse\n\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--max-norm', type=float, default=1e6)\n"
        "parser.add_argument('--rate', type=float, default=0.1)\n"
    )
    other = "from dataclasses import dataclass\n\n\n@dataclass\nclass C:\n    rate: float = 0.2\n"
    made = project(tmp_path, options=options, other=other)
    assert made.setting("max_norm") == 1e6
    assert made.setting("rate") is None  # two that differ
    assert made.setting("nothing") is None


def test_a_kept_outcome_is_dropped_when_an_imported_file_changes(tmp_path: Path):
    folder = tmp_path / "p"
    project(
        folder,
        heads=HEADS,
        train=TRAIN.format(imports="from heads import Head", head="Head"),
        c="import torch\n",
        d="import torch\n",
    )

    def names() -> list[str]:
        plan = Plan(Selection(), root=str(folder), jobs=1, cache=tmp_path / "cache")
        outcome = Check(plan).run([str(folder)])
        return [seen.finding.name for seen in outcome.seen]

    assert names() == ["bce-after-sigmoid"]
    assert names() == ["bce-after-sigmoid"]
    (folder / "heads.py").write_text(HEADS.replace(", nn.Sigmoid()", ""))
    assert names() == ["loss-of-wrong-input"]


@pytest.mark.parametrize(
    ("train", "severity"),
    [
        ("import torch\nimport losses\n\nmade = losses.B()\n", "warning"),
        ("import torch\n", "info"),  # nobody imports it
        ("import importlib\nlosses = importlib.import_module('loss' + 'es')\n", "warning"),
    ],
)
def test_a_file_that_nobody_imports_is_a_remark(tmp_path: Path, train: str, severity: str):
    made = project(
        tmp_path,
        train=train + "\n\ndef train(loss):\n    loss.backward()\n",
        losses="import torch\n\n\nclass A:\n    def loss(self, x):\n"
        "        loss = torch.nn.functional.mse_loss(x, 2 * x)\n"
        "        return loss.clamp(max=1.0)\n\n\nclass B(A):\n"
        "    def loss(self, x):\n        return super().loss(x)\n",
    )
    assert found(made, tmp_path / "losses.py") == [("loss-clamped", 7, severity)]


def test_names_are_followed_through_any_number_of_files(tmp_path: Path):
    chain = {f"pkg/step{n}": f"from .step{n + 1} import *\n" for n in range(8)}
    made = project(
        tmp_path,
        **{
            "main": "import torch\nfrom pkg import Head, EPS\n",
            "pkg/__init__": "from .step0 import Head, EPS\n",
            **chain,
            "pkg/step8": "from .heads import (\n    Head,  # the one (and only)\n    EPS,\n)\n",
            "pkg/heads": HEADS,
        },
    )
    main = str(tmp_path / "main.py")
    assert isinstance(made.find(main, 0, ("pkg", "Head")), Class)
    eps = made.find(main, 0, ("pkg", "EPS"))
    assert isinstance(eps, Value)
    assert eps.const == 1e-3
    files = {path.rpartition("/")[2] for path in made.needed()}
    assert files >= {"heads.py"}


def test_values_are_followed_several_files_deep(tmp_path: Path):
    files = {
        "base": "import torch\n\nFLOOR = 1e-3\n\n\n"
        "def shares(x):\n    return torch.softmax(x, -1) + FLOOR\n",
        "second": "import torch\nfrom base import shares as first\n\n\n"
        "def shares(x):\n    return first(x)\n",
        "third": "import torch\nfrom second import shares\n\n\n"
        "def shares_of(x):\n    return shares(x)\n",
        "loss": "import torch\nfrom third import shares_of\n\n\ndef loss(x):\n"
        "    value = torch.log(shares_of(x)).mean()\n    value.backward()\n",
    }
    made = project(tmp_path, **files)
    assert not found(made, tmp_path / "loss.py")
    files["base"] = files["base"].replace(" + FLOOR", "")
    made = project(tmp_path, **files)
    assert [name for name, *_ in found(made, tmp_path / "loss.py")] == ["log-of-softmax"]


def test_settings_of_another_file_are_known(tmp_path: Path):
    made = project(
        tmp_path,
        settings="class Settings:\n    eps = 1e-3\n    name = 'x'\n",
        defaults="from settings import Settings\n\nsettings = Settings()\n",
        main="import torch\n",
    )
    main = str(tmp_path / "main.py")
    for parts in (("defaults", "settings", "eps"), ("settings", "Settings", "eps")):
        eps = made.find(main, 0, parts)
        assert isinstance(eps, Value)
        assert eps.const == 1e-3


def test_a_package_of_stars_is_asked_once_for_each_name(tmp_path: Path, monkeypatch):
    names = [f"part{n}" for n in range(30)]
    stars = "".join(f"from .{name} import *\n" for name in names)
    made = project(
        tmp_path,
        **{
            "main": "import torch\nfrom pkg import *\n",
            "pkg/__init__": stars,
            **{
                f"pkg/{name}": f"from pkg import *\n\ndef a_{name}():\n    pass\n" for name in names
            },
        },
    )
    read: list[str] = []
    real = scopes.bytes_of
    monkeypatch.setattr(scopes, "bytes_of", lambda path: read.append(path) or real(path))
    main = str(tmp_path / "main.py")
    for name in (*(f"a_{name}" for name in names), "missing", "missing"):
        assert isinstance(made.find(main, 0, ("pkg", name)), Function) == (name != "missing")
    assert len(read) == len(set(read)) <= len(names) + 1


def test_a_circle_hides_nothing(tmp_path: Path):
    made = project(
        tmp_path,
        main="import torch\n",
        first="from second import *\nfrom third import *\n",
        second="from first import *\n",
        third="EPS = 1e-3\n",
    )
    main = str(tmp_path / "main.py")
    for module in ("first", "second", "first"):
        assert isinstance(made.find(main, 0, (module, "EPS")), Value), module


MODEL = (
    "import torch\nfrom torch import nn\n\n\nclass Coder(nn.Module):\n    def __init__(self):\n"
    "        super().__init__()\n        self.out = nn.Linear(4, 8)\n\n"
    "    def forward(self, x):\n        mu, logvar = self.out(x).chunk(2, -1)\n"
    "        return mu + torch.exp(0.5 * logvar) * torch.randn_like(mu)\n"
)
USE = (
    "from models.coder import Coder\n\n\ndef main(loader, opt):\n    model = Coder()\n"
    "    for x in loader:\n        loss = (model(x) - x).pow(2).mean()\n"
    "        loss.backward()\n        opt.step()\n\n\nmain([], None)\n"
)


@pytest.mark.parametrize("marked", ["folder", "repository", "setup.py"])
def test_a_finding_is_as_severe_for_the_file_alone_as_for_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, marked: str
):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "coder.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(USE)
    if marked == "repository":
        (tmp_path / ".git").mkdir()
    elif marked == "setup.py":
        (tmp_path / "setup.py").write_text("")
    monkeypatch.chdir(tmp_path)

    def severities(path: str) -> list[tuple[str, str]]:
        seen = Check(Plan(jobs=1)).run([path]).seen
        return [(s.finding.name, s.finding.severity.value) for s in seen if s.finding.line == 12]

    expected = [("unbounded-exp", "warning")]
    assert severities(".") == severities("models/coder.py") == expected
    if marked != "folder":  # otherwise a folder that is named is all there is
        assert severities("models") == expected
        monkeypatch.chdir(tmp_path / "models")
        assert severities("coder.py") == expected


def test_two_repositories_in_a_folder_are_judged_each_by_itself(tmp_path: Path):
    for name, content in (("one", USE), ("two", "x = 1\n")):
        (tmp_path / name / ".git").mkdir(parents=True)
        (tmp_path / name / "models").mkdir()
        (tmp_path / name / "models" / "coder.py").write_text(MODEL)
        (tmp_path / name / "train.py").write_text(content)
    seen = Check(Plan(jobs=1)).run([str(tmp_path)]).seen
    found = [(s.finding.path, s.finding.severity.value) for s in seen if s.finding.line == 12]
    assert found == [
        (str(tmp_path / "one" / "models" / "coder.py"), "warning"),
        (str(tmp_path / "two" / "models" / "coder.py"), "info"),
    ]


def test_what_is_counted_in_a_project_is_kept_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / ".git").mkdir()
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "coder.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(USE)
    for number in range(50):
        (tmp_path / f"part{number}.py").write_text(f"def part{number}(x):\n    return x\n")
    monkeypatch.chdir(tmp_path)
    counted: list[int] = []
    make = project_index._index_of
    monkeypatch.setattr(project_index, "_index_of", lambda paths: counted.append(1) or make(paths))

    def severity() -> str:
        seen = Check(Plan(jobs=1, cache=tmp_path / ".kept")).run(["models/coder.py"]).seen
        return next(s.finding.severity.value for s in seen if s.finding.name == "unbounded-exp")

    assert (severity(), severity(), len(counted)) == ("warning", "warning", 1)
    (tmp_path / "models" / "coder.py").write_text(MODEL.replace("0.5 *", "0.25 *"))
    assert (severity(), len(counted)) == ("warning", 1)  # it names what it named before
    (tmp_path / "train.py").write_text("x = 1\n")
    assert (severity(), len(counted)) == ("info", 2)
    (tmp_path / "again.py").write_text(USE)
    assert (severity(), len(counted)) == ("warning", 3)
    (kept,) = (tmp_path / ".kept").glob("project-*.json")
    kept.write_text("{")
    assert (severity(), len(counted)) == ("warning", 4)
