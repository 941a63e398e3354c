"""The recipes of CONTRIBUTING.md, each followed to the letter in a copy of the package."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanguard

PACKAGE = Path(nanguard.__file__).parent

FUTURE = "from __future__ import annotations\n"
RULE = '''"""Finds dropout that drops everything."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.findings import Finding


class DropsEverything(CodeRule):
    """A dropout layer keeps nothing.

    Why it breaks a run: what is kept is divided by the share that is kept, which is 0.
    """

    code = "SRC999"
    name = "drops-everything"
    severity = Severity.ERROR
    seen_in = "https://example.org/incident"
    examples = (
        Passes("import torch\\nlayer = torch.nn.Dropout(0.1)\\n"),
        Fails("import torch\\nlayer = torch.nn.Dropout(1.0)\\n", line=2),
    )

    def check(self, source: Code) -> Iterator[Finding]:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and ast.unparse(node) == "torch.nn.Dropout(1.0)":
                yield self.finding("keeps nothing", path=source.text.path, line=node.lineno)
'''

DATA_READER = '''"""Records of ``key=value`` pairs, one record in each line."""

from __future__ import annotations

from nanguard.check.data.columns import roles_of
from nanguard.check.data.records import RowReader, columns_of


def read_pairs(path, watch, scan):
    """Returns what a file of pairs holds."""
    lines = path.read_text().splitlines()
    records = [dict(pair.split("=", 1) for pair in line.split()) for line in lines]
    records = [{key: float(value) for key, value in record.items()} for record in records]
    roles = roles_of(columns_of(records), watch.expected)
    reader = RowReader(roles, watch)
    for number, record in enumerate(records, 1):
        reader.add(record, number)
    scan.progress(str(path), path.stat().st_size)
    return reader.finish(), roles
'''

LOG_READER = '''"""Logs of lines such as ``@12 0.5``: a step and its loss, without any name."""

from __future__ import annotations

from nanguard.check.log.grammar import line_of
from nanguard.check.log.series import Gathering, LogRows
from nanguard.check.log.text_log import add_loose


def is_marked(head):
    """Returns whether a file is such a log."""
    return head.startswith(b"@")


def read_marked(path, scan):
    """Returns what such a log says."""
    gathering = Gathering(str(path))
    loose: dict[tuple[object, ...], LogRows] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        step, value = line[1:].split()
        add_loose(loose, number, line_of({"step": int(step), "loss": float(value)}))
    gathering.add(list(loose.values()))
    return gathering.log
'''


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package, in a folder of its own."""
    shutil.copytree(
        PACKAGE, tmp_path / "src" / "nanguard", ignore=shutil.ignore_patterns("__pycache__")
    )
    return tmp_path / "src" / "nanguard"


def change(file: Path, old: str, new: str) -> None:
    """Replaces a text that stands in a file once."""
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))


def python(copy: Path, *words: str) -> str:
    """Returns what Python prints, with the copy in the place of the package."""
    done = subprocess.run(
        [sys.executable, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        cwd=copy.parents[1],
        env={**os.environ, "PYTHONPATH": str(copy.parent)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def found(copy: Path, path: Path) -> list[str]:
    """Returns the names of what a check finds in a file; it must have been checked."""
    told = python(
        copy, "-m", "nanguard", "check", "--format", "json", "--fail-on", "none", str(path)
    )
    report = json.loads(told)
    assert report["not_checked"] == []
    return [finding["name"] for finding in report["findings"]]


@pytest.mark.parametrize("module", ["drops_everything.py", "std_of_few.py"])
def test_a_rule_is_one_file_or_a_class_in_the_module_of_its_idea(copy: Path, module: str):
    file = copy / "check" / "code" / "rules" / module
    before = file.read_text() if file.exists() else ""
    file.write_text(before + (RULE.replace(FUTURE, "") if before else RULE))
    python(
        copy,
        "-c",
        "from nanguard.check.rule import broken, rules_for\n"
        "from nanguard.testing import check_rule\n"
        "(rule,) = [r for r in rules_for('code') if r.name == 'drops-everything']\n"
        "assert not broken()\n"
        "check_rule(type(rule))",
    )
    script = copy.parents[1] / "train.py"
    script.write_text("import torch\n\nlayer = torch.nn.Dropout(1.0)\n")
    assert "drops-everything" in found(copy, script)


def test_a_data_format_is_its_reader_and_three_lines_in_formats(copy: Path):
    folder = copy / "check" / "data"
    (folder / "pairs.py").write_text(DATA_READER)
    formats = folder / "formats.py"
    change(formats, '    ".json": JSON,\n', '    ".json": JSON,\n    ".pairs": PAIRS,\n')
    change(formats, "ENDINGS = {\n", 'PAIRS = "pairs"\nENDINGS = {\n')
    change(
        formats,
        "    elif out.format == JSON:\n",
        "    elif out.format == PAIRS:\n"
        "        from nanguard.check.data.pairs import read_pairs as read\n"
        "    elif out.format == JSON:\n",
    )
    data = copy.parents[1] / "train.pairs"
    data.write_text("".join(f"x=0.{n} y=1.{n} label={n % 2}\n" for n in range(40)) + "x=nan y=1\n")
    assert "non-finite-feature" in found(copy, data)


def test_a_log_format_is_its_reader_and_three_lines_in_the_log_reader(copy: Path):
    folder = copy / "check" / "log"
    (folder / "marked_log.py").write_text(LOG_READER)
    opens = folder / "log_reader.py"
    change(
        opens,
        "from nanguard.check.log.quantities import",
        "from nanguard.check.log.marked_log import is_marked, read_marked\n"
        "from nanguard.check.log.quantities import",
    )
    change(opens, '    WANDB = "wandb"\n', '    WANDB = "wandb"\n    MARKED = "marked"\n')
    change(
        opens,
        "    if is_events(path.name, head):\n        return Form.EVENTS\n",
        "    if is_events(path.name, head):\n        return Form.EVENTS\n"
        "    if is_marked(head):\n        return Form.MARKED\n",
    )
    change(
        opens,
        "    Form.WANDB: read_wandb,\n",
        "    Form.WANDB: read_wandb,\n    Form.MARKED: read_marked,\n",
    )
    log = copy.parents[1] / "train.log"
    log.write_text("".join(f"@{n} {1 / (n + 1)}\n" for n in range(40)) + "@40 nan\n")
    assert "non-finite-loss" in found(copy, log)
