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


LOADS = "import yaml\nwith open(args.config) as f:\n    cfg = yaml.safe_load(f)\n"
ADAM = 'opt = torch.optim.Adam(model.parameters(), lr=cfg["lr"])\n'


@pytest.mark.parametrize(
    ("code", "severity"),
    [
        (LOADS + ADAM, "error"),
        (LOADS.replace("args.config", "'run.yaml'") + ADAM, "error"),
        (
            LOADS.replace("yaml.safe_load(f)", "yaml.load(f, Loader=yaml.FullLoader)") + ADAM,
            "error",
        ),
        (LOADS + 'lr = cfg.get("lr")\nstep = lr * 0.1\n', "error"),
        (LOADS + 'lr = cfg.get("lr")\nlr = parsed(lr)\nstep = lr * 0.1\n', "info"),
        (LOADS + 'if cfg["lr"] > 1:\n    raise ValueError\n', "error"),
        (LOADS + 'print(cfg["lr"])\nname = "lr" + cfg["lr"]\n', "info"),
        (LOADS + 'for group in groups:\n    group["lr"] = group["lr"] * 0.1\n', "info"),
        (LOADS.replace("args.config", "'other.yaml'") + ADAM, "info"),
        (ADAM, "info"),
        (LOADS + ADAM + "import omegaconf\n", "info"),
        (LOADS + ADAM + "yaml.SafeLoader.add_implicit_resolver(tag, number, first)\n", "info"),
        (LOADS + ADAM + 'add_argument("--lr", type=float)\n', "info"),
        (LOADS + ADAM + 'lr = float(cfg["lr"])\n', None),
        ("lr = float(cfg.optimizer.lr)\n", None),
        ('lr = c.get("lr") or c.get("rate")\nlr = float(lr)\n', None),
        ("from yacs.config import CfgNode\ncfg.merge_from_file(path)\n" + ADAM, None),
        ("cfg = OmegaConf.load(path)\n" + ADAM, None),
        ("from ruamel.yaml import YAML\ncfg = YAML().load(path)\n" + ADAM, None),
        ('rate = cfg["rate"]\n', "info"),
    ],
)
def test_a_number_written_as_text_is_judged_by_what_the_code_does(
    code: str, severity: str | None, tmp_path: Path
):
    found = findings(tmp_path, train_py=code, run_yaml=PLAIN + "lr: 1e-4\n")
    assert dict(found).get("scientific-notation-is-string") == severity


def test_a_section_that_an_optimizer_is_given_whole_needs_its_numbers(tmp_path: Path):
    code = LOADS + "opt = SGD(params, **cfg['optim'])\n"
    found = findings(tmp_path, train_py=code, run_yaml=PLAIN + "optim:\n  lr: 1e-2\n")
    assert ("scientific-notation-is-string", "error") in found


def test_without_any_code_the_text_is_a_remark(tmp_path: Path):
    found = findings(tmp_path, run_yaml=PLAIN + "lr: 1e-4\n")
    assert ("scientific-notation-is-string", "info") in found


NUMBERS = "optim:\n  lr: 1e-4\n  rates: [1e-4, 2e-4]\n  by_layer: {head: 1e-3}\n"
FIELDS = (
    "    lr: float = 0.1\n    rates: list[float] | None = None\n    by_layer: dict[str, float]\n"
)
MODEL = "from pydantic import BaseModel\nimport yaml\n"
ROOT = "class Root(BaseModel):\n    optim: Optim\n"
PLAIN_CLASS = "from dataclasses import dataclass\n@dataclass\nclass Optim:\n" + FIELDS


@pytest.mark.parametrize(
    ("code", "count"),
    [
        (MODEL + "class Optim(BaseModel):\n" + FIELDS, 0),
        (MODEL + "class Own(BaseModel): ...\nclass Optim(Own):\n" + FIELDS, 0),
        (MODEL + PLAIN_CLASS + ROOT, 0),
        ("from pydantic.dataclasses import dataclass\n@dataclass\nclass Optim:\n" + FIELDS, 0),
        (MODEL + "class Optim(BaseModel):\n" + FIELDS.replace("float", "int"), 3),
        (MODEL + "class Optim(BaseModel):\n" + FIELDS.replace("float", "float | str"), 3),
        (
            MODEL + "class Optim(BaseModel):\n"
            "    model_config = ConfigDict(strict=True)\n" + FIELDS,
            3,
        ),
        (PLAIN_CLASS, 3),
        (
            "class BaseModel(nn.Module): ...\nclass Optim(BaseModel):\n" + FIELDS + "# pydantic\n",
            3,
        ),
        ("import pyrallis\ncfg = pyrallis.parse(Optim)\n" + PLAIN_CLASS, 0),
    ],
)
def test_a_field_that_converts_takes_the_text_for_a_number(code: str, count: int, tmp_path: Path):
    used = "use(cfg.lr, cfg.rates, cfg.head)\n"
    found = findings(tmp_path, train_py=code + used, run_yaml=PLAIN + NUMBERS)
    assert [name for name, _ in found].count("scientific-notation-is-string") == count


