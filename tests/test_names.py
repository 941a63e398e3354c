"""One name for one thing: modules and classes of the package are told apart by their names."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "nanguard"
# The same idea in two places: a rule before the run and a cause after it, a callback for each
# framework.
SAME_IDEA = {"LabelOutOfRange", "NanguardCallback"}
# Means two things that are not told apart yet; none may be added.
TO_DO = {"Flight"}
MOST_WORDS = 25


def modules() -> list[Path]:
    return [path for path in SOURCE.rglob("*.py") if path.stem not in ("__init__", "sitecustomize")]


def test_a_module_name_is_used_once() -> None:
    places = defaultdict(list)
    for path in modules():
        places[path.stem].append(str(path.relative_to(SOURCE)))
    assert {
        name: where for name, where in places.items() if len(where) > 1 and name not in SAME_IDEA
    } == {}


def test_a_class_name_is_used_once() -> None:
    places = defaultdict(list)
    for path in modules():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            # What begins with an underscore is nobody else's.
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(str(path.relative_to(SOURCE)))
    assert {
        name: where
        for name, where in places.items()
        if len(where) > 1 and name not in SAME_IDEA | TO_DO
    } == {}


def test_the_glossary_is_short_and_its_files_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.split("## Words")[1].split("## House rules")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    rows = [row for row in rows if not row.startswith("| ---")]
    assert 10 < len(rows) <= MOST_WORDS
    files = re.findall(r"`([\w/]+\.py)`", table)
    assert len(files) >= len(rows)
    assert [name for name in files if not (SOURCE / name).is_file()] == []
