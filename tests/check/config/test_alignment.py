"""The table of settings that the files of a run have to agree on."""

from __future__ import annotations

from nanguard.check.config.document import read_document
from nanguard.check.config.precision import alignment
from nanguard.check.config.run_config import read_project
from nanguard.source.text import Text


def rows(**files: str) -> dict[str, tuple[str, str, str]]:
    documents = [read_document(Text(name.replace("__", "."), text)) for name, text in files.items()]
    table = alignment(read_project(documents))
    return {row.where: (row.setting, row.value, row.verdict) for row in table}


ACCELERATE = "compute_environment: LOCAL_MACHINE\nmixed_precision: 'no'\nnum_processes: 2\n"


def test_files_that_agree() -> None:
    train = "lr: 1.0e-5\nmax_steps: 9\namp: false\ngrad_clip: 0.5\nbatch_size: 4\n"
    assert rows(train__yaml=train, acc__yaml=ACCELERATE) == {
        "train.yaml:3 amp": ("precision", "false", "agrees"),
        "acc.yaml:2 mixed_precision": ("precision", "'no'", "agrees"),
        "train.yaml:4 grad_clip": ("clipping", "0.5", "set once"),
        "train.yaml:5 batch_size": ("batch size", "4", "set once"),
    }


def test_files_that_contradict_each_other() -> None:
    train = "lr: 1.0e-5\nmax_steps: 9\nfp16: true\nclip: {max_norm: 1.0}\ngrad_clip: 0.5\n"
    table = rows(train__yaml=train, acc__yaml=ACCELERATE)
    assert table["train.yaml:3 fp16"] == ("precision", "true", "conflicts")
    assert table["acc.yaml:2 mixed_precision"][2] == "agrees"
    assert {table[where][2] for where in table if "clip" in where} == {"conflicts"}


def test_the_batch_of_all_devices_is_a_product() -> None:
    ds = (
        '{{"zero_optimization": {{}}, "train_batch_size": {}, "train_micro_batch_size_per_gpu": 4, '
        '"gradient_accumulation_steps": 2, "num_gpus": 8}}'
    )
    verdicts = [
        rows(ds__json=ds.format(size))["ds.json:1 train_batch_size"][2] for size in (64, 65)
    ]
    assert verdicts == ["agrees", "conflicts"]


def test_a_row_as_json() -> None:
    (row, *_) = alignment(
        read_project([read_document(Text("a.yaml", "lr: 1\nepochs: 3\nbf16: true\n"))])
    )
    assert row.to_json() == {
        "setting": "precision",
        "where": "a.yaml:3 bf16",
        "value": "true",
        "verdict": "set once",
    }
