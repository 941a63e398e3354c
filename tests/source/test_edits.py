"""Fixes as changes of a text."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from nanguard.findings import Edit, Fix
from nanguard.source.edits import apply, diff_of, fits, together, whole_diff
from nanguard.source.text import Text

if TYPE_CHECKING:
    from pathlib import Path


def test_edits_are_applied_in_any_order_and_the_same_one_once():
    edits = [Edit(4, 5, "E"), Edit(0, 1, "A"), Edit(0, 1, "A"), Edit(3, 3, "+")]
    assert apply("abcdef", edits) == "Abc+dEf"


def test_added_lines_end_as_the_others_do():
    assert apply("a\r\nb\r\n", [Edit(3, 3, "x\ny\r\n")]) == "a\r\nx\r\ny\r\nb\r\n"
    assert apply("a\nb\n", [Edit(2, 2, "x\n")]) == "a\nx\nb\n"


def test_what_does_not_fit_is_refused():
    assert not fits([], "abc")
    assert not fits([Edit(2, 9, "")], "abc")
    assert not fits([Edit(2, 1, "")], "abc")
    assert not fits([Edit(0, 2, ""), Edit(1, 3, "")], "abc")
    assert fits([Edit(0, 1, ""), Edit(1, 2, "")], "abc")


def test_the_first_of_two_that_clash_wins_and_equal_edits_are_shared():
    shared = Edit(0, 0, "import math\n")
    one = Fix("one", edits=(shared, Edit(3, 5, "x")))
    two = Fix("two", edits=(Edit(4, 6, "y"),))
    three = Fix("three", edits=(shared, Edit(7, 8, "z")))
    other = Fix("other", edits=(Edit(0, 0, "import os\n"),))
    assert [f.title for f in together([one, two, three, other], "0123456789")] == ["one", "three"]


def test_the_diff_of_an_edit_has_the_lines_of_the_file():
    content = "".join(f"line {n}\n" for n in range(1, 101))
    text = Text("a.py", content)
    at = text.offset(50, 0)
    assert diff_of("a.py", text, [Edit(at, at + 7, "new\nand more")]) == (
        "--- a.py\n+++ a.py\n@@ -47,7 +47,8 @@\n line 47\n line 48\n line 49\n-line 50\n"
        "+new\n+and more\n line 51\n line 52\n line 53\n"
    )
    assert diff_of("a.py", text, [Edit(0, 10_000, "")]) == ""


def test_a_missing_end_of_line_is_told():
    diff = diff_of("a", Text("a", "x\ny"), [Edit(2, 3, "z")])
    assert diff.endswith("-y\n\\ No newline at end of file\n+z\n\\ No newline at end of file\n")


lines = st.lists(st.sampled_from(["a", "b", "", "cc"]), min_size=1, max_size=40)


@settings(max_examples=200, deadline=None)
@given(
    lines,
    st.lists(
        st.tuples(st.integers(0, 60), st.integers(0, 5), st.sampled_from(["", "x", "y\n", "\n\n"])),
        max_size=4,
    ),
)
def test_diffs_say_what_the_edits_do(parts: list[str], changes: list[tuple[int, int, str]]):
    content = "\n".join(parts) + "\n"
    edits = [Edit(min(s, len(content)), min(s + n, len(content)), t) for s, n, t in changes]
    if not fits(edits, content):
        return
    after = apply(content, edits)
    mine = diff_of("f", Text("f", content), edits)
    assert (mine == "") == (after == content)
    assert _patched(content, mine) == after
    assert _patched(content, whole_diff("f", "f", content, after)) == after


def _patched(content: str, diff: str) -> str:
    """Applies a unified diff, by its line numbers alone."""
    old, out, at = content.splitlines(keepends=True), [], 0
    for line in diff.splitlines(keepends=True)[2:]:
        if line.startswith("@@"):
            first, _, count = line.split()[1][1:].partition(",")
            start = int(first) - (0 if count == "0" else 1)
            out += old[at:start]
            at = start
        elif line[0] == "+":
            out.append(line[1:])
        elif line[0] == "\\":
            out[-1] = out[-1].rstrip("\n")
        else:
            assert old[at].rstrip("\n") == line[1:].rstrip("\n")
            at += 1
            if line[0] == " ":
                out.append(old[at - 1])
    return "".join(out + old[at:])


def test_git_accepts_the_diff(tmp_path: Path):
    content = "".join(f"{n}\n" for n in range(40))
    (tmp_path / "f").write_text(content)
    text = Text("f", content)
    edits = [
        Edit(text.offset(3, 0), text.offset(4, 0), ""),
        Edit(text.offset(30, 0), text.offset(30, 0), "new\n"),
    ]
    diff = diff_of("f", text, edits)
    done = subprocess.run(
        ["git", "apply", "-p0", "-"],
        input=diff,
        text=True,
        cwd=tmp_path,
        check=False,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "f").read_text() == apply(content, edits)
