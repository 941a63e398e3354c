"""Comments that allow a finding."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from nanguard.check.selection import ignores_in
from nanguard.source.text import Text
from tests.check.plugin import check, names, told

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("code", "left"),
    [
        ("BAD  # nanguard: ignore[bad-word] it is meant\n", []),
        ("BAD  # nanguard: ignore[TST001]\n", []),
        ("BAD + RISKY  # nanguard: ignore[bad-word, risky-word] both\n", []),
        ("BAD  #nanguard:ignore[TST]\n", []),
        ("# nanguard: ignore[bad-word] the line below\nBAD\n", []),
        ("# nanguard: ignore[bad-word]\n# and more to say\nBAD\n", []),
        ("f(  # nanguard: ignore[bad-word] the whole statement\n    1,\n    BAD,\n)\n", []),
        ("f(\n    1,\n    BAD,  # nanguard: ignore[bad-word]\n)\n", []),
        ("# nanguard: ignore-file[bad-word] all of it\nBAD\nBAD\n", []),
        ("x = 1\nBAD\n# nanguard: ignore-file[bad-word] at the end\n", []),
        (
            "if x:  # nanguard: ignore[risky-word]\n    RISKY\n",
            [("unused-ignore", 1), ("risky-word", 2)],
        ),
        ("BAD  # nanguard: ignore[risky-word]\n", [("bad-word", 1), ("unused-ignore", 1)]),
        ("BAD  # nanguard: ignore\n", [("bad-word", 1), ("unused-ignore", 1)]),
        ("BAD  # nanguard: ignore[no-such-rule]\n", [("bad-word", 1), ("unused-ignore", 1)]),
        ('s = "# nanguard: ignore[bad-word]"; BAD\n', [("bad-word", 1)]),
        ('"""\n# nanguard: ignore-file[bad-word]\n"""\nBAD\n', [("bad-word", 4)]),
        ("BAD  # nanguard: ignored[bad-word]\n", [("bad-word", 1)]),
    ],
)
def test_ignores(tmp_path: Path, plugin: Path, code: str, left: list[tuple[str, int]]):
    (tmp_path / "a.py").write_text(code)
    report = told("a.py", cwd=tmp_path, plugin=plugin)
    assert names(report) == left
    assert report["suppressed"] > 0 or left


def test_an_ignore_is_unused_only_if_its_rule_looked(tmp_path: Path, plugin: Path):
    (tmp_path / "a.py").write_text("x = 1  # nanguard: ignore[bad-word] old\n")
    assert names(told("a.py", cwd=tmp_path, plugin=plugin)) == [("unused-ignore", 1)]
    for words in (["--select", "risky-word,unused-ignore"], ["--ignore", "unused-ignore"]):
        assert names(told("a.py", *words, cwd=tmp_path, plugin=plugin)) == []
    (tmp_path / "b.py").write_text("CRASH  # nanguard: ignore[crashing-rule]\n")
    done = check("--format", "json", "b.py", cwd=tmp_path, plugin=plugin)
    assert names(json.loads(done.stdout)) == []  # a check that is not whole says so at its end


def spans(content: str) -> list[tuple[int, tuple[str, ...], int, int]]:
    ignores = ignores_in(Text("c.yaml", content), python=False)
    return [(i.line, i.words, i.first, i.last) for i in ignores]


def test_comments_of_yaml_and_toml():
    assert spans("lr: 1  # nanguard: ignore[a] why\n") == [(1, ("a",), 1, 1)]
    assert spans("# nanguard: ignore[a, b]\n# more\nlr: 1\n") == [(1, ("a", "b"), 1, 3)]
    assert spans("x: '# nanguard: ignore[a]'\n") == []
    assert spans('x: "it is \\" # nanguard: ignore[a]"\n') == []
    assert spans("x: y# nanguard: ignore[a]\n") == []
    assert spans("x: |\n  # nanguard: ignore[a]\ny: 1  # nanguard: ignore[b]\n") == [
        (3, ("b",), 3, 3)
    ]
    ((line, words, first, last),) = spans("lr = 1\n# nanguard: ignore-file[a]\n")
    assert (line, words) == (2, ("a",))
    assert first <= 1 < 1000 <= last
