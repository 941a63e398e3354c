"""The settings of a project."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.check.plugin import check, names, told

if TYPE_CHECKING:
    from pathlib import Path


def test_settings_are_found_above_the_first_path(tmp_path: Path, plugin: Path):
    (tmp_path / "pyproject.toml").write_text(
        "[tool.nanguard]\nignore = ['bad-word']\nfail-on = 'warning'\nexclude = ['/old/']\n"
        "[tool.nanguard.per-file-ignores]\n'tests/**' = ['TST']\n'conftest.py' = ['risky-word']\n"
    )
    for name in ("a/b.py", "a/conftest.py", "tests/deep/c.py", "old/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("BAD\nRISKY\n")
    done = check("--format", "json", tmp_path, cwd=tmp_path.parent, plugin=plugin)
    assert done.returncode == 1
    report = told(tmp_path / "a", cwd=tmp_path.parent, plugin=plugin)
    assert names(report) == [("risky-word", 2)]
    assert report["findings"][0]["path"] == str(tmp_path / "a/b.py")
    report = told(".", cwd=tmp_path, plugin=plugin)
    assert names(report) == [("risky-word", 2)]
    assert not any(path.startswith("old") for path in report["checked"])
    words = (".", "--select", "bad-word", "--fail-on", "error")
    assert check(*words, cwd=tmp_path, plugin=plugin).returncode == 0


def test_a_file_of_our_own_wins_and_others_are_overlooked(tmp_path: Path, plugin: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/x.py").write_text("BAD\nRISKY\n")
    (tmp_path / "a/pyproject.toml").write_text("[project]\nname = 'x'\n")
    (tmp_path / "pyproject.toml").write_text("[tool.nanguard]\nselect = ['bad-word']\n")
    assert names(told("a", cwd=tmp_path, plugin=plugin)) == [("bad-word", 1)]
    (tmp_path / "nanguard.toml").write_text("select = ['risky-word']\n")
    assert names(told("a", cwd=tmp_path, plugin=plugin)) == [("risky-word", 2)]


def test_the_baseline_of_the_settings_is_relative_to_them(tmp_path: Path, plugin: Path):
    (tmp_path / "nanguard.toml").write_text("baseline = 'known.json'\n")
    (tmp_path / "a.py").write_text("BAD\n")
    check("a.py", "--write-baseline", "known.json", cwd=tmp_path, plugin=plugin)
    assert names(told(tmp_path / "a.py", cwd=tmp_path.parent, plugin=plugin)) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("selekt = []", "there is no setting 'selekt'."),
        ("select = 'SRC'", "select has to be a list of words, not 'SRC'."),
        ("fail-on = 'never'", "fail-on has to be one of error, warning, info, none, not 'never'."),
        ("select = ['no-such-rule']", "there is no rule 'no-such-rule'."),
        ("per-file-ignores = 1", "per-file-ignores has to be a table, not 1."),
        ("baseline = 1", "baseline has to be the name of a file, not 1."),
        ("baseline = 'gone.json'", "the baseline cannot be read: No such file"),
        ("select = [", "the settings are not TOML"),
    ],
)
def test_settings_that_cannot_be_understood_are_exit_code_2(
    tmp_path: Path, content: str, says: str
):
    (tmp_path / "nanguard.toml").write_text(content)
    (tmp_path / "a.py").write_text("x = 1\n")
    done = check("a.py", cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
