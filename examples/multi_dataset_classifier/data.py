"""Six data sets of pictures, each with classes of its own, and their JSON lines.

    python data.py --config config.yaml --out runs/last

A picture is the pattern of its class, some noise, and the tint of its data set. Patterns and noise
come from a seed, so only the lines are written: which picture, of which data set, with which label.
Classes are long-tailed, as they are in such collections: the last one of each has one picture.
"""

from __future__ import annotations

import functools
import json
import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from settings import Settings, arguments, read, stop
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    from pathlib import Path

MOST = 24
NOISES = 4096
NOISE = 1.5
OTHER_NAMES = {"veg200": "VegFru-Veg200"}


def prepare(settings: Settings, out: Path) -> dict[str, list[Path]]:
    """Writes the lines if they are not there yet; returns where they are."""
    found = {
        part: [out / str(name) for name in settings[f"data.{part}_jsonl_list"]]
        for part in ("train", "val")
    }
    every = [path for paths in found.values() for path in paths]
    there = [path for path in every if path.exists()]
    if len(there) < len(every):
        if there:
            lost = next(path for path in every if not path.exists())
            stop(f"{lost} is missing while other data is there; remove the folder to make it anew")
        if len(found["train"]) != len(settings.datasets) or len(found["val"]) != len(
            found["train"]
        ):
            stop("data.train_jsonl_list and val_jsonl_list need one file for each data set")
        _write_all(settings, found)
    return found


def _write_all(settings: Settings, found: dict[str, list[Path]]) -> None:
    number = 0
    for place, (name, about) in enumerate(settings.datasets.items()):
        random = np.random.default_rng([settings["seed"], place])
        classes, most = about["num_classes"], MOST * (4 if settings["size"] == "full" else 1)
        counts = most ** (1 - np.arange(classes) / max(1, classes - 1))
        label = np.repeat(np.arange(classes), np.maximum(1, counts.round().astype(int)))
        label = random.permutation(label)
        # Every class has to be evaluated, the rare ones, too.
        val = random.choice(label, int(len(label) * about["eval_ratio"]))
        val = np.concatenate([np.arange(classes), val])
        for part, values in (("train", label), ("val", val)):
            lines = []
            for value in values:
                lines.append(_line(settings, name, number, int(value)))
                number += 1
            _write(found[part][place], lines)


def _line(settings: Settings, name: str, number: int, label: int) -> str:
    other = settings["data.exported_names"] and number % 7 == 0
    record = {
        "image": number,
        "dataset_name": OTHER_NAMES.get(name, name) if other else name,
        "class_name": f"{name}_{label:04d}",
        "label": label + settings["data.first_label"],
    }
    return json.dumps(record)


def _write(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text("\n".join(lines) + "\n", encoding="utf-8")
    part.replace(path)


class Pictures(Dataset[Any]):
    """The pictures of some JSON lines: picture, number of the data set, label within it."""

    def __init__(self, paths: list[Path], settings: Settings) -> None:
        self.names = list(settings.datasets)
        self.records = [record for path in paths for record in _records(path, settings)]
        self.image = torch.tensor([record["image"] for record in self.records])
        # A name that no data set has is given number -1.
        place = {name: index for index, name in enumerate(self.names)}
        self.dataset = torch.tensor([place.get(r["dataset_name"], -1) for r in self.records])
        self.label = torch.tensor([record["label"] for record in self.records])
        ids = {key: index for index, key in enumerate(_class_names(settings))}
        self.pattern = torch.tensor([ids[record["class_name"]] for record in self.records])
        self.patterns, self.noise = _patterns(len(ids), settings["model.image_size"])

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        """Returns one picture with its data set and label."""
        return tuple(part[0] for part in self.__getitems__([index]))

    def __getitems__(self, indices: list[int]) -> Any:
        """Returns a whole batch at once, which is what the loader asks for."""
        index = torch.tensor(indices)
        noise = self.noise[self.image[index] * 7919 % NOISES]
        picture = self.patterns[self.pattern[index]] + NOISE * noise
        return picture, self.dataset[index], self.label[index]


@functools.lru_cache(1)
def _patterns(classes: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(11)
    shape = (3, side, side)
    patterns = torch.randn(classes, *shape, generator=random)
    return patterns, torch.randn(NOISES, *shape, generator=random)


def _as_it_is(batch: Any) -> Any:
    return batch


def _class_names(settings: Settings) -> list[str]:
    return [
        f"{name}_{label:04d}"
        for name, about in settings.datasets.items()
        for label in range(about["num_classes"])
    ]


def _records(path: Path, settings: Settings) -> list[dict[str, Any]]:
    found = []
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        stop(f"{path} cannot be read ({error.strerror}); remove the folder to make it anew")
    classes = set(_class_names(settings))
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
            known = record["class_name"] in classes and isinstance(record["label"], int)
            found.append({**record, "image": int(record["image"]), "line": number})
        except (ValueError, KeyError, TypeError) as error:
            stop(f"{path}, line {number} is no record: {error}")
        if not known:
            stop(f"{path}, line {number}: class {record['class_name']!r} is not of these data sets")
    return _share(found, path, settings)


def _share(records: list[dict[str, Any]], path: Path, settings: Settings) -> list[dict[str, Any]]:
    only, part = settings["datasets.only"], settings["data.fraction"]
    if only != "all" and not path.name.startswith(f"{only}_"):
        return []
    return records[: max(1, round(len(records) * part))]


def confirm_labels(pictures: Pictures, settings: Settings) -> None:
    """Ends the program if a label is not one of its data set."""
    classes = {name: about["num_classes"] for name, about in settings.datasets.items()}
    for record in pictures.records:
        most = classes.get(record["dataset_name"], 0)
        if not 0 <= record["label"] < most:
            stop(
                f"label {record['label']} of {record['dataset_name']} (line {record['line']}): it "
                f"has {most} classes, from 0 on; repair the export"
            )


def loaders(settings: Settings, out: Path) -> tuple[DataLoader[Any], dict[str, DataLoader[Any]]]:
    """Returns the loader of training, and those of evaluation by data set."""
    paths = prepare(settings, out)
    train = Pictures(paths["train"], settings)
    if not len(train):
        stop("there is no training data left; raise data.fraction")
    if settings["data.on_bad_label"] == "refuse":
        confirm_labels(train, settings)
    size = min(settings["training.batch_size"], len(train))
    evaluation = {}
    for name, path in zip(settings.datasets, paths["val"], strict=True):
        pictures = Pictures([path], settings)
        if len(pictures):
            evaluation[name] = DataLoader(pictures, 256, collate_fn=_as_it_is)
    order = torch.Generator().manual_seed(settings["seed"])
    training = DataLoader(
        train, size, shuffle=True, generator=order, drop_last=True, collate_fn=_as_it_is
    )
    return training, evaluation


if __name__ == "__main__":
    args = arguments(str(__doc__))
    for paths in prepare(read(args), args.out).values():
        print("\n".join(map(str, paths)))
