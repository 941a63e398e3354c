"""Configurations as the project's code reads them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from nanguard.cli.checking import run_check
from nanguard.cli.commands.before import CheckOptions

if TYPE_CHECKING:
    from pathlib import Path

PLAIN = "epochs: 3\nbatch_size: 8\n"


def findings(folder: Path, **files: str) -> list[tuple[str, str]]:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_yaml", ".yaml").replace("_py", ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    report = folder.parent / f"{folder.name}.json"
    run_check(
        CheckOptions(
            (str(folder),), form="json", fail_on="none", output=report, no_cache=True, jobs=1
        )
    )
    told = json.loads(report.read_text())["findings"]
    return [(one["name"], one["severity"]) for one in told]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ('lr = cfg["lr"]\n', ("scientific-notation-is-string", "error")),
        ('lr = float(cfg["lr"])\n', ("scientific-notation-is-string", "info")),
        ("lr = float(cfg.optimizer.lr)\n", ("scientific-notation-is-string", "info")),
        ('lr = c.get("lr") or c.get("rate")\nlr = float(lr)\n', None),
        ('rate = cfg["rate"]\n', ("scientific-notation-is-string", "info")),
    ],
)
def test_a_number_written_as_text_is_judged_by_what_the_code_does(
    code: str, said: tuple[str, str] | None, tmp_path: Path
):
    found = findings(tmp_path, train_py=code, run_yaml=PLAIN + "lr: 1e-4\n")
    assert (said or ("scientific-notation-is-string", "info")) in found


def test_without_any_code_the_text_is_an_error(tmp_path: Path):
    found = findings(tmp_path, run_yaml=PLAIN + "lr: 1e-4\n")
    assert ("scientific-notation-is-string", "error") in found


def test_files_of_a_group_that_a_defaults_list_names_are_hydras(tmp_path: Path):
    main = "defaults:\n  - optimizer: adam\n  - _self_\nepochs: 3\nbatch_size: 8\n"
    group = "lr: 1e-4\nweight_decay: 0.0\nbetas: [0.9, 0.999]\n"
    found = findings(
        tmp_path,
        conf__config_yaml=main,
        conf__optimizer__adam_yaml=group.replace("1e-4", "1.0e-4"),
        conf__optimizer__psgd_yaml=group,
        conf__sweeps__one_yaml=group,
    )
    told = [name for name, _ in found if name == "scientific-notation-is-string"]
    assert len(told) == 1  # the one that no defaults list names


MISSPELLED = PLAIN + "lr: 0.1\nmax_grad_nrom: 1.0\n"


@pytest.mark.parametrize(
    ("code", "severity"),
    [
        ('clip = cfg["max_grad_nrom"]\n', None),
        ("clip = cfg.max_grad_nrom\n", None),
        ('clip = cfg["max_grad_norm"]\n', "warning"),
        ("print(1)\n", "info"),
    ],
)
def test_a_key_that_the_code_reads_is_no_misspelling(
    code: str, severity: str | None, tmp_path: Path
):
    found = dict(findings(tmp_path, train_py=code, run_yaml=MISSPELLED))
    assert found.get("misspelled-key") == severity


def test_a_file_is_not_closed_by_a_section_with_known_names(tmp_path: Path):
    own = (
        "datasets: {names: [a, b]}\n"
        "training: {output_dir: out, logging_steps: 5, max_grad_norm: 1.0, learning_rate: 0.1}\n"
    )
    assert "misspelled-key" not in dict(findings(tmp_path, run_yaml=own))


def test_what_deepspeed_casts_does_not_conflict_with_amp_that_is_off(tmp_path: Path):
    run = PLAIN + "lr: 0.1\namp: false\ndeepspeed: ds.json\n"
    ds = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, "gradient_clipping": 1.0}
    (tmp_path / "ds.json").write_text(json.dumps(ds))
    assert "conflicting-precision" not in dict(findings(tmp_path, run_yaml=run))
