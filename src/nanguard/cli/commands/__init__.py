"""The commands of ``nanguard``, in the order in which they are listed.

Exit codes: 0 for a clean end, 1 for findings, 2 when nanguard could not do its work. ``run`` ends
with the code of the command, or with 3 when the guard stopped it.
"""

from __future__ import annotations

from nanguard.cli.command_line import Command
from nanguard.cli.commands.after import (
    ExplainOptions,
    FixOptions,
    ReplayOptions,
    ReportOptions,
    ServeOptions,
)
from nanguard.cli.commands.before import (
    CheckOptions,
    CompletionOptions,
    DemoOptions,
    DoctorOptions,
    LspOptions,
    PresetOptions,
    RulesOptions,
)
from nanguard.cli.commands.during import RunOptions, WatchOptions

FIRST = "Start here"
RUNS = "Look at runs"
MORE = "More"

COMMANDS = (
    Command(
        "check",
        CheckOptions,
        "nanguard.cli.checking:run_check",
        FIRST,
        (
            "nanguard check",
            "nanguard check train.py configs/ --fix",
            "nanguard check 'configs/**/*.yaml' --select CFG --fail-on warning",
            "nanguard check data/train.jsonl --label-key label --classes 101",
            "nanguard check runs/7 --watch",
            "nanguard check - < train.py",
        ),
    ),
    Command(
        "run",
        RunOptions,
        "nanguard.cli.running:run_guarded",
        FIRST,
        (
            "nanguard run -- python train.py --lr 1e-3",
            "nanguard run --on-bad stop -- torchrun --nproc-per-node 4 train.py",
            "nanguard run --incidents runs/7 -- accelerate launch train.py",
            "nanguard run --notify env:SLACK_WEBHOOK -- python train.py",
            "nanguard run --recover --checkpoints runs/7 --resume-arg '--resume {checkpoint}' "
            "--lr-arg '--lr {lr}' -- python train.py --lr 1e-3 --out runs/7",
        ),
    ),
    Command(
        "explain",
        ExplainOptions,
        "nanguard.cli.explaining:run_explain",
        FIRST,
        (
            "nanguard explain",
            "nanguard explain 116",
            "nanguard explain .nanguard/runs/20261115-031500-train",
            "nanguard explain clip-before-unscale",
            "nanguard explain division-by-zero",
        ),
    ),
    Command(
        "fix",
        FixOptions,
        "nanguard.cli.explaining:run_fix",
        FIRST,
        ("nanguard fix", "nanguard fix 116", "nanguard fix --dry-run"),
    ),
    Command(
        "report",
        ReportOptions,
        "nanguard.cli.reporting:run_report",
        RUNS,
        (
            "nanguard report",
            "nanguard report runs/night -o report.html",
            "nanguard report train.log .nanguard/runs/20261115-151552-train",
            "nanguard report runs/a runs/b --png curves.png",
        ),
    ),
    Command(
        "serve",
        ServeOptions,
        "nanguard.cli.reporting:serve_folder",
        RUNS,
        (
            "nanguard serve",
            "nanguard serve runs --port 0 --open",
            "nanguard serve runs --host 0.0.0.0",
        ),
    ),
    Command(
        "watch",
        WatchOptions,
        "nanguard.cli.following:run_watch",
        RUNS,
        (
            "nanguard watch runs/7",
            "nanguard watch train.log --wait --bell",
            "nanguard watch runs/7 --until-alarm && echo quiet",
            "nanguard watch train.log --notify 'notify-send \"$NANGUARD_MESSAGE\"'",
        ),
    ),
    Command(
        "replay",
        ReplayOptions,
        "nanguard.cli.explaining:run_replay",
        RUNS,
        (
            "nanguard replay",
            "nanguard replay 116 --precision float64",
            "nanguard replay runs/7/step-000007-rank0 --without-sample 3 --trace-all",
            "nanguard replay --explain runs/7/step-000007-rank0",
        ),
    ),
    Command(
        "preset",
        PresetOptions,
        "nanguard.cli.presetting:run_preset",
        MORE,
        (
            "nanguard preset --task diffusion > train.yaml",
            "nanguard preset --family deepspeed --level balanced -o ds_config.json",
            "nanguard preset --family launch -o launch/",
        ),
    ),
    Command(
        "rules",
        RulesOptions,
        "nanguard.cli.rulepages:print_rules",
        MORE,
        ("nanguard rules", "nanguard rules CFG"),
    ),
    Command(
        "doctor",
        DoctorOptions,
        "nanguard.cli.doctor:run_doctor",
        MORE,
        ("nanguard doctor", "nanguard doctor --python /opt/conda/bin/python"),
    ),
    Command(
        "demo",
        DemoOptions,
        "nanguard.cli.running:run_the_demo",
        MORE,
        ("nanguard demo", "nanguard demo --run-dir runs/demo --steps 600"),
    ),
    Command("lsp", LspOptions, "nanguard.cli.editor:serve", MORE),
    Command(
        "completion",
        CompletionOptions,
        "nanguard.cli.help_pages:print_script",
        MORE,
        (
            'eval "$(nanguard completion bash)"',
            "nanguard completion fish > ~/.config/fish/completions/nanguard.fish",
        ),
    ),
)
BY_NAME = {command.name: command for command in COMMANDS}
