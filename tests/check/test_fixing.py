"""``--fix``: Python in place, only what keeps behaviour, and never half a file."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING

import pytest

from nanguard.check.fixing import Repairing
from nanguard.errors import SourceError
from nanguard.findings import Edit, Finding, Fix, Severity
from tests.check.plugin import check, names, reasons, told

if TYPE_CHECKING:
    from pathlib import Path


def test_only_safe_fixes_are_applied_in_place(tmp_path: Path, plugin: Path):
    file = tmp_path / "a.py"
    file.write_text("x = BAD\ny = RISKY\n")
    done = check("a.py", "--fix", cwd=tmp_path, plugin=plugin)
    assert file.read_text() == "x = GOOD\ny = RISKY\n"
    assert done.returncode == 0
    assert "a.py (repaired)" in done.stdout
    assert "-x = BAD\n+x = GOOD\n" in done.stdout
    check("a.py", "--fix", "--unsafe", cwd=tmp_path, plugin=plugin)
    assert file.read_text() == "x = GOOD\ny = CALM\n"


def test_diff_shows_and_writes_nothing(tmp_path: Path, plugin: Path):
    file = tmp_path / "a.py"
    file.write_text("x = BAD\n")
    done = check("a.py", "--diff", cwd=tmp_path, plugin=plugin)
    assert done.returncode == 1
    assert "a.py (would be repaired)" in done.stdout
    assert file.read_text() == "x = BAD\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"\xef\xbb\xbfx = BAD\r\n", b"\xef\xbb\xbfx = GOOD\r\n"),
        ("# coding: latin-1\nx = 'é' + BAD".encode("latin-1"),) * 2,
        (b"x = BAD\nif 1:\r\n\ty = 2\r\n", b"x = GOOD\nif 1:\r\n\ty = 2\r\n"),
        (b"x = BAD", b"x = GOOD"),
    ],
)
def test_the_rest_of_the_file_stays_byte_for_byte(
    tmp_path: Path, plugin: Path, before: bytes, after: bytes
):
    file = tmp_path / "a.py"
    file.write_bytes(before)
    file.chmod(0o750)
    check("a.py", "--fix", cwd=tmp_path, plugin=plugin)
    assert file.read_bytes() == after.replace(b"BAD", b"GOOD")
    assert stat.S_IMODE(file.stat().st_mode) == 0o750
    assert [p.name for p in tmp_path.iterdir()] == ["a.py"]


def test_a_fix_that_breaks_the_file_or_does_not_help_is_not_applied(tmp_path: Path, plugin: Path):
    file = tmp_path / "a.py"
    file.write_text("x = FRAGILE\ny = STAYS\nz = BAD\n")
    report = told("a.py", "--fix", cwd=tmp_path, plugin=plugin)
    assert file.read_text() == "x = FRAGILE\ny = STAYS\nz = GOOD\n"
    assert names(report) == [("breaking-fix", 1), ("useless-fix", 2)]
    assert [c["name"] for r in report["repairs"] for c in r["changes"]] == ["bad-word"]


def test_what_cannot_be_written_as_it_was_is_left(tmp_path: Path, plugin: Path):
    (tmp_path / "mac.py").write_bytes(b"x = BAD\ry = 1\r")
    (tmp_path / "real.txt").write_text("x = BAD\n")
    (tmp_path / "link.py").symlink_to(tmp_path / "real.txt")
    report = told("mac.py", "link.py", "--fix", cwd=tmp_path, plugin=plugin)
    assert (tmp_path / "mac.py").read_bytes() == b"x = BAD\ry = 1\r"
    assert (tmp_path / "real.txt").read_text() == "x = BAD\n"
    assert reasons(report) == {
        "mac.py": "it was not repaired: its lines end in an old way",
        "link.py": "it was not repaired: it is a link",
    }
    assert len(report["findings"]) == 2


def test_notebooks_get_a_diff_only(tmp_path: Path, plugin: Path):
    cell = {"cell_type": "code", "source": ["x = 1\n", "y = BAD\n"]}
    content = json.dumps({"nbformat": 4, "cells": [{"cell_type": "markdown"}, cell]}, indent=1)
    (tmp_path / "n.ipynb").write_text(content)
    report = told("n.ipynb", "--fix", cwd=tmp_path, plugin=plugin)
    assert (tmp_path / "n.ipynb").read_text() == content
    (finding,) = report["findings"]
    assert finding["where"] == "cell 2, line 2"
    assert "y = BAD" in content.split("\n")[finding["line"] - 1]
    assert "-y = BAD\n+y = GOOD\n" in finding["fixes"][0]["diff"]


def test_what_comments_and_the_baseline_allow_is_not_repaired(tmp_path: Path, plugin: Path):
    file = tmp_path / "a.py"
    file.write_text("x = BAD  # nanguard: ignore[bad-word] meant\ny = BAD\n")
    check("a.py", "--write-baseline", "known.json", cwd=tmp_path, plugin=plugin)
    file.write_text(file.read_text() + "z = BAD\n")
    done = check("a.py", "--fix", "--baseline", "known.json", cwd=tmp_path, plugin=plugin)
    assert done.returncode == 0
    assert file.read_text().splitlines()[1:] == ["y = BAD", "z = GOOD"]
    assert "ignore[bad-word]" in file.read_text()


def finding(name: str, *edits: Edit) -> Finding:
    return Finding("X", name, Severity.ERROR, name, "f", 1, fixes=(Fix(name, edits=edits),))


def test_repairs_that_reveal_others_go_on_until_nothing_is_left():
    def look(text: str) -> list[Finding]:
        steps = {"a": "b", "b": "c", "c": "d"}
        return [finding(text, Edit(0, 1, steps[text]))] if text in steps else []

    work = Repairing(look, lambda f: f.fixes[0])
    assert work.run("a") == "d"
    assert [change.finding.name for change in work.changes] == ["a", "b", "c"]


def test_repairs_that_go_round_in_circles_end():
    def look(text: str) -> list[Finding]:
        return [finding(text, Edit(0, 1, "b" if text == "a" else "a"))]

    work = Repairing(look, lambda f: f.fixes[0])
    assert work.run("a") in ("a", "b")
    assert len(work.changes) <= 2


def test_one_fix_that_fails_does_not_hold_up_the_others_of_its_rule():
    def look(text: str) -> list[Finding]:
        if "!" in text:
            raise SourceError("no", where="f", do="x")
        new = {"a": "x", "b": "!", "c": "c "}
        return [finding("rule", Edit(i, i + 1, new[c])) for i, c in enumerate(text) if c in new]

    work = Repairing(look, lambda f: f.fixes[0])
    assert work.run("a\nb\nc\na\n") == "x\nb\nc\nx\n"
    assert len(work.changes) == 2


def test_a_text_that_cannot_be_read_is_an_error():
    def look(text: str) -> list[Finding]:
        raise SourceError("no", where="f", do="x")

    with pytest.raises(SourceError):
        Repairing(look, lambda f: None).run("a")
