"""What ``nanguard check`` shows: errors first, counts by rule, and no noise about other files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from nanguard.check.rule import rules_for
from nanguard.check.selection import Selection
from nanguard.cli.checking import run_check
from nanguard.cli.commands.before import CheckOptions
from nanguard.cli.rulepages import listed
from nanguard.errors import SettingsError

if TYPE_CHECKING:
    from pathlib import Path

LOAD = 'import torch\n\nstate = torch.load("last.pt")\n'
MIXED = (
    "import torch\nfrom torch.nn.parallel import DistributedDataParallel as DDP\n\n\n"
    "def f_loss(x, y):\n    return -(torch.softmax(x, -1).log() * y).sum()\n\n\n"
    "def train(model, loader, opt):\n    model = DDP(model)\n    for x in loader:\n"
    "        loss = f_loss(model(x), x)\n        if not torch.isfinite(loss):\n"
    "            continue\n"
    "        opt.zero_grad()\n        loss.backward()\n        opt.step()\n"
)


def shown(folder: Path, **options: object) -> str:
    report = folder.parent / "report.txt"
    words = {"fail_on": "none", "output": report, "no_cache": True, "jobs": 1, **options}
    run_check(CheckOptions((str(folder),), **words))  # type: ignore[arg-type]
    return report.read_text()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    place.mkdir()
    (place / "a.py").write_text(MIXED)
    (place / "notes.xyz").write_text("words\n")
    (place / "other.yaml").write_text("site: here\nmenu: [a, b]\n")
    return place


@pytest.mark.parametrize("quiet", [False, True])
def test_errors_come_first(folder: Path, quiet: bool):
    told = shown(folder, quiet=quiet)
    assert told.index("rank-divergent-skip") < told.index("log-of-softmax")


def test_statistics_count_by_rule(folder: Path):
    lines = shown(folder, statistics=True).splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["1", "error"], ["1", "warning"]]
    assert lines[-1].startswith("1 error, 1 warning in 1 file")


def test_files_without_rules_are_counted_and_listed_only_if_asked_for(folder: Path):
    brief, full = shown(folder), shown(folder, verbose=True)
    assert "kinds without rules" not in brief
    assert "not checked" not in brief
    assert "kinds without rules" in full
    assert "2 entries not checked" in full
    report = json.loads(shown(folder, form="json"))
    assert len(report["not_checked"]) == 2


def test_rules_are_named_by_their_group(tmp_path: Path):
    place = tmp_path / "p"
    place.mkdir()
    (place / "a.py").write_text(LOAD)
    # It is about safety, not about numbers: a remark.
    (found,) = json.loads(shown(place, form="json"))["findings"]
    assert (found["name"], found["severity"]) == ("unsafe-checkpoint-load", "info")
    for words in ({"extend": ("security",), "select": ("CFG",)}, {"select": ("security",)}):
        assert "unsafe-checkpoint-load" in shown(place, **words)
    for words in ({"ignore": ("security",)}, {"select": ("CFG",)}):
        assert "unsafe-checkpoint-load" not in shown(place, **words)
    newer = tmp_path / "newer"
    newer.mkdir()
    (newer / "a.py").write_text(LOAD)
    (newer / "requirements.txt").write_text("torch>=2.6\n")
    assert "unsafe-checkpoint-load" not in shown(newer)


def test_an_unknown_group_is_a_mistake():
    with pytest.raises(SettingsError, match="no rule 'sekurity'"):
        Selection(extend=("sekurity",)).checked_words()


def test_the_rules_are_listed():
    whole = listed().splitlines()
    assert len(whole) > len(rules_for("code")) + len(rules_for("config"))
    assert [line.split()[2] for line in listed(("security",)).splitlines()] == [
        "unsafe-checkpoint-load"
    ]
    assert {line[:3] for line in listed(("CFG",)).splitlines()} == {"CFG"}


def test_the_hint_says_which_repairs_need_unsafe(tmp_path: Path):
    place = tmp_path / "p"
    place.mkdir()
    (place / "run.yaml").write_text("lr: 1.0e-4\nepochs: 3\nbatch_size: 8\nmax_grad_nrom: 1.0\n")
    told = shown(place)
    assert "1 can be repaired with --fix --unsafe" in told
    assert "can be repaired: nanguard check --fix" not in told
