"""``nanguard``: the commands and how they end.

Exit codes: 0 for a clean end, 1 for findings, 2 when nanguard could not do its work. ``run`` ends
with the code of the command, or with 3 when the guard stopped it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from nanguard import __version__
from nanguard.cli.checkwords import split
from nanguard.cli.choices import CheckFormat, Engine, FailOn, Format, OnBad, Precision
from nanguard.errors import MissingDependencyError
from nanguard.presets import FAMILIES, LEVELS, PRECISIONS, TASKS, Choice

RECOVERY = "With --recover"

app = typer.Typer(
    name="nanguard",
    help="Keeps a PyTorch run alive when its numbers go bad, and tells you why they did.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:  # noqa: FBT001 - typer's callback
    if wanted:
        typer.echo(f"nanguard {__version__}")
        raise typer.Exit


@app.callback()
def nanguard(
    version: Annotated[  # noqa: FBT002 - read by the callback
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Keeps a PyTorch run alive when its numbers go bad, and tells you why they did."""


@app.command(
    epilog="Examples:\n\n- `nanguard demo`\n\n- `nanguard demo --run-dir runs/demo --steps 600`"
)
def demo(
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the run record; .nanguard/demo/TIME by default."),
    ] = None,
    steps: Annotated[int, typer.Option(min=120, help="Steps to train.")] = 240,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print the verdict only.")] = False,  # noqa: FBT002
) -> None:
    """Train through faults, prove that none left a trace, and explain one.

    Needs no data and no GPU. A poisoned batch, a NaN gradient and a loss spike strike a run; the
    guard keeps them from the weights; at the end the weights are compared, bit by bit, with those
    of a run that never saw the faults. Then a script with a fault in it is run as it is, and the
    incident is explained. The exit code is 1 if the weights differ or no fix could be verified.
    """
    try:
        from nanguard.demo import run_demo
    except ModuleNotFoundError as error:
        raise MissingDependencyError.of("nanguard demo", error) from error
    identical = run_demo(run_dir=run_dir, steps=steps, quiet=quiet)
    raise typer.Exit(0 if identical else 1)


