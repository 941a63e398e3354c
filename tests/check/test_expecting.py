"""What data is expected to hold, by flags and by the settings of a project."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanguard.check.project_settings import expected_also, expected_by, find_project
from nanguard.check.scan import Expected
from nanguard.errors import SettingsError, UsageError


def test_groups_are_read_from_words():
    expected = expected_also(Expected(), groups=["dataset_name=food101:101, a:b:172"])
    assert expected.group_key == "dataset_name"
    assert expected.groups == {"food101": 101, "a:b": 172}
    twice = expected_also(expected, groups=["dataset_name=veg:200", "dataset_name=food101:5"])
    assert twice.groups == {"food101": 5, "a:b": 172, "veg": 200}
    other = expected_also(expected, groups=["source=x:3"])
    assert (other.group_key, other.groups) == ("source", {"x": 3})


@pytest.mark.parametrize(
    "words", ["", "key", "key=", "=a:1", "key=a", "key=a:0", "key=:1", "k=a:x"]
)
def test_what_is_no_group_is_refused(words: str):
    with pytest.raises(UsageError, match="is no group of data sets"):
        expected_also(Expected(), groups=[words])


def test_the_command_line_counts_more_than_the_settings():
    known = Expected("y", 5, vocabulary=100, ignored=(-100, -1))
    assert expected_also(known) == known
    told = expected_also(known, label_key="label", classes=7, vocab=9, ignored=[255, -1])
    assert told == Expected("label", 7, vocabulary=9, ignored=(-100, -1, 255))


def test_the_settings_of_a_project(tmp_path: Path):
    (tmp_path / "pyproject.toml").write_text(
        '[tool.nanguard.data]\nlabel-key = "y"\nclasses = 4\nvocab = 50\nignore-labels = [-1]\n'
        'group-key = "source"\ngroups = {a = 3}\n'
    )
    assert find_project(str(tmp_path)).expected == Expected(
        "y", 4, {"a": 3}, "source", 50, (-100, -1)
    )


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"clases": 3}, "there is no setting 'clases' of data"),
        ({"classes": True}, "data.classes has to be a whole number above 0, not True"),
        ({"vocab": "many"}, "data.vocab has to be a whole number above 0, not 'many'"),
        ({"label-key": 3}, "data.label-key has to be a word, not 3"),
        ({"groups": {"a": 0}, "group-key": "k"}, "data.groups has to be a table of numbers"),
        ({"groups": {"a": 3}}, "data.group-key has to be the key that names the data set"),
        ({"ignore-labels": [1.5]}, "data.ignore-labels has to be a list of whole numbers"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(table: dict[str, Any], says: str):
    with pytest.raises(SettingsError, match=says):
        expected_by(table, Path("nanguard.toml"))
