"""What scripts that start a training say about its configurations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.key_usage import launches_in
from nanguard.check.engine import Check, Plan
from nanguard.check.selection import Selection

if TYPE_CHECKING:
    from pathlib import Path

ACCELERATE = (
    "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: fp16\n"
    "deepspeed_config:\n  deepspeed_config_file: conf/two.json\nnum_processes: 2\n"
)
RUN = "lr: 1.0e-4\nepochs: 3\noptimizer: adamw\nmodel: {name: gpt2}\ngrad_clip: 1.0\n"


def conflicts(folder: Path) -> list[str]:
    outcome = Check(Plan(Selection(), root=str(folder), jobs=1)).run([str(folder)])
    found = [s.finding for s in outcome.seen if s.finding.name == "conflicting-precision"]
    return [(finding.path or "").rpartition("/")[2] for finding in found]


def write(folder: Path) -> None:
    (folder / "conf").mkdir()
    (folder / "acc.yaml").write_text(ACCELERATE)
    (folder / "run.yaml").write_text(RUN)
    for name, kind in (("one", "fp16"), ("two", "bf16")):
        text = f'{{"{kind}": {{"enabled": true}}, "zero_optimization": {{"stage": 2}}}}'
        (folder / "conf" / f"{name}.json").write_text(text)


def test_the_file_that_accelerate_names_for_deepspeed_is_followed(tmp_path: Path):
    write(tmp_path)
    assert conflicts(tmp_path) == ["two.json"]
    (tmp_path / "acc.yaml").write_text(ACCELERATE.replace("two.json", "one.json"))
    assert conflicts(tmp_path) == []


def test_what_the_command_sets_is_no_conflict(tmp_path: Path):
    write(tmp_path)
    command = "accelerate launch --config_file acc.yaml {} train.py --config run.yaml\n"
    (tmp_path / "go.sh").write_text(command.format(""))
    assert conflicts(tmp_path) == ["two.json"]
    (tmp_path / "go.sh").write_text(command.format("--mixed_precision bf16"))
    assert conflicts(tmp_path) == []


def test_a_command_goes_on_behind_a_backslash(tmp_path: Path):
    script = tmp_path / "go.sh"
    script.write_text(
        "#!/bin/sh\n# python old.py a.yaml\ntorchrun train.py \\\n  --config conf/a.yaml \\\n"
        "  optimizer.lr=3e-4\necho b.yaml\n"
    )
    (launch,) = launches_in([str(script)])
    assert launch.files == {"a.yaml"}
    assert launch.options["lr"] == "3e-4"
    assert launch.names("/x/conf/a.yaml")