@app.command(
    context_settings={"ignore_unknown_options": True},
    epilog="Examples:\n\n- `nanguard run -- python train.py --lr 1e-3`\n\n"
    "- `nanguard run --on-bad stop -- torchrun --nproc-per-node 4 train.py`\n\n"
    "- `nanguard run --incidents runs/7 -- accelerate launch train.py`\n\n"
    "- `nanguard run --recover --checkpoints runs/7 --resume-arg '--resume {checkpoint}' "
    "--lr-arg '--lr {lr}' -- python train.py --lr 1e-3 --out runs/7`",
)
def run(
    command: Annotated[list[str], typer.Argument(help="The command, after two dashes.")],
    incidents: Annotated[
        Path | None,
        typer.Option(help="Folder for incidents; .nanguard/incidents/TIME by default."),
    ] = None,
    on_bad: Annotated[OnBad, typer.Option(help="What to do about a bad step.")] = OnBad.SKIP,
    max_bad: Annotated[
        int | None, typer.Option(min=0, help="Stop when there were more bad steps than this.")
    ] = None,
    no_trace: Annotated[  # noqa: FBT002
        bool, typer.Option("--no-trace", help="Protect the run, and explain nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing of our own.")] = False,  # noqa: FBT002
    track: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACKER",
            help="Also write to tensorboard, wandb, trackio or mlflow; may be given several times.",
        ),
    ] = None,
    recover: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--recover", help="Start it again from its last good checkpoint when it ends badly."
        ),
    ] = False,
    checkpoints: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|PATTERN",
            help="Where its checkpoints are; what it has written if not given.",
            rich_help_panel=RECOVERY,
        ),
    ] = None,
    resume_arg: Annotated[
        str | None,
        typer.Option(
            metavar="TEMPLATE",
            help="How it is told what to resume from: '--resume {checkpoint}'.",
            rich_help_panel=RECOVERY,
        ),
    ] = None,
    lr_arg: Annotated[
        str | None,
        typer.Option(
            metavar="TEMPLATE",
            help="How it is told the learning rate: '--lr {lr}'.",
            rich_help_panel=RECOVERY,
        ),
    ] = None,
    skip_arg: Annotated[
        str | None,
        typer.Option(
            metavar="TEMPLATE",
            help="How it is told to pass over data: '--skip-steps {skip}'.",
            rich_help_panel=RECOVERY,
        ),
    ] = None,
    seed_arg: Annotated[
        str | None,
        typer.Option(
            metavar="TEMPLATE",
            help="How it is told another seed: '--seed {seed}'.",
            rich_help_panel=RECOVERY,
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A configuration in the command, copied and changed for each attempt.",
            rich_help_panel=RECOVERY,
        ),
    ] = None,
    resume_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="The key there of the checkpoint.", rich_help_panel=RECOVERY
        ),
    ] = None,
    lr_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="The key there of the learning rate.", rich_help_panel=RECOVERY
        ),
    ] = None,
    skip_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY", help="The key there of the steps to skip.", rich_help_panel=RECOVERY
        ),
    ] = None,
    seed_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="The key there of the seed.", rich_help_panel=RECOVERY),
    ] = None,
    lr: Annotated[
        float | None,
        typer.Option(
            help="The learning rate it begins with, if the command does not say.",
            rich_help_panel=RECOVERY,
        ),
    ] = None,
    lr_cut: Annotated[
        float | None,
        typer.Option(
            help="What the learning rate is multiplied with after numbers have gone bad; "
            "0.5 by default.",
            rich_help_panel=RECOVERY,
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(
            min=0, help="How often it may be started again; 3 by default.", rich_help_panel=RECOVERY
        ),
    ] = None,
    backoff: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds before the first restart, doubled for each further one; 1 by default.",
            rich_help_panel=RECOVERY,
        ),
    ] = None,
) -> None:
    """Run a training command, unmodified, under the guard.

    A step whose loss or gradient is not finite is not made, and becomes an incident: a folder
    that says where the bad value came from, why, and what would repair it. The exit code is the
    command's own, or 3 when the guard stopped it.
    """
    from nanguard.cli.running import Asked, run_asked

    guarding = {
        "on_bad": on_bad.value,
        "max_bad": max_bad,
        "trace": not no_trace,
        "quiet": quiet,
        "track": tuple(track or ()),
    }
    asked = Asked(
        checkpoints=checkpoints,
        arguments={"resume": resume_arg, "lr": lr_arg, "skip": skip_arg, "seed": seed_arg},
        config=config,
        keys={"resume": resume_key, "lr": lr_key, "skip": skip_key, "seed": seed_key},
        lr=lr,
        lr_cut=lr_cut,
        max_restarts=max_restarts,
        backoff=backoff,
    )
    place = incidents or Path(".nanguard/incidents") / time.strftime("%Y%m%d-%H%M%S")
    raise typer.Exit(run_asked(command, place, asked, guarding, recover=recover))


@app.command(
    epilog="Examples:\n\n- `nanguard explain .nanguard/incidents/20261115-031500/step-000007-rank0`"
    "\n\n- `nanguard explain clip-before-unscale`\n\n- `nanguard explain division-by-zero`",
)
def explain(
    what: Annotated[str, typer.Argument(help="An incident's folder, a rule, or a cause.")],
    form: Annotated[Format, typer.Option("--format", help="How to answer.")] = Format.TEXT,
) -> None:
    """Say what happened in an incident, or what a rule or a cause stands for."""
    from nanguard.cli.explaining import explain_what

    explain_what(what, as_json=form is Format.JSON)


