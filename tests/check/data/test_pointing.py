"""What configurations say about data, and which files they point to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from nanguard.check.config.document import read_document
from nanguard.check.config.run_config import read_project
from nanguard.check.data.pointers import from_config, from_document
from nanguard.source.text import Text

if TYPE_CHECKING:
    from pathlib import Path

    from nanguard.check.data.dataset import Request

TRAINING = "training: {lr: 1.0e-4, max_steps: 100, batch_size: 8}\n"


def requests(folder: Path, text: str, name: str = "config.yaml") -> list[Request]:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text + TRAINING)
    (run,) = read_project([read_document(Text(str(path), path.read_text()))])
    return from_config(run)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    for name in ("a.jsonl", "b.jsonl", "data/c.jsonl", "y.npy", "X.npy"):
        (tmp_path / name).write_bytes(b'{"text": "a", "label": 1}\n')
    return tmp_path


def test_each_data_set_has_its_own_classes(data: Path):
    (request,) = requests(
        data,
        "model: {num_labels: 172}\ndata: {train_jsonl_list: [a.jsonl, b.jsonl]}\n"
        "datasets:\n  dataset_configs:\n    one: {num_classes: 101}\n    two: {num_classes: 172}\n",
    )
    assert [path.name for path in request.paths] == ["a.jsonl", "b.jsonl"]
    assert request.expected.groups == {"one": 101, "two": 172}
    assert request.expected.classes == 172


def test_paths_count_from_the_folder_of_the_configuration_or_the_one_above(data: Path):
    (request,) = requests(data, "data: {train_file: data/c.jsonl}\n", "configs/a.yaml")
    assert [path.name for path in request.paths] == ["c.jsonl"]
    (request,) = requests(data, "data: {data_dir: data}\n")
    assert [path.name for path in request.paths] == ["c.jsonl"]
    (request,) = requests(data, "data: {train_file: 'data/*.jsonl'}\n")
    assert [path.name for path in request.paths] == ["c.jsonl"]


def test_what_is_said_about_labels_and_tokens(data: Path):
    (request,) = requests(
        data,
        "model: {vocab_size: 500, num_labels: 7}\n"
        "data: {train_file: a.jsonl, label_column: y, num_classes: 5, ignore_index: [255, -1]}\n",
    )
    expected = request.expected
    assert (expected.vocabulary, expected.classes, expected.label_key) == (500, 5, "y")
    assert expected.ignored == (-100, 255, -1)
    assert not request.measured


@pytest.mark.parametrize(
    "text",
    [
        "task: regression\n",
        "model: {num_labels: 1}\n",
        "loss: {type: SmoothL1Loss}\n",
        "model: {problem_type: regression}\n",
        "loss_type: mse\n",
    ],
)
def test_measurements(text: str, data: Path):
    (request,) = requests(data, text + "data: {train_file: a.jsonl}\n")
    assert request.measured


def test_files_with_classes_beside_them(data: Path):
    found = requests(
        data,
        "datasets:\n  - {name: one, train_file: a.jsonl, num_classes: 3}\n"
        "  - {name: two, train_file: b.jsonl, num_classes: 4}\n",
    )
    assert [(r.paths[0].name, r.expected.classes) for r in found] == [
        ("a.jsonl", 3),
        ("b.jsonl", 4),
    ]


def test_arrays_with_labels_of_their_own(data: Path):
    (request,) = requests(data, "data: {features: X.npy, labels: y.npy, num_classes: 3}\n")
    assert sorted(path.name for path in request.paths) == ["X.npy", "y.npy"]


def test_a_missing_file_is_told_where_others_are_there(data: Path, tmp_path: Path):
    (request,) = requests(data, "data: {train_file: a.jsonl, val_file: gone.jsonl}\n")
    (missing,) = request.missing
    assert (missing.written, missing.line, missing.key) == ("gone.jsonl", 1, "data.val_file")


@pytest.mark.parametrize(
    "text",
    [
        "data: {train_file: elsewhere/gone.jsonl}\n",
        "data: {train_file: /mnt/gone.jsonl}\n",
        "data: {train_file: s3://bucket/gone.jsonl}\n",
        "output: {log_file: metrics.jsonl, save_path: out.csv}\n",
        "data: {train_file: '${root}/a.jsonl'}\n",
    ],
)
def test_nothing_is_said_about_data_that_lives_elsewhere(text: str, tmp_path: Path):
    assert requests(tmp_path, text) == []


def test_a_file_that_configures_no_training_may_still_describe_data(data: Path):
    path = data / "meta.yaml"
    path.write_text("data: {train_file: a.jsonl, num_classes: 3}\n")
    (request,) = from_document(read_document(Text(str(path), path.read_text())))
    assert request.expected.classes == 3


def test_names_and_counts_that_disagree_are_kept(data: Path):
    (request,) = requests(
        data, "data: {train_file: a.jsonl, num_classes: 3, class_names: [cat, dog]}\n"
    )
    assert (request.named, request.expected.classes) == (2, 3)
