"""What is done while a run goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from nanguard.cli.choices import OnBad, Spikes
from nanguard.cli.commands.app import app

RECOVERY = "With --recover"


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
    spikes: Annotated[
        Spikes,
        typer.Option(help="What to do about a loss or gradient norm far above the usual."),
    ] = Spikes.WARN,
    no_trace: Annotated[  # noqa: FBT002
        bool, typer.Option("--no-trace", help="Protect the run, and explain nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing of our own.")] = False,  # noqa: FBT002
    explain_seconds: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="How long explaining one incident may take; by default this follows the time "
            "the run took up to the step and the load of the machine.",
        ),
    ] = None,
    track: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACKER",
            help="Also write to tensorboard, wandb, trackio or mlflow; may be given several times.",
        ),
    ] = None,
    quarantine: Annotated[  # noqa: FBT002
        bool,
        typer.Option(
            "--quarantine",
            help="Leave samples that were found bad out of the loaders from then on, and list them "
            "in .nanguard/quarantine.jsonl.",
        ),
    ] = False,
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
        "spikes": spikes.value,
        "trace": not no_trace,
        "quiet": quiet,
        "explain_seconds": explain_seconds,
        "track": tuple(track or ()),
        "quarantine": quarantine,
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
    from nanguard.view.terminal.watched import Wanted

    wanted = Wanted(tuple(paths), wait=wait, once=once, total=steps, stall=stall, pid=pid)
    asked = Asked(on_alarm, cool_down, bell, until_alarm, plain, every)
    raise typer.Exit(run_watch(wanted, asked))
