"""What is done before a run: look at everything, and begin with something stable."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import Annotated

import typer

from nanguard.advice.presets.choice import FAMILIES, LEVELS, PRECISIONS, Choice
from nanguard.advice.presets.tasks import TASKS
from nanguard.cli.checkwords import HERE, split
from nanguard.cli.choices import CheckFormat, Engine, FailOn
from nanguard.cli.commands.app import app


@app.command(
    epilog="Examples:\n\n- `nanguard check .`\n\n- `nanguard check train.py configs/ --fix`\n\n"
    "- `nanguard check 'configs/**/*.yaml' --select CFG --fail-on warning`\n\n"
    "- `nanguard check data/train.jsonl --label-key label --classes 101`\n\n"
    "- `nanguard check runs/7 --watch`\n\n- `nanguard check - < train.py`",
)
def check(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            help="Files, folders, patterns in quotes; - for standard input; this folder without."
        ),
    ] = None,
    form: Annotated[CheckFormat, typer.Option("--format", help="How to answer.")] = (
        CheckFormat.TEXT
    ),
    select: Annotated[
        list[str] | None,
        typer.Option(
            help="Rules to run: names, codes, or SRC, CFG, DAT, CKP, LOG. May be repeated."
        ),
    ] = None,
    extend: Annotated[
        list[str] | None,
        typer.Option(
            "--extend-select",
            help="Rules or groups to run besides the selected ones. May be repeated.",
        ),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Rules to leave out, likewise. May be repeated.")
    ] = None,
    fail_on: Annotated[
        FailOn | None,
        typer.Option(help="From which severity on the exit code is 1; error by default."),
    ] = None,
    fix: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--fix",
            help="Repair: Python files in place, where it keeps what they compute; a "
            "configuration as NAME_fixed.EXT beside it.",
        ),
    ] = False,
    unsafe: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--unsafe", help="With --fix: also what changes what Python files compute."),
    ] = False,
    diff: Annotated[  # noqa: FBT002
        bool, typer.Option("--diff", help="Show what --fix would change, and write nothing.")
    ] = False,
    baseline: Annotated[
        Path | None, typer.Option(help="Leave out the findings that this file knows.")
    ] = None,
    write_baseline: Annotated[
        Path | None, typer.Option(help="Write all findings to this file as known.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the report to this file.")
    ] = None,
    quiet: Annotated[  # noqa: FBT002
        bool, typer.Option("--quiet", help="One line for each finding, and nothing else.")
    ] = False,
    no_cache: Annotated[  # noqa: FBT002
        bool, typer.Option("--no-cache", help="Check files again that have not changed.")
    ] = False,
    jobs: Annotated[
        int, typer.Option(min=0, help="Processes to use; 0 for as many as there are processors.")
    ] = 0,
    checklist: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--checklist",
            help="Answer the prevention checklist point by point: yes, no or cannot tell.",
        ),
    ] = False,
    label_key: Annotated[
        str | None, typer.Option(help="The column, key or array that holds labels.")
    ] = None,
    classes: Annotated[int | None, typer.Option(min=1, help="How many classes there are.")] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=NAME:N,NAME:N",
            help="How many classes each data set has, and the key that names it in a record.",
        ),
    ] = None,
    vocab: Annotated[int | None, typer.Option(min=1, help="How many tokens there are.")] = None,
    ignore_label: Annotated[
        list[int] | None,
        typer.Option(help="A label that is meant to be skipped, besides -100. May be repeated."),
    ] = None,
    watch: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--watch", help="Audit each new checkpoint of a running job, until Ctrl-C."),
    ] = False,
    engine: Annotated[
        Engine, typer.Option(help="Scan files here, or as tasks of a Ray cluster.")
    ] = Engine.LOCAL,
    statistics: Annotated[  # noqa: FBT002
        bool, typer.Option("--statistics", help="Count findings by rule instead of listing them.")
    ] = False,
    verbose: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--verbose", "-v", help="Also list files of kinds that have no rules."),
    ] = False,
) -> None:
    """Look at training code, configurations, data, checkpoints and logs.

    They are told apart by what they hold; nothing in them is run. Folders are covered in one pass,
    and paths may be remote (`s3://...`). The exit code is 1 if there are findings, 2 if nothing
    could be checked. Settings are read from `nanguard.toml`, or from `[tool.nanguard]` in
    `pyproject.toml`.
    """
    from nanguard.cli.checking import Asked, run_check

    asked = Asked(
        tuple(paths or (HERE,)),
        form.value,
        _words(select),
        _words(ignore),
        None if fail_on is None else fail_on.value,
        extend=_words(extend),
        fix=fix,
        unsafe=unsafe,
        diff=diff,
        baseline=baseline,
        write_baseline=write_baseline,
        output=output,
        quiet=quiet,
        no_cache=no_cache,
        jobs=jobs,
        checklist=checklist,
        label_key=label_key,
        classes=classes,
        group=tuple(group or ()),
        vocab=vocab,
        ignore_label=tuple(ignore_label or ()),
        watch=watch,
        engine=engine.value,
        statistics=statistics,
        verbose=verbose,
    )
    raise typer.Exit(run_check(asked))


@app.command()
def lsp() -> None:
    """Show findings and quick fixes in an editor: a language server on standard input."""
    from nanguard.cli.editor import serve

    serve()


@app.command(
    epilog="Examples:\n\n- `nanguard preset --task diffusion > train.yaml`\n\n"
    "- `nanguard preset --family deepspeed --level balanced -o ds_config.json`\n\n"
    "- `nanguard preset --family launch -o launch/`",
)
def preset(
    family: Annotated[
        str,
        typer.Option(
            metavar="|".join(FAMILIES),
            help="Who reads it; launch is a script for several GPUs with its Accelerate file.",
        ),
    ] = "plain",
    level: Annotated[
        str, typer.Option(metavar="|".join(LEVELS), help="How careful it is.")
    ] = "safe",
    precision: Annotated[
        str,
        typer.Option(
            metavar="|".join(PRECISIONS),
            help="What is computed in; fp32 by default at level safe, bf16 at the others.",
            show_default=False,
        ),
    ] = "",
    task: Annotated[
        str, typer.Option(metavar="|".join(TASKS), help="What is trained.")
    ] = "classifier",
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="yaml|toml|json",
            help="The language, where the family has several.",
            show_default=False,
        ),
    ] = "",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Write to this file; to this folder for launch."),
    ] = None,
    force: Annotated[  # noqa: FBT002
        bool, typer.Option("--force", help="Replace files that are there.")
    ] = False,
) -> None:
    """Print a stable configuration to begin with.

    Every value has a comment: why it is so, and when to change it. JSON has no comments; what
    would be said goes to standard error, or with `--output` to a file beside it.
    """
    from nanguard.cli.presetting import run_preset

    run_preset(Choice(family, level, precision, task, form), output, force=force)


@app.command(epilog="Examples:\n\n- `nanguard rules`\n\n- `nanguard rules CFG`")
def rules(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Names, codes, groups, or SRC, CFG, DAT, CKP, LOG; all without."),
    ] = None,
) -> None:
    """List the rules of `nanguard check`, one line each.

    A rule that belongs to a group runs only if it is asked for: `--extend-select GROUP`.
    """
    from nanguard.cli.rulepages import listed

    typer.echo(listed(tuple(words or ())), nl=False)


def _words(given: list[str] | None) -> tuple[str, ...]:
    return tuple(word for one in given or () for word in split(one))
