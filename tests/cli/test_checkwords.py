"""The command line of ``nanguard check``, read with and without typer."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from nanguard.cli.checking import Asked
from nanguard.cli.checkwords import ENGINES, FAIL_ON, FLAGS, FORMATS, VALUES, asked_by
from nanguard.cli.choices import CheckFormat, Engine, FailOn
from nanguard.cli.commands.before import check


def test_both_know_the_same_options():
    parameters = inspect.signature(check).parameters
    quick = {*FLAGS.values(), *VALUES.values(), "paths"}
    assert set(parameters) == quick
    assert set(Asked.__dataclass_fields__) == quick
    assert tuple(form.value for form in CheckFormat) == FORMATS
    assert tuple(level.value for level in FailOn) == FAIL_ON
    assert tuple(engine.value for engine in Engine) == ENGINES


def test_plain_words_are_understood():
    asked = asked_by(
        ["a.py", "--select=SRC, CFG001", "--select", "x", "-o", "out", "--fix", "-", "--jobs", "3"]
    )
    assert asked == Asked(
        ("a.py", "-"), select=("SRC", "CFG001", "x"), output=Path("out"), fix=True, jobs=3
    )
    assert asked_by(["a", "--format", "json", "--fail-on", "none"]) == Asked(
        ("a",), form="json", fail_on="none"
    )
    data = ["a", "--label-key", "y", "--classes=10", "--vocab", "32000", "--group", "d=x:1,y:2"]
    assert asked_by([*data, "--ignore-label", "-1", "--ignore-label=255", "--watch"]) == Asked(
        ("a",),
        label_key="y",
        classes=10,
        vocab=32000,
        group=("d=x:1,y:2",),
        ignore_label=(-1, 255),
        watch=True,
    )
    assert asked_by(["a", "--engine", "ray"]) == Asked(("a",), engine="ray")


@pytest.mark.parametrize(
    "words",
    [
        ["--help"],
        ["a", "--help"],
        ["a", "--no-such-option"],
        ["a", "--format"],
        ["a", "--format", "xml"],
        ["a", "--fail-on", "never"],
        ["a", "--jobs", "many"],
        ["a", "--jobs", "-1"],
        ["a", "--classes", "0"],
        ["a", "--vocab", "many"],
        ["a", "--ignore-label", "x"],
        ["a", "--label-key"],
        ["a", "--engine", "spark"],
        ["a", "--", "b"],
    ],
)
def test_everything_else_is_left_to_typer(words: list[str]):
    assert asked_by(words) is None


@pytest.mark.parametrize("words", [[], ["--fix"]])
def test_no_path_means_this_folder(words: list[str]):
    asked = asked_by(words)
    assert asked is not None
    assert asked.paths == (".",)
    assert asked.fix == ("--fix" in words)
