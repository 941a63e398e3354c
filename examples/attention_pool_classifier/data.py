"""Sequences with a motif: each class has a short pattern that occurs once, somewhere in noise.

python data.py --config config.yaml --out runs/last
"""

from __future__ import annotations

import os
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from settings import Settings, arguments, read, stop
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from pathlib import Path

MOTIF = 4
NAMES = ("train", "val")


def prepare(settings: Settings, out: Path) -> dict[str, Path]:
    """Writes the data if it is not there yet; returns where it is."""
    paths = {name: out / settings[f"data.{name}_path"] for name in NAMES}
    if not all(path.exists() for path in paths.values()):
        if any(path.exists() for path in paths.values()):
            lost = next(path for path in paths.values() if not path.exists())
            stop(f"{lost} is missing while other data is there; remove the folder to make both")
        for name, path in paths.items():
            _write(path, _sequences(settings, name))
    return paths


def load(path: Path, settings: Settings) -> TensorDataset:
    """Reads one file: features, lengths and labels."""
    try:
        with np.load(path, allow_pickle=False) as file:
            found = {key: torch.from_numpy(file[key]) for key in ("features", "length", "label")}
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        stop(f"{path} cannot be read as data ({error}); remove it to make it again")
    if found["features"].ndim != 3 or found["features"].shape[2] != settings["data.features"]:
        shape = tuple(found["features"].shape)
        stop(f"{path} holds features of shape {shape}, not of {settings['data.features']} features")
    return TensorDataset(found["features"], found["length"], found["label"])


def loaders(settings: Settings, out: Path) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Returns the loaders of training and validation."""
    paths = prepare(settings, out)
    size = settings["training.batch_size"]
    order = torch.Generator().manual_seed(settings["seed"])
    train = load(paths["train"], settings)
    last = settings["data.drop_last"]
    return (
        DataLoader(train, size, shuffle=True, generator=order, drop_last=last),
        DataLoader(load(paths["val"], settings), 2 * size),
    )


def scan(loader: DataLoader[Any], classes: int) -> None:
    """Looks through a loader for values that no training survives; ends the program if any."""
    at = 0
    for features, _, label in loader:
        rows = ~torch.isfinite(features).flatten(1).all(dim=1)
        if rows.any():
            stop(f"the loader yields NaN or Inf (sample {at + int(rows.nonzero()[0])} of the scan)")
        if not 0 <= int(label.min()) <= int(label.max()) < classes:
            worst = int(label.max()) if int(label.max()) >= classes else int(label.min())
            stop(
                f"the loader yields label {worst}; there are {classes} classes, 0 to {classes - 1}"
            )
        at += len(label)


def _sequences(settings: Settings, name: str) -> dict[str, np.ndarray]:
    """Makes noise of varying length and puts the motif of a class into it."""
    classes, width = settings["data.num_classes"], settings["data.features"]
    longest = settings["data.length"]
    motifs = np.random.default_rng(7).normal(0, 1.0, (classes, MOTIF, width))
    number = settings["data.samples"] if name == "train" else settings["data.samples"] // 4
    random = np.random.default_rng([settings["seed"], NAMES.index(name)])
    label = random.permutation(np.arange(number) % classes)
    length = random.integers(longest // 2, longest + 1, number)
    features = random.normal(0, 0.6, (number, longest, width))
    for row, (which, end) in enumerate(zip(label, length, strict=True)):
        start = random.integers(0, end - MOTIF + 1)
        features[row, start : start + MOTIF] += motifs[which]
        features[row, end:] = 0.0
    features *= settings["data.gain"]
    if name == "train" and settings["data.bad_records"]:
        bad = random.choice(number, settings["data.bad_records"], replace=False)
        features[bad, 0, 0] = np.nan
    return {
        "features": features.astype(np.float32),
        "length": length,
        "label": label + settings["data.first_label"],
    }


def _write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    with part.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]
    part.replace(path)


if __name__ == "__main__":
    args = arguments(str(__doc__))
    for made in prepare(read(args), args.out).values():
        print(made)
