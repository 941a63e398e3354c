"""``--help``: a page that fits the terminal, on which nothing is lost."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from nanguard.cli.commands import app

COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def page(monkeypatch, *words: str, width: int = 100, colour: bool = False) -> str:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    done = CliRunner().invoke(app, [*words, "--help"], color=colour)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
@pytest.mark.parametrize("name", ["", *app.declared])
def test_boxes_are_as_wide_as_the_terminal_and_closed(monkeypatch, name: str, width: int):
    for line in page(monkeypatch, *name.split(), width=width).splitlines():
        if line[:1] in "╭│╰" and line:
            assert line[-1] in "╮│╯"
            assert len(line) == min(width, 110) or " " not in line[2:-2].strip()


@pytest.mark.parametrize("name", app.declared)
def test_every_option_with_its_help_and_every_example(monkeypatch, name: str):
    text = page(monkeypatch, name)
    flat = " ".join(re.sub("[╭╮╰╯│─•]", " ", text).split())
    command = app.declared[name]
    for param in command.params:
        for option in param.opts:
            assert option in flat
        assert " ".join((param.help or "").replace("`", "").split()) in flat
    for example in re.findall("`(nanguard [^`]+)`", command.epilog or ""):
        assert example in flat


def test_the_program_names_every_command_with_its_sentence(monkeypatch):
    text = page(monkeypatch)
    for name, sentence in app.declared.sentences().items():
        assert re.search(rf"│ {name} +{re.escape(sentence.split()[0])}", text)


def test_a_command_is_built_when_it_is_called(monkeypatch):
    monkeypatch.setattr(
        app, "declared", type(app.declared)(app.declared.functions, app.declared.options)
    )
    page(monkeypatch)
    assert not app.declared.built
    page(monkeypatch, "rules")
    assert list(app.declared.built) == ["rules"]


def test_default_range_and_variable_are_shown(monkeypatch):
    text = page(monkeypatch, "serve")
    assert "[default: 127.0.0.1]" in text
    assert "[default: 6116; 0<=x<=65535]" in text
    assert "[env var: NANGUARD_TOKEN]" in text


def test_options_of_recovery_have_a_box_of_their_own(monkeypatch):
    text = page(monkeypatch, "run")
    assert text.index("╭─ Options") < text.index("╭─ With --recover") < text.index("--resume-arg")


def test_colours_on_a_terminal_only(monkeypatch):
    coloured = page(monkeypatch, colour=True)
    assert "\x1b[1;36mcheck\x1b[0m" in coloured
    assert COLOUR.sub("", coloured) == page(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    done = CliRunner().invoke(app, ["--help"], color=True)
    assert "\x1b" not in done.output


def test_without_a_command_the_page_is_shown(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    done = CliRunner().invoke(app, [])
    assert done.exit_code in (0, 2)  # 2 since click 8.2
    assert "╭─ Commands" in done.output


def test_a_word_that_is_no_command_has_a_suggestion():
    done = CliRunner().invoke(app, ["chekc"])
    assert done.exit_code == 2
    assert "No such command 'chekc'. Did you mean 'check'?" in done.output


@pytest.mark.parametrize(
    ("words", "offered"),
    [("nanguard re", {"replay", "report"}), ("nanguard check --unsa", {"--unsafe"})],
)
def test_tab_completion(words: str, offered: set[str]):
    environment = {
        "_NANGUARD_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    done = CliRunner().invoke(app, [], env=environment, prog_name="nanguard")
    assert set(done.output.split()) == offered
