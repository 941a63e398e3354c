"""The command line: reading it, its help, its mistakes, and completing it in a shell."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from nanguard.cli.command_line import CommandLineError, read
from nanguard.cli.commands import BY_NAME, COMMANDS
from nanguard.cli.commands.before import CheckOptions
from nanguard.cli.entry import run
from nanguard.cli.help_pages import command_help, program_help, reference, script
from nanguard.errors import UsageError

ROOT = Path(__file__).parents[2]
CHECK = BY_NAME["check"]


def test_options_and_paths_are_read_in_any_order():
    words = "a.py --select=SRC,CFG001 --select x -o out --fix - --jobs 3 -qv --classes=10"
    assert read(CHECK, words.split()) == CheckOptions(
        ("a.py", "-"),
        select=("SRC", "CFG001", "x"),
        output=Path("out"),
        fix=True,
        jobs=3,
        quiet=True,
        verbose=True,
        classes=10,
    )


def test_short_forms_negative_numbers_and_two_dashes():
    words = ["--ignore-label", "-1", "--ignore-label=255", "-oreport.txt", "--", "--fix"]
    assert read(CHECK, words) == CheckOptions(
        ("--fix",), ignore_label=(-1, 255), output=Path("report.txt")
    )


@pytest.mark.parametrize("words", [[], ["--fix"]])
def test_no_path_means_this_folder(words: list[str]):
    options = read(CHECK, words)
    assert options.paths == (".",)
    assert options.fix == ("--fix" in words)


@pytest.mark.parametrize(
    ("words", "what", "do"),
    [
        ("--fixx", "there is no option --fixx.", "Did you mean --fix?"),
        ("-z", "there is no option -z.", "nanguard check -h lists the options."),
        ("--format", "--format needs a value.", "Write --format FORMAT. Output format."),
        ("--output --fix", "--output needs a value.", "Write --output FILE."),
        ("--format jsn", "--format cannot be 'jsn'.", "Did you mean json? Give one of: text,"),
        ("--jobs many", "--jobs cannot be 'many'.", "Give a whole number of at least 0."),
        ("--jobs=-1", "--jobs cannot be -1.", "Give a whole number of at least 0."),
        ("--classes 0", "--classes cannot be 0.", "Give a whole number of at least 1."),
        ("--fix=yes", "--fix takes no value.", "Write --fix alone."),
        ("--label-key=", "--label-key is empty.", "Give NAME."),
        ("-qz", "there is no option -qz.", ""),
    ],
)
def test_a_mistake_says_what_was_meant(words: str, what: str, do: str):
    with pytest.raises(CommandLineError) as raised:
        read(CHECK, words.split())
    assert raised.value.what == what
    assert do in raised.value.do


def test_the_words_behind_the_command_of_run_are_its_own():
    options = read(BY_NAME["run"], ["-q", "python", "train.py", "-h", "--quiet", "--", "x"])
    assert options.quiet
    assert options.command == ("python", "train.py", "-h", "--quiet", "--", "x")
    template = ["--resume-arg", "--resume {checkpoint}", "--", "python", "t.py"]
    assert read(BY_NAME["run"], template).resume_arg == "--resume {checkpoint}"


def test_an_option_can_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NANGUARD_TOKEN", "from-outside")
    assert read(BY_NAME["serve"], []).token == "from-outside"
    assert read(BY_NAME["serve"], ["--token", "given"]).token == "given"


def test_one_word_too_many_and_one_that_is_missing():
    with pytest.raises(CommandLineError, match=r"'b' is one word too many"):
        read(BY_NAME["fix"], ["a", "b"])
    with pytest.raises(CommandLineError, match="SHELL is missing"):
        read(BY_NAME["completion"], [])
    with pytest.raises(CommandLineError, match="'x' means nothing here"):
        read(BY_NAME["lsp"], ["x"])


@pytest.mark.parametrize(
    ("words", "what", "do"),
    [
        (["chek"], "there is no command 'chek'.", "Did you mean check?"),
        (["--versoin"], "there is no option '--versoin'.", "Did you mean --version?"),
        (["zzz"], "there is no command 'zzz'.", "The commands are: check, run, explain, fix,"),
    ],
)
def test_a_command_that_there_is_not(words: list[str], what: str, do: str):
    with pytest.raises(UsageError) as raised:
        run(words)
    assert raised.value.what == what
    assert do in raised.value.do


@pytest.mark.parametrize("words", [["--select", "clip-befor-unscale"], ["--ignore", "SRC9x"]])
def test_a_rule_that_there_is_not(words: list[str], tmp_path: Path):
    with pytest.raises(UsageError.__mro__[1]) as raised:
        run(["check", str(tmp_path), *words])
    assert words[1] in str(raised.value)
    assert ("Did you mean clip-before-unscale?" in str(raised.value)) == (words[1][0] == "c")


def test_help_lists_check_run_and_explain_first():
    page = program_help(COMMANDS)
    names = [line.split()[0] for line in page.splitlines() if line.startswith("  ")]
    assert names[:3] == ["check", "run", "explain"]
    assert set(BY_NAME) <= set(names)


@pytest.mark.parametrize("words", [["-h"], ["--help"], ["help"], []])
def test_every_way_to_ask_for_help(words: list[str], capsys: pytest.CaptureFixture[str]):
    assert run(words) == 0
    assert capsys.readouterr().out.startswith("Usage: nanguard COMMAND")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_help_of_a_command(command, capsys: pytest.CaptureFixture[str]):
    assert run([command.name, "-h"]) == 0
    shown = capsys.readouterr().out
    assert shown == command_help(command)
    assert "<" not in shown.replace("check - < train.py", "")
    flat = " ".join(shown.split())
    for one in command.declared():
        assert all(name in shown for name in one.words.names)
        assert one.words.help in flat
        assert one.words.help.endswith((".", "'."))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_the_examples_of_a_command_can_be_read(command):
    for example in command.examples:
        line = example.split(" > ")[0].split(" < ")[0].split(" && ")[0]
        words = shlex.split(line.replace('eval "$(', "").replace(')"', ""))
        assert words[:2] == ["nanguard", command.name]
        assert read(command, words[2:]) is not None


@pytest.mark.parametrize("words", [["-V"], ["--version"]])
def test_version(words: list[str], capsys: pytest.CaptureFixture[str]):
    from nanguard import __version__

    assert run(words) == 0
    assert capsys.readouterr().out == f"nanguard {__version__}\n"


def test_the_page_of_the_documentation_is_current():
    page = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    assert page == reference(COMMANDS), "run make docs-cli"


def completed(line: str, folder: Path) -> list[str]:
    """Returns what bash completes at the end of a line."""
    words = line.split(" ")
    program = (
        f"{script('bash')}\nCOMP_WORDS=({' '.join(map(shlex.quote, words))})\n"
        f"COMP_CWORD={len(words) - 1}\n_nanguard\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, cwd=folder, check=True
    )
    return done.stdout.split()


def test_bash_completes_commands_options_values_and_steps(tmp_path: Path):
    (tmp_path / ".nanguard/incidents/20261116-101010/step-000116-rank0").mkdir(parents=True)
    (tmp_path / "configs").mkdir()
    (tmp_path / "train.py").touch()
    assert completed("nanguard re", tmp_path) == ["report", "replay"]
    assert completed("nanguard check --fi", tmp_path) == ["--fix"]
    assert completed("nanguard check --format s", tmp_path) == ["sarif"]
    assert completed("nanguard check --select clip-b", tmp_path) == ["clip-before-unscale"]
    assert completed("nanguard check t", tmp_path) == ["train.py"]
    assert completed("nanguard serve c", tmp_path) == ["configs"]
    assert completed("nanguard explain 1", tmp_path) == ["116"]
    assert "division-by-zero" in completed("nanguard explain div", tmp_path)


def test_the_scripts_of_other_shells_hold_every_command_and_option():
    assert script("zsh").startswith("autoload -U +X bashcompinit && bashcompinit\n_nanguard() {")
    fish = script("fish")
    for command in COMMANDS:
        assert f"-a {command.name} " in fish
        for one in command.named():
            assert f"-l {one.words.names[0][2:]}" in fish


@pytest.mark.skipif(os.name != "posix", reason="the shells are those of POSIX systems")
def test_bash_reads_the_script_without_a_word():
    done = subprocess.run(["bash", "-n"], input=script("bash"), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
