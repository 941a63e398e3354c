"""Commands before a run: checks, presets, rules, the editor; and those about nanguard itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nanguard.cli.command_line import argument, flag, option

HERE = "."  # what is meant where no path is named
DATA = "About data"
SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """Look at training code, configurations, data, checkpoints and logs.

    They are recognised by what they hold; nothing in them is run. Folders are covered in one pass,
    and paths may be remote (`s3://...`). The exit code is 1 if there are findings, 2 if nothing
    could be checked. Settings are read from `nanguard.toml`, or from `[tool.nanguard]` in
    `pyproject.toml`.
    """

    paths: tuple[str, ...] = argument(
        "PATH",
        "Files, folders, patterns in quotes; - for standard input. This folder by default.",
        many=True,
        default=(HERE,),
        completes="files",
    )
    form: str = option(
        "--format",
        metavar="FORMAT",
        default="text",
        choices=("text", "full", "concise", "json", "sarif", "github"),
        help="Output format.",
    )
    select: tuple[str, ...] = option(
        "--select",
        metavar="RULE",
        many=True,
        commas=True,
        completes="rules",
        help="Rules to run: names, codes, or SRC, CFG, DAT, CKP, LOG.",
    )
    extend: tuple[str, ...] = option(
        "--extend-select",
        metavar="RULE",
        many=True,
        commas=True,
        completes="rules",
        help="Rules or groups to run besides the selected ones.",
    )
    ignore: tuple[str, ...] = option(
        "--ignore",
        metavar="RULE",
        many=True,
        commas=True,
        completes="rules",
        help="Rules to leave out.",
    )
    fail_on: str | None = option(
        "--fail-on",
        metavar="SEVERITY",
        choices=("error", "warning", "info", "none"),
        help="From which severity on the exit code is 1; error by default.",
    )
    fix: bool = flag(
        "--fix",
        help="Repair: Python files in place, where it keeps what they compute; a configuration as "
        "NAME_fixed.EXT beside it.",
    )
    unsafe: bool = flag(
        "--unsafe", help="With --fix: also repairs that change what Python files compute."
    )
    diff: bool = flag("--diff", help="Show what --fix would change, and write nothing.")
    baseline: Path | None = option(
        "--baseline",
        metavar="FILE",
        kind=Path,
        completes="files",
        help="Leave out the findings that this file knows.",
    )
    write_baseline: Path | None = option(
        "--write-baseline",
        metavar="FILE",
        kind=Path,
        completes="files",
        help="Write all findings to this file as known.",
    )
    output: Path | None = option(
        "--output",
        "-o",
        metavar="FILE",
        kind=Path,
        completes="files",
        help="Write the report to this file.",
    )
    quiet: bool = flag("--quiet", "-q", help="One line for each finding, and nothing else.")
    no_cache: bool = flag("--no-cache", help="Check files again that have not changed.")
    jobs: int = option(
        "--jobs",
        "-j",
        metavar="N",
        kind=int,
        least=0,
        default=0,
        help="Processes to use; 0 for as many as there are processors.",
    )
    checklist: bool = flag(
        "--checklist",
        help="Answer the prevention checklist point by point: yes, no or cannot tell.",
    )
    label_key: str | None = option(
        "--label-key",
        metavar="NAME",
        panel=DATA,
        help="The column, key or array that holds labels.",
    )
    classes: int | None = option(
        "--classes", metavar="N", kind=int, least=1, panel=DATA, help="The number of classes."
    )
    group: tuple[str, ...] = option(
        "--group",
        metavar="KEY=NAME:N,NAME:N",
        many=True,
        panel=DATA,
        help="The number of classes of each data set, and the key that names it in a record.",
    )
    vocab: int | None = option(
        "--vocab", metavar="N", kind=int, least=1, panel=DATA, help="The number of tokens."
    )
    ignore_label: tuple[int, ...] = option(
        "--ignore-label",
        metavar="LABEL",
        kind=int,
        many=True,
        panel=DATA,
        help="A label that is meant to be skipped, besides -100.",
    )
    watch: bool = flag("--watch", help="Audit each new checkpoint of a running job, until Ctrl-C.")
    engine: str = option(
        "--engine",
        metavar="ENGINE",
        default="local",
        choices=("local", "ray"),
        help="Scan files here, or as tasks of a Ray cluster.",
    )
    statistics: bool = flag("--statistics", help="Count findings by rule instead of listing them.")
    verbose: bool = flag("--verbose", "-v", help="Also list files of kinds that have no rules.")


@dataclass(frozen=True, slots=True)
class LspOptions:
    """Show findings and quick fixes in an editor: a language server on standard input."""


def _presets(name: str) -> tuple[str, ...]:
    from nanguard.advice import presets

    return tuple(one for one in getattr(presets, name) if one)


@dataclass(frozen=True, slots=True)
class PresetOptions:
    """Print a stable configuration to begin with.

    Every value has a comment: why it is so, and when to change it. JSON has no comments; what
    would be said goes to standard error, or with `--output` to a file beside it.
    """

    family: str = option(
        "--family",
        metavar="FAMILY",
        default="plain",
        choices=lambda: _presets("FAMILIES"),
        help="Who reads it; launch is a script for several GPUs with its Accelerate file.",
    )
    level: str = option(
        "--level",
        metavar="LEVEL",
        default="safe",
        choices=lambda: _presets("LEVELS"),
        help="How careful it is.",
    )
    precision: str = option(
        "--precision",
        metavar="TYPE",
        default="",
        choices=lambda: _presets("PRECISIONS"),
        help="What it computes in; fp32 by default at level safe, bf16 at the others.",
    )
    task: str = option(
        "--task",
        metavar="TASK",
        default="classifier",
        choices=lambda: _presets("TASKS"),
        help="What is trained.",
    )
    form: str = option(
        "--format",
        metavar="FORMAT",
        default="",
        choices=("yaml", "toml", "json"),
        help="The language, where the family has several.",
    )
    output: Path | None = option(
        "--output",
        "-o",
        metavar="FILE",
        kind=Path,
        completes="files",
        help="Write to this file; to this folder for launch.",
    )
    force: bool = flag("--force", help="Replace files that are there.")


@dataclass(frozen=True, slots=True)
class RulesOptions:
    """List the rules of `nanguard check`, one line each.

    A rule that belongs to a group runs only if it is selected: `--extend-select GROUP`.
    """

    words: tuple[str, ...] = argument(
        "RULE",
        "Names, codes, groups, or SRC, CFG, DAT, CKP, LOG. All rules by default.",
        many=True,
        default=(),
        completes="rules",
    )


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Train through faults, prove that none left a trace, and explain one.

    Needs no data and no GPU. A poisoned batch, a NaN gradient and a loss spike strike a run; the
    guard keeps them from the weights; at the end the weights are compared, bit by bit, with those
    of a run that never saw the faults. Then a script with a fault in it is run as it is, and the
    incident is explained. The exit code is 1 if the weights differ or no fix could be verified.
    """

    run_dir: Path | None = option(
        "--run-dir",
        metavar="DIR",
        kind=Path,
        completes="folders",
        help="Folder for the run record; .nanguard/demo/TIME by default.",
    )
    steps: int = option(
        "--steps", metavar="N", kind=int, least=120, default=240, help="Steps to train."
    )
    quiet: bool = flag("--quiet", "-q", help="Print the verdict only.")


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    """Say what nanguard can do here, and how to get what is missing.

    Versions and devices, what `nanguard run` can do with the Python that trains, where it can
    write, and which extras are installed. The exit code is 1 if something keeps `run` from working.
    """

    python: str | None = option(
        "--python",
        metavar="PYTHON",
        completes="files",
        help="The Python that trains; this one if it has torch, else the one on the PATH.",
    )
    form: str = option(
        "--format",
        metavar="FORMAT",
        default="text",
        choices=("text", "json"),
        help="Output format.",
    )


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """Print a script that completes commands, options and rules in a shell.

    For bash, put `eval "$(nanguard completion bash)"` into `~/.bashrc`; for zsh, the same with zsh
    into `~/.zshrc`; fish reads it from `~/.config/fish/completions/nanguard.fish`.
    """

    shell: str = argument("SHELL", "The shell.", choices=SHELLS)
