"""What is done while a run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nanguard.cli.command_line import argument, flag, option

RECOVERY = "With --recover"
TARGETS = (
    "a Slack, Discord, Teams or ntfy webhook, ntfy:TOPIC, mailto:ADDRESS, a command, or env:NAME "
    "and file:PATH that hold one of these."
)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Run a training command, unmodified, under the guard.

    A step whose loss or gradient is not finite is skipped, and becomes an incident: a folder that
    says where the bad value came from, why, and what would repair it. The exit code is the
    command's own, or 3 when the guard stopped it.
    """

    command: tuple[str, ...] = argument(
        "COMMAND",
        "The command with its arguments, after two dashes.",
        many=True,
        rest=True,
        default=(),
    )
    incidents: Path | None = option(
        "--incidents",
        metavar="DIR",
        kind=Path,
        completes="folders",
        help="Folder for incidents; the run's folder by default.",
    )
    run_dir: Path | None = option(
        "--run-dir",
        metavar="DIR",
        kind=Path,
        completes="folders",
        help="Folder of the run, for its command, metrics, events and incidents; "
        ".nanguard/runs/TIME-NAME by default.",
    )
    no_batch: bool = flag(
        "--no-batch", help="Keep no batch of training data in incidents, which is kept otherwise."
    )
    on_bad: str = option(
        "--on-bad",
        metavar="ACTION",
        default="skip",
        choices=("skip", "rollback", "stop"),
        help="What to do about a bad step.",
    )
    max_bad: int | None = option(
        "--max-bad",
        metavar="N",
        kind=int,
        least=0,
        help="Stop when there were more bad steps than this.",
    )
    spikes: str = option(
        "--spikes",
        metavar="ACTION",
        default="warn",
        choices=("act", "warn", "off"),
        help="What to do about a loss or gradient norm far above the usual.",
    )
    no_trace: bool = flag("--no-trace", help="Protect the run, and explain nothing.")
    quiet: bool = flag("--quiet", "-q", help="Print only what the command prints.")
    explain_seconds: float | None = option(
        "--explain-seconds",
        metavar="SECONDS",
        kind=float,
        least=1,
        help="How long explaining one incident may take; by default this follows the time the run "
        "took up to the step and the load of the machine.",
    )
    track: tuple[str, ...] = option(
        "--track",
        metavar="TRACKER",
        many=True,
        commas=True,
        choices=("tensorboard", "wandb", "trackio", "mlflow"),
        help="Also write the run to a tracker.",
    )
    notify: tuple[str, ...] = option(
        "--notify",
        metavar="TARGET",
        many=True,
        env="NANGUARD_NOTIFY",
        help=f"Tell somebody of incidents and of a bad end: {TARGETS}",
    )
    quarantine: bool = flag(
        "--quarantine",
        help="Leave samples that were found bad out of the loaders from then on, and list them in "
        ".nanguard/quarantine.jsonl.",
    )
    recover: bool = flag(
        "--recover", help="Start it again from its last good checkpoint when it ends badly."
    )
    checkpoints: str | None = option(
        "--checkpoints",
        metavar="WHERE",
        panel=RECOVERY,
        help="The folder or pattern of its checkpoints; what it has written if not given.",
    )
    resume_arg: str | None = option(
        "--resume-arg",
        metavar="TEMPLATE",
        panel=RECOVERY,
        help="The argument that names the checkpoint to resume from: '--resume {checkpoint}'.",
    )
    lr_arg: str | None = option(
        "--lr-arg",
        metavar="TEMPLATE",
        panel=RECOVERY,
        help="The argument for the learning rate: '--lr {lr}'.",
    )
    skip_arg: str | None = option(
        "--skip-arg",
        metavar="TEMPLATE",
        panel=RECOVERY,
        help="The argument for the steps to skip: '--skip-steps {skip}'.",
    )
    seed_arg: str | None = option(
        "--seed-arg",
        metavar="TEMPLATE",
        panel=RECOVERY,
        help="The argument for another seed: '--seed {seed}'.",
    )
    config: str | None = option(
        "--config",
        metavar="FILE",
        panel=RECOVERY,
        completes="files",
        help="A configuration in the command, copied and changed for each attempt.",
    )
    resume_key: str | None = option(
        "--resume-key", metavar="KEY", panel=RECOVERY, help="Its key for the checkpoint."
    )
    lr_key: str | None = option(
        "--lr-key", metavar="KEY", panel=RECOVERY, help="Its key for the learning rate."
    )
    skip_key: str | None = option(
        "--skip-key", metavar="KEY", panel=RECOVERY, help="Its key for the steps to skip."
    )
    seed_key: str | None = option(
        "--seed-key", metavar="KEY", panel=RECOVERY, help="Its key for the seed."
    )
    lr: float | None = option(
        "--lr",
        metavar="RATE",
        kind=float,
        panel=RECOVERY,
        help="The learning rate of the first attempt, if the command does not say.",
    )
    lr_cut: float | None = option(
        "--lr-cut",
        metavar="FACTOR",
        kind=float,
        panel=RECOVERY,
        help="The factor on the learning rate after numbers have gone bad; 0.5 by default.",
    )
    max_restarts: int | None = option(
        "--max-restarts",
        metavar="N",
        kind=int,
        least=0,
        panel=RECOVERY,
        help="How often it may be started again; 3 by default.",
    )
    backoff: float | None = option(
        "--backoff",
        metavar="SECONDS",
        kind=float,
        least=0,
        panel=RECOVERY,
        help="Seconds before the first restart, doubled for each further one; 1 by default.",
    )


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """Watch runs in the terminal: progress, curves, events, and an alarm when something turns.

    Files are followed as they grow, are replaced or emptied; several may be given. Where there is
    no terminal, plain lines are printed. Keys: q quits, l changes the scale, tab the run.
    """

    paths: tuple[str, ...] = argument(
        "PATH",
        "Logs that are being written, run folders. The newest run of this folder by default.",
        many=True,
        default=(),
        completes="files",
    )
    notify: tuple[str, ...] = option(
        "--notify",
        metavar="TARGET",
        many=True,
        env="NANGUARD_NOTIFY",
        help=f"Tell somebody of an alarm: {TARGETS}",
    )
    cool_down: float = option(
        "--cool-down",
        metavar="SECONDS",
        kind=float,
        least=0,
        default=300.0,
        help="Seconds before the same kind of alarm is sent again.",
    )
    bell: bool = flag("--bell", help="Ring on an alarm.")
    until_alarm: bool = flag("--until-alarm", help="End with 1 on an alarm, 0 when the run ends.")
    once: bool = flag("--once", help="Read what is there, report it, and end.")
    wait: bool = flag("--wait", help="Wait for files that do not exist yet.")
    plain: bool = flag("--plain", help="Print lines, also on a terminal.")
    every: float = option(
        "--every",
        metavar="SECONDS",
        kind=float,
        least=0.1,
        default=10.0,
        help="Seconds between two plain lines about a run.",
    )
    steps: int | None = option(
        "--steps",
        metavar="N",
        kind=int,
        least=1,
        help="The number of steps of the run, if no line says it.",
    )
    stall: float | None = option(
        "--stall",
        metavar="SECONDS",
        kind=float,
        least=0,
        help="Seconds without a new line that are an alarm; 0 for never. Learned by default.",
    )
    pid: int | None = option(
        "--pid", metavar="PID", kind=int, least=1, help="The process that writes the run."
    )