@app.command(
    epilog="Examples:\n\n- `nanguard replay runs/7/step-000007-rank0 --precision float64`\n\n"
    "- `nanguard replay runs/7/step-000007-rank0 --without-sample 3 --trace-all`",
)
def replay(
    incident: Annotated[Path, typer.Argument(help="The incident's folder.")],
    precision: Annotated[
        Precision | None, typer.Option(help="Compute everything in this type.")
    ] = None,
    without_sample: Annotated[
        list[int] | None, typer.Option(help="Replace this sample of the batch by a good one.")
    ] = None,
    trace_all: Annotated[  # noqa: FBT002
        bool, typer.Option("--trace-all", help="Show every operation of the step.")
    ] = False,
    explain_again: Annotated[  # noqa: FBT002
        bool, typer.Option("--explain", help="Find out the cause, and complete the incident.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, help="How long it may take.")] = 600.0,
    yes: Annotated[  # noqa: FBT002
        bool, typer.Option("--yes", help="Run the command even if somebody else made the incident.")
    ] = False,
    form: Annotated[Format, typer.Option("--format", help="How to answer.")] = Format.TEXT,
) -> None:
    """Run the step of an incident again, from its folder alone.

    The command of the run is started once more, with the same arguments in the same folder, and
    goes up to the step that was bad. It prints nothing and writes no file while it does. An
    incident that somebody else made is only replayed if you say so, as its command is run. The
    exit code is 1 if the step is bad again.
    """
    from nanguard.cli.explaining import replay_incident

    bad = replay_incident(
        incident,
        precision=None if precision is None else precision.value,
        without=tuple(without_sample or ()),
        table=trace_all,
        explain_again=explain_again,
        seconds=seconds,
        as_json=form is Format.JSON,
        sure=yes,
    )
    raise typer.Exit(1 if bad else 0)


@app.command(
    epilog="Examples:\n\n- `nanguard check .`\n\n- `nanguard check train.py configs/ --fix`\n\n"
    "- `nanguard check 'configs/**/*.yaml' --select CFG --fail-on warning`\n\n"
    "- `nanguard check data/train.jsonl --label-key label --classes 101`\n\n"
    "- `nanguard check runs/7 --watch`\n\n- `nanguard check - < train.py`",
)
def check(
    paths: Annotated[
        list[str],
        typer.Argument(help="Files, folders, patterns in quotes; - for standard input."),
    ],
    form: Annotated[CheckFormat, typer.Option("--format", help="How to answer.")] = (
        CheckFormat.TEXT
    ),
    select: Annotated[
        list[str] | None,
        typer.Option(
            help="Rules to run: names, codes, or SRC, CFG, DAT, CKP, LOG. May be repeated."
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
) -> None:
    """Look at training code, configurations, data, checkpoints and logs.

    They are told apart by what they hold; nothing in them is run. Folders are covered in one pass,
    and paths may be remote (`s3://...`). The exit code is 1 if there are findings, 2 if nothing
    could be checked. Settings are read from `nanguard.toml`, or from `[tool.nanguard]` in
    `pyproject.toml`.
    """
    from nanguard.cli.checking import Asked, run_check

    asked = Asked(
        tuple(paths),
        form.value,
        _words(select),
        _words(ignore),
        None if fail_on is None else fail_on.value,
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
    )
    raise typer.Exit(run_check(asked))


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


@app.command(
    epilog="Examples:\n\n- `nanguard report runs/night -o report.html`\n\n"
    "- `nanguard report train.log .nanguard/incidents/20261115-151552`\n\n"
    "- `nanguard report runs/a runs/b --png curves.png`",
)
def report(
    paths: Annotated[
        list[str],
        typer.Argument(help="Run folders, logs, incidents, and JSON reports of nanguard check."),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The page to write; report.html by default."),
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write a plain picture of the curves to this file.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="What the page is called.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing.")] = False,  # noqa: FBT002
) -> None:
    """Write one page about runs: curves, incidents, findings and a verdict.

    The page is a single file that opens offline and asks the network for nothing. Several runs are
    laid over each other or side by side.
    """
    from nanguard.cli.reporting import run_report

    run_report(paths, output=output, png=png, title=title, quiet=quiet)


@app.command(
    epilog="Examples:\n\n- `nanguard watch runs/7`\n\n- `nanguard watch train.log --wait --bell`"
    "\n\n- `nanguard watch runs/7 --until-alarm && echo quiet`\n\n"
    "- `nanguard watch train.log --on-alarm 'notify-send \"$NANGUARD_MESSAGE\"'`",
)
def watch(
    paths: Annotated[list[str], typer.Argument(help="Logs that are being written, run folders.")],
    on_alarm: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Run this on an alarm, which is in $NANGUARD_MESSAGE, $NANGUARD_ALARM, "
            "$NANGUARD_STEP, $NANGUARD_VALUE and $NANGUARD_PATH.",
        ),
    ] = None,
    cool_down: Annotated[
        float, typer.Option(min=0, help="Seconds before the same kind of alarm runs it again.")
    ] = 300.0,
    bell: Annotated[bool, typer.Option("--bell", help="Ring on an alarm.")] = False,  # noqa: FBT002
    until_alarm: Annotated[  # noqa: FBT002
        bool,
        typer.Option("--until-alarm", help="End with 1 on an alarm, with 0 when the run ends."),
    ] = False,
    once: Annotated[  # noqa: FBT002
        bool, typer.Option("--once", help="Read what is there, tell it, and end.")
    ] = False,
    wait: Annotated[  # noqa: FBT002
        bool, typer.Option("--wait", help="Wait for what is not there yet.")
    ] = False,
    plain: Annotated[  # noqa: FBT002
        bool, typer.Option("--plain", help="Print lines, also on a terminal.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.1, help="Seconds between two plain lines about a run.")
    ] = 10.0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="How many steps there will be, if no line says it.")
    ] = None,
    stall: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds without a new line that are an alarm; 0 for never. Learned by default.",
        ),
    ] = None,
    pid: Annotated[
        int | None, typer.Option(min=1, help="The process whose end is the end of the run.")
    ] = None,
) -> None:
    """Watch runs in the terminal: progress, curves, events, and an alarm when something turns.

    Files are followed as they grow, are replaced or emptied; several may be given. Where there is
    no terminal, plain lines are printed. Keys: q quits, l changes the scale, tab the run.
    """
    from nanguard.cli.following import Asked, run_watch
    from nanguard.terminal.watched import Wanted

    wanted = Wanted(tuple(paths), wait=wait, once=once, total=steps, stall=stall, pid=pid)
    asked = Asked(on_alarm, cool_down, bell, until_alarm, plain, every)
    raise typer.Exit(run_watch(wanted, asked))


@app.command(
    epilog="Examples:\n\n- `nanguard serve runs`\n\n- `nanguard serve runs --port 0 --open`\n\n"
    "- `nanguard serve runs --host 0.0.0.0`",
)
def serve(
    path: Annotated[Path, typer.Argument(help="A folder with runs below it.")],
    host: Annotated[
        str, typer.Option(help="The address to listen on; others than this machine need a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="The port; 0 for any that is free.")
    ] = 6116,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="NANGUARD_TOKEN",
            help="What has to be known to look; made up and printed where it is needed.",
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Another name by which this machine is asked. May be repeated."),
    ] = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open a browser.")] = False,  # noqa: FBT002
) -> None:
    """Show all runs below a folder, live, in a browser.

    An overview of all runs, and a page for each that updates as its files grow. Nothing is
    written. Ctrl-C ends it.
    """
    from nanguard.cli.serving import run_serve

    run_serve(path, host=host, port=port, token=token, names=allow_host or (), browser=open_browser)


def _words(given: list[str] | None) -> tuple[str, ...]:
    return tuple(word for one in given or () for word in split(one))
