"""Changes to source files: the right expression, and nothing else."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from nanguard.diagnose.repairs import bounded, set_keyword
from nanguard.replay.tracer.sites import Site
from nanguard.source.edits import (
    SourceFile,
    addressed,
    argument,
    called_name,
    divisor_of,
    is_quotient,
)

TEXT = """\
def loss(out, target, mask):
    größe = mask.sum(1)
    error = (out - target) ** 2 / größe
    return torch.log(
        error.mean() + 1.0
    )


def train(model):
    loss.backward(
        retain_graph=False,
    )
    opt.step()
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TEXT, encoding="utf-8")
    found = SourceFile.open(str(path))
    assert found is not None
    return found


def site(line, span=None):
    return Site("train.py", line, "f", span)


def test_replaces_by_bytes_and_not_by_characters(file):
    node = file.node_at(site(3), lambda n: isinstance(n, ast.BinOp) and isinstance(n.op, ast.Div))
    new = file.replaced([(node.right, "größe.clamp(min=1)")])
    assert "    error = (out - target) ** 2 / größe.clamp(min=1)\n" in new
    assert new.count("\n") == TEXT.count("\n")


def test_expression_over_several_lines(file):
    node = file.node_at(site(5), lambda n: called_name(n) == "log")
    inner = argument(node)
    assert file.text_of(inner) == "error.mean() + 1.0"
    new = file.replaced([(inner, bounded(file.text_of(inner), ".clamp(min=1e-8)"))])
    ast.parse(new)
    assert "(error.mean() + 1.0).clamp(min=1e-8)" in new


def test_exact_span_wins_over_the_first_on_the_line(tmp_path):
    path = tmp_path / "two.py"
    path.write_text("y = -torch.log(-torch.log(u))\n")
    found = SourceFile.open(str(path))
    inner = found.node_at(site(1, (1, 1, 16, 28)), lambda n: called_name(n) == "log")
    assert file_text(found, inner) == "torch.log(u)"
    outer = found.node_at(site(1, (1, 1, 5, 29)), lambda n: called_name(n) == "log")
    assert file_text(found, outer) == "torch.log(-torch.log(u))"


@pytest.mark.parametrize(
    ("line", "divisor"),
    [
        ("loss = (f(x).pow(2) * w).sum() / w.sum()", "w.sum()"),
        ("loss = (f(x) ** 2).sum() / w.sum()", "w.sum()"),
        ("loss = a.pow(-2).sum() ** 2", "a"),
        ("loss = a.pow(p).sum()", "a"),
        ("loss = a.square().sum().rsqrt()", "a.square().sum()"),
    ],
)
def test_a_square_is_no_quotient_where_only_the_line_is_known(tmp_path, line, divisor):
    """As on Python 3.10, which has no columns."""
    path = tmp_path / "one.py"
    path.write_text(line + "\n")
    found = SourceFile.open(str(path))
    assert file_text(found, divisor_of(found.node_at(site(1, None), is_quotient))) == divisor


def file_text(file, node):
    return file.text_of(node)


def test_line_is_added_after_the_whole_statement(file):
    new = file.inserted_after(10, "clip()")
    lines = new.splitlines()
    assert lines[11:13] == ["    )", "    clip()"]
    ast.parse(new)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a(); b(); c()", "a(); b()\nclip()\nc()"),
        ("b();  c()  # why", "b()\nclip()\nc()  # why"),
        ("a(); b()  # why; why", "a(); b()  # why; why\nclip()"),
        ("if x: a(); b(); c()", "if x: a(); b(); clip(); c()"),
        ("for x in y:\n  ä(); b(\n  ); c()", "for x in y:\n  ä(); b(\n  )\n  clip()\n  c()"),
    ],
)
def test_line_is_added_between_two_statements_of_one_line(tmp_path, before, after):
    path = tmp_path / "one.py"
    path.write_text(before + "\n", encoding="utf-8")
    line = next(n for n, text in enumerate(before.splitlines(), 1) if "b(" in text)
    new = SourceFile.open(str(path)).inserted_after(line, "clip()", "b")
    assert new == after + "\n"
    ast.parse(new)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("f(x)", "f(x, eps=1e-4)"),
        ("f()", "f(eps=1e-4)"),
        ("f(x, eps=0.0)", "f(x, eps=1e-4)"),
        ("f(\n    x,\n)", "f(\n    x, eps=1e-4)"),
    ],
)
def test_keyword_is_set(tmp_path, before, after):
    path = tmp_path / "call.py"
    path.write_text(before + "\n")
    found = SourceFile.open(str(path))
    call = found.tree.body[0].value
    assert set_keyword(found, call, "eps", "1e-4") == after + "\n"


def test_diff_is_unified(file):
    new = TEXT.replace("opt.step()", "scaler.step(opt)")
    diff = addressed(file.diff(new), str(Path(file.path).parent))
    assert "-    opt.step()\n+    scaler.step(opt)\n" in diff
    assert diff.startswith("--- a/train.py\n+++ b/train.py\n")


def test_diff_names_the_file_as_seen_from_where_the_command_ran(file):
    folder = Path(file.path).parent
    diff = file.diff(TEXT.replace("opt.step()", "scaler.step(opt)"))
    inside = addressed(diff, str(folder.parent))
    assert inside.startswith(f"--- a/{folder.name}/train.py\n+++ b/{folder.name}/train.py\n@@")
    elsewhere = addressed(diff, str(folder / "other"))
    assert elsewhere.startswith(f"--- a{file.path}\n")


KINDS = {
    "plain": (b"", "\n", "utf-8"),
    "byte order mark": (b"\xef\xbb\xbf", "\n", "utf-8"),
    "windows": (b"", "\r\n", "utf-8"),
    "cookie": (b"# -*- coding: latin-1 -*-\n", "\n", "latin-1"),
    "form feed": (b"\x0c\n", "\n", "utf-8"),
    "separator": ("s = '\u2028'\n".encode(), "\n", "utf-8"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("end", [True, False])
def test_diff_applies_whatever_the_file_is_like(tmp_path, kind, end):
    head, newline, encoding = KINDS[kind]
    text = f"import torch  # größe{newline}{newline}y = torch.log(x){newline if end else ''}"
    path = tmp_path / "lm" / "train.py"
    path.parent.mkdir()
    path.write_bytes(head + text.encode(encoding))
    found = SourceFile.open(str(path))
    line = 3 + head.count(b"\n")
    node = found.node_at(site(line), lambda n: called_name(n) == "log")
    new = found.replaced([(argument(node), "x.clamp(min=1e-7)")])
    compile(new, "train.py", "exec")
    diff = addressed(found.diff(new), str(tmp_path))
    # Diffs are kept as text; a file in another encoding is patched in that one.
    (tmp_path / "change.diff").write_bytes(diff.encode(encoding))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "apply", "change.diff"], cwd=tmp_path, check=True)
    patched = text.replace("log(x)", "log(x.clamp(min=1e-7))")
    assert path.read_bytes() == head + patched.encode(encoding)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"def f(:\n", b"(" * 5000])
def test_what_is_no_python_is_no_file(tmp_path, content):
    path = tmp_path / "broken.py"
    path.write_bytes(content)
    assert SourceFile.open(str(path)) is None
    assert SourceFile.open(str(tmp_path / "absent.py")) is None
