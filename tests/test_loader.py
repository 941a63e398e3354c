"""check_loader on real loaders: what is wrong, and which samples are named."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import nanguard
from nanguard.errors import UsageError


def features(count: int = 40, width: int = 5) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0))


def labels(count: int = 40, classes: int = 4) -> torch.Tensor:
    return torch.arange(count) % classes


def said(loader: Any, **expected: Any) -> list[tuple[str, str]]:
    return [(f.name, f.message) for f in nanguard.check_loader(loader, **expected)]


class Samples(Dataset):
    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: int) -> Any:
        if isinstance(self.samples[at], Exception):
            raise self.samples[at]
        return self.samples[at]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shuffled_loader_names_the_samples_of_its_data_set(workers: int):
    x, y = features(), labels()
    x[17, 2], y[29] = float("nan"), 4
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, num_workers=workers)
    found = dict(said(loader, classes=4))
    assert set(found) == {"non-finite-feature", "label-out-of-range"}
    assert found["non-finite-feature"].endswith("1 of 40 values, dataset index 17")
    assert "dataset index 29" in found["label-out-of-range"]


def test_a_healthy_loader_is_left_alone_and_random_numbers_stay_as_they_are():
    loader = DataLoader(TensorDataset(features(), labels()), batch_size=8, shuffle=True)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert said(loader, classes=4) == []
    assert torch.equal(before, torch.get_rng_state())


def test_only_so_many_batches_are_looked_at():
    x = features()
    x[-1, 0] = float("inf")
    loader = DataLoader(TensorDataset(x, labels()), batch_size=8)
    assert said(loader, batches=4) == []
    assert said(loader, batches=5)[0][0] == "non-finite-feature"


class Pair(NamedTuple):
    inputs: Any
    target: torch.Tensor


@dataclass
class Batch:
    image: torch.Tensor
    meta: dict[str, Any]


def bad_image() -> torch.Tensor:
    image = torch.rand(6, 3, 4, 4, dtype=torch.bfloat16)
    image[4, 0, 1, 1] = -float("inf")
    return image


@pytest.mark.parametrize(
    "batch",
    [
        {"a": {"image": bad_image()}},
        Pair({"image": bad_image()}, labels(6)),
        Batch(bad_image(), {"label": labels(6)}),
        [bad_image(), [labels(6)]],
    ],
    ids=["mapping", "namedtuple", "dataclass", "list"],
)
def test_batches_of_any_build_are_looked_into(batch: Any):
    found = said([batch])
    assert [name for name, _ in found] == ["non-finite-feature"]
    assert "-inf" in found[0][1]
    assert "dataset index 4" in found[0][1]


def test_labels_are_told_by_name_by_place_and_by_group():
    wrong = labels(6, 3) + 1
    assert said([{"x": features(6), "label": wrong}], classes=3)[0][0] == "label-out-of-range"
    assert said([(features(6), wrong)], classes=3)[0][0] == "label-out-of-range"
    batch = {"x": features(6), "label": wrong, "dataset_name": ["b", "b", "a", "b", "b", "b"]}
    ((name, message),) = said([batch], groups={"a": 3, "b": 4})
    assert name == "label-out-of-range"
    assert "label of a is 3" in message
    assert "dataset index 2" in message
    assert said([batch], groups={"a": 4, "b": 4}) == []


def test_measurements_are_no_classes():
    assert said([(features(64), torch.linspace(-3, 3, 64))]) == []
    assert said([(features(64), -labels(64))], measured=True, classes=4) == []


def test_token_ids_and_targets_to_ignore():
    ids = torch.arange(24).reshape(4, 6)
    targets = torch.where(ids % 2 == 0, ids, -100)
    assert said([{"input_ids": ids, "labels": targets}], vocabulary=24) == []
    ((name, message),) = said([{"input_ids": ids, "labels": targets}], vocabulary=23)
    assert name == "token-id-out-of-vocabulary"
    assert "input_ids holds 23" in message


def test_a_sample_that_cannot_be_read_is_named_and_the_others_are_read():
    samples: list[Any] = [(torch.full((3,), 0.1 * at), at % 2) for at in range(12)]
    samples[7] = ValueError("truncated image")
    samples[10] = (torch.tensor([float("nan"), 0.0, 1.0]), 1)
    found = dict(said(DataLoader(Samples(samples), batch_size=4)))
    assert "dataset index 7: ValueError: truncated image" in found["unreadable-record"]
    assert "dataset index 10" in found["non-finite-feature"]


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        for at in range(10):
            yield {"x": torch.tensor([float("nan") if at == 6 else 0.5, 1.0 + at]), "label": 0}


def test_streams_count_samples_in_their_order():
    ((name, message),) = said(DataLoader(Stream(), batch_size=3))
    assert name == "non-finite-feature"
    assert "dataset index 6" in message


def test_an_unknown_expectation_is_refused():
    with pytest.raises(UsageError, match="no option clases"):
        nanguard.check_loader([], clases=3)