def test_a_model_and_its_base_may_stand_in_two_files(tmp_path: Path):
    found = findings(
        tmp_path,
        base_py=MODEL + "class Strict(BaseModel): ...\n",
        train_py="from base import Strict\nclass Optim(Strict):\n"
        "    rate: float = Field(alias='lr')\nuse(cfg.lr)\n",
        run_yaml=PLAIN + "lr: 1e-4\n",
    )
    assert "scientific-notation-is-string" not in dict(found)


@pytest.mark.parametrize(("kind", "silent"), [("float", True), ("str", False)])
def test_argparse_converts_a_default_that_a_file_sets(kind: str, silent: bool, tmp_path: Path):
    code = f'parser.add_argument("--lr", type={kind})\nparser.set_defaults(**yaml.safe_load(f))\n'
    found = findings(tmp_path, train_py=code, run_yaml=PLAIN + "lr: 1e-4\n")
    assert ("scientific-notation-is-string" not in dict(found)) is silent


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


@pytest.mark.parametrize(
    ("code", "severity"),
    [
        ("opt = SGD(params, lr=cfg.lr, momentum=cfg.momentum)\n", "error"),
        ('opt = torch.optim.SGD(params, **cfg["optim"])\nuse(cfg.momentum)\n', "error"),
        ("share = cfg.momentum\nmix(share)\n", "info"),
        ("", "error"),
    ],
)
def test_a_value_out_of_range_is_an_error_where_an_optimizer_gets_it(
    code: str, severity: str, tmp_path: Path
):
    run = PLAIN + "optim:\n  lr: 0.1\n  momentum: 1.0\n"
    files = {"train_py": code} if code else {}
    found = dict(findings(tmp_path, run_yaml=run, **files))
    assert found.get("value-out-of-range") == severity


def test_precisions_of_keys_that_unknown_code_reads_are_a_remark(tmp_path: Path):
    run = PLAIN + "lr: 0.1\nfp16: true\nbf16: true\n"
    assert dict(findings(tmp_path, run_yaml=run))["conflicting-precision"] == "error"
    found = findings(tmp_path, run_yaml=run, train_py="use(cfg.fp16, cfg.bf16)\n")
    assert dict(found)["conflicting-precision"] == "info"


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


@pytest.mark.parametrize(
    ("code", "severity"),
    [
        ("size = conf.train.grad_accum or batch_size\n", None),
        ('size = cfg.get("grad_accum", 0) or 1\n', None),
        ("steps = max(cfg.grad_accum, 1)\n", None),
        ('steps = max(1, int(cfg["grad_accum"]))\n', None),
        ('accum = cfg["grad_accum"]\nsteps = max(accum, 1)\n', None),
        ("accum = cfg.train.grad_accum\nif accum:\n    loss = loss / accum\n", None),
        ("if cfg.grad_accum > 0:\n    loss = loss / cfg.grad_accum\n", None),
        ("n = cfg.grad_accum if cfg.grad_accum else 1\n", None),
        ("if args.grad_accum == 0:\n    args.grad_accum = 1\n", None),
        ("loss = loss / cfg.grad_accum\n", "error"),
        ('accum = cfg["grad_accum"]\nif step % accum == 0:\n    pass\n', "error"),
        ("if cfg.grad_accum < 1:\n    raise ValueError\n", "warning"),
        ("train(cfg.grad_accum)\n", "warning"),
        ("print(1)\n", "info"),
    ],
)
def test_a_count_of_zero_is_judged_by_what_the_code_does(
    code: str, severity: str | None, tmp_path: Path
):
    found = findings(tmp_path, train_py=code, run_yaml=PLAIN + "lr: 0.1\ngrad_accum: 0\n")
    assert dict(found).get("value-out-of-range") == severity


def test_without_any_code_a_micro_batch_of_zero_may_be_off(tmp_path: Path):
    found = dict(findings(tmp_path, run_yaml=PLAIN + "lr: 0.1\nmicro_batch: 0\n"))
    assert found.get("value-out-of-range") == "warning"


def test_a_batch_of_zero_and_a_negative_one_are_errors(tmp_path: Path):
    run = "epochs: 3\nlr: 0.1\n"
    code = "use(cfg.batch_size)\nsize = cfg.grad_accum or 1\n"
    for text in ("batch_size: 0\n", "grad_accum: -2\n"):
        found = dict(findings(tmp_path, train_py=code, run_yaml=run + text))
        assert found.get("value-out-of-range") == "error"
