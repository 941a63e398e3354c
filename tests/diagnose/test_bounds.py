"""Bounds fit the quantity, keep dimensions, and are the same before a run and after a bad step."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import nanguard.check.code.rules
import nanguard.diagnose
from nanguard.diagnose.causes.empty_reduction import _sum_by_count
from nanguard.diagnose.repairs import call_with
from nanguard.source.edits import SourceFile, argument

PACKAGES = (nanguard.diagnose, nanguard.check.code.rules)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_bounds_are_written_in_one_place(package):
    for path in Path(package.__path__[0]).rglob("*.py"):
        for call in re.findall(r"f\"[^\"\n]*clamp\([^\"\n]*1e-\d+", path.read_text()):
            pytest.fail(f"{path.name}: {call}")


def call_in(folder, text):
    path = folder / "call.py"
    path.write_text(text + "\n")
    file = SourceFile.open(str(path))
    node = file.tree.body[0].value
    assert isinstance(node, ast.Call)
    return file, node


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x.mean()", "(x.sum() / max(x.numel(), 1))"),
        ("x[m].mean(dim=1)", "((x[m]).sum(dim=1) / max((x[m]).shape[1], 1))"),
        ("torch.mean(x, 0, True)", "(x.sum(0, True) / max(x.shape[0], 1))"),
        ("x.mean(-1, keepdim=True)", "(x.sum(-1, keepdim=True) / max(x.shape[-1], 1))"),
        ("x.mean((1, 2))", None),
        ("x.mean(dim=dims)", None),
    ],
)
def test_mean_of_nothing_keeps_its_dimensions(tmp_path, before, after):
    file, call = call_in(tmp_path, before)
    assert _sum_by_count(file, call, argument(call)) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x.std(0, keepdim=True)", "x.std(0, keepdim=True, unbiased=False)"),
        ("x.std(unbiased=True, keepdim=True)", "x.std(unbiased=False, keepdim=True)"),
        ("x.std(keepdim=True, unbiased=True)", "x.std(keepdim=True, unbiased=False)"),
    ],
)
def test_spread_keeps_its_other_arguments(tmp_path, before, after):
    file, call = call_in(tmp_path, before)
    assert call_with(file, call, "unbiased", "False") == after
