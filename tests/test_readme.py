"""The README is a pitch whose first command works, and whose picture shows what there is."""

from __future__ import annotations

import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_is_short_and_the_installation_is_on_line_8():
    for name in ("README.md", "README.zh-CN.md"):
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        assert len(lines) <= 160
        assert lines[7].startswith("pip install '.[torch]'")


def test_what_it_links_to_is_there():
    for target in re.findall(r"\]\(([^()\s]+)\)", README):
        assert (ROOT / target.partition("#")[0]).exists(), target


def test_the_rules_are_counted():
    from nanguard.check.rule import all_rules

    told = re.search(r"\[(\d+) rules about code, (\d+) about configurations", README)
    count = Counter(rule.reads for rule in all_rules())
    assert tuple(map(int, told.groups())) == (count["code"], count["config"])


def test_the_check_says_what_the_readme_shows(tmp_path, capsys, monkeypatch):
    from nanguard.cli.entry import run

    shutil.copy(ROOT / "tests/lint/open/amp_resnet.py", tmp_path)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```text\n(.*?)```", README, re.S)
    shown = next(block for block in blocks if "clip-before-unscale" in block)
    assert run(["check"]) == 1
    said = capsys.readouterr().out
    for line in shown.splitlines():
        assert line.partition(" (0.")[0] in said


@pytest.mark.parametrize(
    ("page", "title"), [("accuracy", "How often it is right"), ("cost", "What it costs")]
)
def test_the_tables_are_those_of_the_documentation(page: str, title: str):
    rows = set((ROOT / f"docs/{page}.md").read_text(encoding="utf-8").splitlines())
    section = README.split(f"## {title}\n")[1].split("\n## ")[0]
    table = re.findall(r"^\|.*$", section, re.M)
    assert len(table) > 3
    assert set(table) <= rows


def test_the_picture_shows_what_an_incident_says(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    picture = pytest.importorskip("picture", reason="docs/picture.py is not in this distribution")
    assert sys.modules["picture"].__file__ == str(ROOT / "docs/picture.py")
    found = picture.make_incident(tmp_path)
    drawn = picture.description((ROOT / "docs/incident.png").read_bytes())
    assert drawn == picture.shown(found), "run make docs/incident.png"
