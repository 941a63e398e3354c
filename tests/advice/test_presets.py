"""Presets: every one of them passes the check, and levels differ as a user expects."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanguard.advice.preset_files import (
    accelerate_config,
    deepspeed_config,
    files_of,
    hf_config,
    lightning_config,
    plain_config,
)
from nanguard.advice.preset_writer import SettingGroup, SettingLine
from nanguard.advice.presets import FAMILIES, LEVELS, PRECISIONS, TASKS, Choice
from nanguard.check.engine import Check, Plan
from nanguard.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EVERY = [
    Choice(family, level, precision, task, form)
    for family, forms in FAMILIES.items()
    for form in forms
    for level, precision, task in itertools.product(LEVELS, PRECISIONS, TASKS)
]


def parsed(name: str, text: str) -> dict[str, Any]:
    ending = name.rpartition(".")[2]
    read = {"yaml": yaml.safe_load, "json": json.loads, "toml": tomllib.loads}[ending]
    data: dict[str, Any] = read(text)
    return data


def written(choice: Choice, folder: Path) -> list[Path]:
    paths = []
    for file in files_of(choice):
        paths.append(folder / file.name)
        paths[-1].write_text(file.content)
    return paths


def leaves(data: Any) -> list[Any]:
    if isinstance(data, dict):
        return [leaf for value in data.values() for leaf in leaves(value)]
    if isinstance(data, list):
        return [leaf for value in data for leaf in leaves(value)]
    return [data]


def values(family: str, **asked: str) -> dict[str, Any]:
    file = files_of(Choice(family, **asked))[-1]
    return parsed(file.name, file.content)


def call(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "nanguard", "preset", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("choice", EVERY, ids=str)
def test_every_preset_passes_the_check(choice: Choice, tmp_path: Path):
    written(choice, tmp_path)
    check = Check(Plan(root=str(tmp_path), jobs=1))
    outcome = check.run([str(tmp_path)])
    assert [seen.finding for seen in outcome.seen] == []
    configs = [p for p in tmp_path.iterdir() if p.suffix != ".sh"]
    assert outcome.checked == [str(p) for p in configs]


@pytest.mark.parametrize("choice", EVERY, ids=str)
def test_numbers_are_numbers_to_every_reader(choice: Choice, tmp_path: Path):
    for path in written(choice, tmp_path):
        if path.suffix != ".sh":
            text = [
                leaf for leaf in leaves(parsed(path.name, path.read_text())) if type(leaf) is str
            ]
            assert not [leaf for leaf in text if re.fullmatch(r"[\d.]+(e-?\d+)?", leaf)]


@pytest.mark.parametrize(
    "config_of",
    [accelerate_config, deepspeed_config, hf_config, lightning_config, plain_config],
)
@pytest.mark.parametrize("level", LEVELS)
def test_every_value_has_a_reason(config_of: Any, level: str):
    for precision, task in itertools.product(PRECISIONS, TASKS):
        config = config_of(Choice("plain", level, precision, task).values)
        silent = [line.key for line in lines_of(config.members) if not line.note.endswith(".")]
        assert silent in ([], ["class_path"])  # that of the callback, which says it all


def lines_of(members: tuple[SettingLine | SettingGroup, ...]) -> list[SettingLine]:
    found: list[SettingLine] = []
    for member in members:
        found += [member] if isinstance(member, SettingLine) else lines_of(member.members)
    return found


@pytest.mark.parametrize(
    ("key", "worse", "rule"),
    [
        ("learning_rate", "learning_rate: 5.0e-1", "learning-rate-too-high"),
        ("max_grad_norm", "max_grad_norm: 0.0", "missing-gradient-clipping"),
        ("fp16", "fp16: true", "conflicting-precision"),
        ("logging_nan_inf_filter", "logging_nan_inf_filter: true", "nan-filter-hides-loss"),
    ],
)
def test_a_preset_that_is_spoiled_does_not_pass(key: str, worse: str, rule: str, tmp_path: Path):
    (file,) = files_of(Choice("hf", "fast", task="lm"))
    text = re.sub(rf"^{key}: .*$", worse, file.content, flags=re.MULTILINE)
    (tmp_path / file.name).write_text(text)
    outcome = Check(Plan(root=str(tmp_path), jobs=1)).run([str(tmp_path)])
    assert rule in [seen.finding.name for seen in outcome.seen]


def test_the_stable_launch_has_the_values_of_the_report():
    launch, accelerated = files_of(Choice("launch", "safe", task="classifier"))
    for line in (
        'LEARNING_RATE="${LEARNING_RATE:-5.0e-5}"',
        'WARMUP_EPOCHS="${WARMUP_EPOCHS:-5}"',
        'LABEL_SMOOTHING="${LABEL_SMOOTHING:-0.1}"',
        'ADAM_WEIGHT_DECAY="${ADAM_WEIGHT_DECAY:-1.0e-4}"',
        'ADAM_EPSILON="${ADAM_EPSILON:-1.0e-8}"',
        'MAX_GRAD_NORM="${MAX_GRAD_NORM:-0.5}"',
    ):
        assert line in launch.content.splitlines()
    assert "nanguard run" in launch.content
    assert "accelerate launch --config_file" in launch.content
    settings = yaml.safe_load(accelerated.content)
    assert settings["mixed_precision"] == "no"
    assert settings["distributed_type"] == "MULTI_GPU"


def test_the_schedule_begins_at_a_tenth_and_ends_low():
    scheduler = values("plain", level="safe", task="classifier")["scheduler"]
    assert scheduler["warmup_epochs"] == 5
    assert scheduler["warmup_start_factor"] == 0.1
    lit = values("lightning", level="safe", task="diffusion")["lr_scheduler"]["init_args"]
    assert lit["max_lr"] / lit["div_factor"] / lit["final_div_factor"] == pytest.approx(1e-6)
    engine = values("deepspeed", level="safe", task="diffusion")
    ratio = engine["scheduler"]["params"]["cos_min_ratio"]
    assert engine["optimizer"]["params"]["lr"] * ratio == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("task", "level", "rate", "clip"),
    [
        ("diffusion", "safe", 1e-5, 0.5),
        ("lm", "safe", 3e-5, 0.3),
        ("lm", "balanced", 5e-5, 0.5),
        ("multidataset", "safe", 1e-6, 0.5),
        ("multidataset", "fast", 5e-6, 1.0),
    ],
)
def test_rates_and_norms(task: str, level: str, rate: float, clip: float):
    settings = values("hf", task=task, level=level)
    assert (settings["learning_rate"], settings["max_grad_norm"]) == (rate, clip)


@pytest.mark.parametrize("task", TASKS)
def test_levels_go_from_careful_to_fast(task: str):
    rows = [Choice("plain", level, task=task).values for level in LEVELS]
    assert rows[0].lr < rows[1].lr < rows[2].lr
    assert rows[0].clip <= rows[1].clip <= rows[2].clip
    assert rows[0].clip < rows[2].clip
    assert rows[0].warmup >= rows[1].warmup >= rows[2].warmup
    assert rows[0].save <= rows[1].save <= rows[2].save
    assert rows[0].accumulation >= rows[2].accumulation
    assert [row.precision for row in rows] == ["fp32", "bf16", "bf16"]
    assert all(row.floor < row.lr for row in rows)
    assert all(row.warmup < row.task.length for row in rows)


def test_the_page_has_the_numbers_of_every_task():
    page = (Path(__file__).parents[2] / "docs/presets.md").read_text()
    for name, task in TASKS.items():
        length = f"{task.length:,}".replace(",", " ")
        cells = [
            f"{rate:.0e}".replace("e-0", "e-") + f", {clip}, {save}"
            for rate, clip, save in zip(task.rates, task.clips, task.saves, strict=True)
        ]
        assert f"| `{name}` ({length} {task.unit}) | {' | '.join(cells)} |" in page
    for family in FAMILIES:
        assert f"| `{family}` |" in page


def test_fp16_is_scaled_and_never_beside_bf16():
    engine = values("deepspeed", precision="fp16")
    assert engine["fp16"]["enabled"] is True
    assert engine["fp16"]["loss_scale"] == 0
    assert engine["bf16"]["enabled"] is False
    assert values("plain", precision="fp16")["amp"]["grad_scaler"] is True


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"family": "keras"}, "there is no family 'keras'"),
        ({"level": "brave"}, "Give one of safe, balanced, fast"),
        ({"task": "chess"}, "there is no task 'chess'"),
        ({"precision": "fp8"}, "Give one of fp32, bf16, fp16"),
        ({"family": "deepspeed", "form": "yaml"}, "there is no format for deepspeed 'yaml'"),
    ],
)
def test_what_there_is_not(asked: dict[str, str], text: str):
    with pytest.raises(UsageError, match=re.escape(text)):
        Choice(**asked)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("task", TASKS)
def test_the_script_is_bash_and_hands_its_values_on(task: str, tmp_path: Path):
    script, _ = written(Choice("launch", task=task), tmp_path)
    (tmp_path / "nanguard").write_text('#!/bin/sh\nfor w in "$@"; do echo "$w"; done\n')
    (tmp_path / "nanguard").chmod(0o755)
    done = subprocess.run(
        ["bash", str(script), "--extra", "a b"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "LEARNING_RATE": "7e-6"},
    )
    words = done.stdout.splitlines()
    assert words[:2] == ["check", "train.py"]
    assert words[words.index("--learning_rate") + 1] == "7e-6"
    assert words[-2:] == ["--extra", "a b"]
    started = words[words.index("run") :]
    assert started[:6] == ["run", "--on-bad", "rollback", "--", "accelerate", "launch"]


def test_the_command_prints_yaml_by_default():
    done = call()
    assert done.returncode == 0
    assert yaml.safe_load(done.stdout)["optimizer"]["lr"] == 5e-5
    assert done.stderr == ""


def test_json_goes_to_the_output_and_what_is_said_about_it_to_standard_error():
    done = call("--family", "deepspeed")
    assert json.loads(done.stdout)["gradient_clipping"] == 0.5
    assert "optimizer.params.lr\n    Raise it to 1.0e-4" in done.stderr


def test_the_launch_is_printed_as_two_files_and_written_as_two(tmp_path: Path):
    printed = call("--family", "launch").stdout
    assert re.findall(r"^# ==> (\S+) <==$", printed, re.MULTILINE) == [
        "launch.sh",
        "accelerate.yaml",
    ]
    done = call("--family", "launch", "--output", str(tmp_path / "new" / "launch"))
    assert done.returncode == 0, done.stderr
    names = sorted(path.name for path in (tmp_path / "new/launch").iterdir())
    assert names == ["accelerate.yaml", "launch.sh"]
    assert (tmp_path / "new/launch/launch.sh").stat().st_mode & 0o100


def test_a_file_that_is_there_is_kept_unless_forced(tmp_path: Path):
    file = tmp_path / "ds.json"
    (tmp_path / "ds_notes.txt").write_text("mine")
    done = call("--family", "deepspeed", "-o", str(file))
    assert done.returncode == 2
    assert "there is such a file already" in done.stderr
    assert "ds_notes.txt" in done.stderr
    assert not file.exists()
    assert call("--family", "deepspeed", "-o", str(file), "--force").returncode == 0
    assert "Train with detection on" in (tmp_path / "ds_notes.txt").read_text()


def test_a_place_that_cannot_be_written_is_a_message(tmp_path: Path):
    (tmp_path / "file").touch()
    done = call("-o", str(tmp_path / "file" / "train.yaml"))
    assert done.returncode == 2
    assert "the file cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
