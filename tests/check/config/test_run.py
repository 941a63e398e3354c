"""Runs: families, settings, parts, and files that belong together."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from nanguard.check.config.document import Document, looks_like_training, read_document
from nanguard.check.config.run_config import RunConfig, read_project
from nanguard.source.text import Text


def document(path: str, content: str) -> Document:
    return read_document(Text(path, content))


def runs(**files: str) -> list[RunConfig]:
    return read_project([document(name.replace("__", "/"), text) for name, text in files.items()])


def one(content: str, path: str = "run.yaml") -> RunConfig:
    (run,) = read_project([document(path, content)])
    return run


FAMILIES = [
    ("accelerate", "compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\n"),
    ("deepspeed", "zero_optimization: {stage: 2}\nfp16: {enabled: true}\n"),
    ("torchtune", "model: {_component_: torchtune.models.x}\n"
        "optimizer: {_component_: a, lr: 1e-5}\n"
     "epochs: 1\n"),
    ("axolotl", "base_model: x\nsequence_len: 9\nadapter: lora\nlearning_rate: 1e-4\n"),
    ("lightning", "trainer: {accelerator: gpu, max_epochs: 3, precision: 16-mixed}\n"),
    ("huggingface", "output_dir: o\nlearning_rate: 1.0e-5\nnum_train_epochs: 3\n"),
    ("fairseq", "task: {_name: lm}\noptimizer: {_name: adam}\noptimization: {lr: [1.0e-3]}\n"
     "dataset: {batch_size: 3}\n"),
    ("hydra", "lr: ${base}\nbase: 1e-4\nepochs: 3\n"),
    ("yacs", "TRAIN: {BASE_LR: 1e-4, EPOCHS: 3}\nMODEL: {TYPE: swin}\n"),
    ("plain", "lr: 1.0e-4\nepochs: 3\n"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "content"), FAMILIES)
def test_families_are_told_apart_by_content(family: str, content: str) -> None:
    assert one(content).family.name == family


SETTINGS: list[tuple[str, str, str, Any]] = [
    ("lr: 1.0e-4\nepochs: 3\n", "run.yaml", "lr", 1e-4),
    ("TRAIN: {BASE_LR: 0.5, EPOCHS: 3}\n", "run.yaml", "lr", 0.5),
    ("[optimizer]\nlearning-rate = 0.5\n[run]\nepochs = 3\n", "run.toml", "lr", 0.5),
    ("optim_conf: {lr: 0.5}\nmax_epoch: 3\n", "run.yaml", "lr", 0.5),
    ('{"learningRate": 0.5, "numEpochs": 3}', "run.json", "max_epochs", 3),
    ("optimiser: {name: Adam, lr: 1}\nepochs: 3\n", "run.yaml", "optimizer", "Adam"),
    ("schedule: {warmup: {steps: 9}}\nlr: 1\n", "run.yaml", "warmup_steps", 9),
    ("clip: {max_norm: 0.5}\nlr: 1\nepochs: 3\n", "run.yaml", "clip_norm", 0.5),
    ("optimization: {lr: [0.5]}\nmax_update: 9\n", "run.yaml", "lr", [0.5]),
    ("lr: 1\nepochs: 3\nval: {batch_size: 1}\ndata: {batch_size: 8}\n", "r.yaml", "batch_size", 8),
]


@pytest.mark.parametrize(("content", "path", "name", "value"), SETTINGS)
def test_settings_are_found_under_their_usual_names(
    content: str, path: str, name: str, value: Any
) -> None:
    setting = one(content, path).stages[0].get(name)
    assert setting is not None
    assert setting.value == value


def test_a_setting_knows_its_place_and_whether_it_is_text() -> None:
    text = "train:\n  lr: 1e-5\n  epochs: 3\n"
    setting = one(text).stages[0].get("lr")
    assert setting is not None
    assert (setting.key, setting.path, setting.line, setting.column) == (
        "train.lr",
        "run.yaml",
        2,
        3,
    )
    assert text[slice(*setting.span)] == "1e-5"
    assert (setting.value, setting.number) == ("1e-5", 1e-5)


def test_references_are_followed_and_kept_in_the_text() -> None:
    text = "lrs: {peak: 1e-4}\noptimizer: {lr: '${lrs.peak}'}\nsteps: ${..steps}\nmax_steps: 9\n"
    setting = one(text).stages[0].get("lr")
    assert setting is not None
    assert (setting.number, setting.line) == (1e-4, 2)
    assert text[slice(*setting.span)] == "1e-4"


def test_sections_side_by_side_are_parts_of_their_own() -> None:
    gan = "g: {lr: 1, grad_clip: 1}\nd: {lr: 2, grad_clip: 2}\nbatch_size: 4\n"
    parts = {stage.scope: stage.number("lr") for stage in one(gan).stages}
    assert parts == {("g",): 1, ("d",): 2}
    assert [stage.number("batch_size") for stage in one(gan).stages] == [4, 4]
    listed = "groups:\n  - {lr: 1}\n  - {lr: 2}\nepochs: 3\n"
    assert [stage.number("lr") for stage in one(listed).stages] == [1, 2]


def test_sections_about_different_things_are_one_part() -> None:
    text = "optimizer: {lr: 1, grad_clip: 1}\ntrain: {epochs: 3, max_grad_norm: 2}\n"
    (stage,) = one(text).stages
    assert [setting.number for setting in stage.all("clip_norm")] == [1, 2]


def test_a_base_that_others_merge_is_judged_through_them() -> None:
    text = "base: &b {lr: 1, epochs: 3}\na: {<<: *b}\nb: {<<: *b, lr: 2}\n"
    assert [stage.scope for stage in one(text).stages] == [("a",), ("b",)]
    assert [stage.number("lr") for stage in one(text).stages] == [1, 2]


def test_a_deepspeed_file_belongs_to_the_run_that_names_it() -> None:
    train = "training: {lr: 1.0e-5, max_steps: 9, deepspeed: conf/ds.json}\n"
    (run,) = runs(
        **{
            "p/train.yaml": train,
            "p/conf/ds.json": '{"zero_optimization": {}, "bf16": {"enabled": true}}',
        }
    )
    assert [d.path for d in run.documents] == ["p/train.yaml", "p/conf/ds.json"]
    assert run.stages[0].precision.half == "bf16"


def test_the_one_accelerate_file_beside_a_run_belongs_to_it() -> None:
    accelerate = "compute_environment: LOCAL_MACHINE\nmixed_precision: 'no'\nnum_processes: 2\n"
    train = "lr: 1.0e-5\nmax_steps: 9\n"
    (run,) = runs(**{"p/conf/train.yaml": train, "p/acc.yaml": accelerate})
    assert run.stages[0].number("processes") == 2
    many = runs(**{"p/train.yaml": train, "p/a.yaml": accelerate, "p/b.yaml": accelerate})
    assert sorted(len(run.documents) for run in many) == [1, 1, 1]


def test_a_defaults_list_is_composed_and_its_own_entries_count_over_it() -> None:
    files = {
        "c/config.yaml": "defaults: [{optimizer: adam}, {trainer: long}, _self_]\n"
        "trainer: {gradient_clip_val: 0.5}\n",
        "c/optimizer/adam.yaml": "_target_: torch.optim.Adam\nlr: 1e-4\nweight_decay: 0.0\n",
        "c/trainer/long.yaml": "max_steps: 900\ngradient_clip_val: 1.0\nprecision: 32\n",
        "c/trainer/short.yaml": "max_steps: 9\ngradient_clip_val: 1.0\nprecision: 32\n",
    }
    config = next(run for run in runs(**files) if run.path == "c/config.yaml")
    (stage,) = config.stages
    assert (stage.number("lr"), stage.number("max_steps")) == (1e-4, 900)
    assert [setting.number for setting in stage.all("clip_norm")] == [0.5]
    first = {**files, "c/config.yaml": files["c/config.yaml"].replace("[{o", "[_self_, {o")}
    first["c/config.yaml"] = first["c/config.yaml"].replace(", _self_]", "]")
    config = next(run for run in runs(**first) if run.path == "c/config.yaml")
    assert [setting.number for setting in config.stages[0].all("clip_norm")] == [1.0]


def test_a_file_that_contains_itself_is_read_in_time() -> None:
    text = "train: &t\n  lr: 1\n  epochs: 3\n  again: *t\n  list: &l [1, *l, *t]\n"
    assert one(text).stages[0].number("lr") == 1


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("docker-compose.yml", "services: {web: {image: x}}\n"),
        ("package.json", '{"name": "x", "scripts": {"train": "y"}, "dependencies": {}}'),
        ("config.json", '{"architectures": ["B"], "hidden_size": 9, "torch_dtype": "float16"}'),
        ("trainer_state.json", '{"log_history": [], "max_steps": 9, "save_steps": 3}'),
        ("metrics.json", '{"lr": 0.1, "batch_size": 3, "loss": 0.5}'),
        ("list.yaml", "- 1\n- 2\n"),
        ("empty.yaml", ""),
    ],
)
def test_other_files_are_not_training(path: str, content: str) -> None:
    assert not looks_like_training(document(path, content))
    assert read_project([document(path, content)]) == []


def test_reading_json_imports_neither_yaml_nor_torch() -> None:
    code = (
        "import sys; from nanguard.source.text import Text;"
        "from nanguard.check.config.document import read_document;"
        "from nanguard.check.config.run_config import read_project;"
        "read_project([read_document(Text('a.json', '{\"lr\": 1, \"epochs\": 3}'))]);"
        "print(sorted({'yaml', 'torch', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
