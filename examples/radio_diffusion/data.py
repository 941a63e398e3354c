"""Radio maps of random cities: buildings, one transmitter, and the strength of its signal.

The strength falls with the distance, and behind walls with the length of the way through them. A
map holds it in decibels, scaled to [-1, 1]; -1 is the noise floor.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from pathlib import Path

    from settings import Data

FLOOR_DB = -110.0
_AT_ONE_PIXEL_DB = -20.0
_EXPONENT = 2.6
_FADING_DB = 3.0


class DataError(Exception):
    """Maps that cannot be trained on."""


class Sample(NamedTuple):
    """One map, or a batch of them.

    Attributes:
        radio: The signal strength in [-1, 1].
        condition: The buildings, and the distance from the transmitter.
        street: 1 where the map is defined: outside of buildings.
    """

    radio: torch.Tensor
    condition: torch.Tensor
    street: torch.Tensor


class RadioMaps(Dataset[Sample]):
    """Every city in the eight ways it can be turned and mirrored."""

    def __init__(self, radio: np.ndarray, buildings: np.ndarray, distance: np.ndarray) -> None:
        self.radio, self.buildings, self.distance = radio, buildings, distance

    def __len__(self) -> int:
        return 8 * len(self.radio)

    def __getitem__(self, index: int) -> Sample:
        city, turn = index % len(self.radio), index // len(self.radio)
        radio, walls, far = (
            torch.from_numpy(_turned(part[city], turn))
            for part in (self.radio, self.buildings, self.distance)
        )
        return Sample(radio[None], torch.stack([walls, far]), 1 - walls[None])


def load_maps(settings: Data, seed: int, folder: Path) -> RadioMaps:
    """Returns the maps for training; makes them first if the folder does not have them.

    Raises:
        DataError: A map is not finite and ``on_bad_map`` is ``stop``, or nothing is left.
    """
    path = folder / f"maps-{settings.image_size}-{settings.cities}-{seed}.npz"
    parts = _read(path) or _write(path, *make_cities(settings, seed))
    radio, buildings, distance = _with_faults(settings, seed, *parts)
    np.save(folder / "radio.npy", radio)  # what is trained on, faults included
    return RadioMaps(*_examined(settings, radio, buildings, distance))


def held_out(settings: Data, count: int = 4) -> Sample:
    """Returns a batch of maps of cities that are never trained on."""
    maps = RadioMaps(*make_cities(replace(settings, cities=count), seed=987_654))
    parts = zip(*(maps[i] for i in range(count)), strict=True)
    return Sample(*(torch.stack(part) for part in parts))


def make_cities(settings: Data, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns signal strength, buildings and distance of every city."""
    rng = np.random.default_rng(seed)
    size, loss = settings.image_size, settings.wall_loss_db
    cities = [_city(size, loss, rng) for _ in range(settings.cities)]
    radio, buildings, distance = (np.stack(p).astype(np.float32) for p in zip(*cities, strict=True))
    return radio, buildings, distance


def _city(
    size: int, wall_loss: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    walls = np.zeros((size, size), dtype=np.float32)
    for _ in range(rng.integers(6, 11)):
        height, width = rng.integers(size // 8, size // 3, 2)
        row, column = rng.integers(0, size - height), rng.integers(0, size - width)
        walls[row : row + height, column : column + width] = 1
    free = np.argwhere(walls == 0)
    transmitter = free[rng.integers(len(free))].astype(np.float32)
    rows, columns = np.mgrid[:size, :size].astype(np.float32)
    far = np.hypot(rows - transmitter[0], columns - transmitter[1])
    strength = _AT_ONE_PIXEL_DB - 10 * _EXPONENT * np.log10(1 + far * 256 / size)
    strength -= wall_loss * 32 / size * _way_through_walls(walls, transmitter, far)
    strength += _FADING_DB * _smooth_field(size, rng)
    strength[walls == 1] = FLOOR_DB
    strength = np.clip(strength, FLOOR_DB, 0.0)
    return 1 - 2 * strength / FLOOR_DB, walls, np.log1p(far) / np.log1p(size) * 2 - 1


def _way_through_walls(walls: np.ndarray, transmitter: np.ndarray, far: np.ndarray) -> np.ndarray:
    """Returns how many pixels of wall lie between the transmitter and each pixel."""
    size = len(walls)
    pixels = np.stack(np.mgrid[:size, :size]).astype(np.float32)
    total = np.zeros_like(walls)
    for share in (np.arange(size, dtype=np.float32) + 0.5) / size:  # one step along all rays
        at = transmitter[:, None, None] + share * (pixels - transmitter[:, None, None])
        row, column = np.rint(at).astype(np.intp)
        total += walls[row, column]
    return total * far / size


def _smooth_field(size: int, rng: np.random.Generator) -> np.ndarray:
    """Returns a smooth random field with spread 1."""
    waves = np.fft.fftfreq(size)
    low = np.exp(-((waves[:, None] ** 2 + waves[None] ** 2) * (size / 2) ** 2) / 8)
    field = np.fft.ifft2(np.fft.fft2(rng.standard_normal((size, size))) * low).real
    return (field / (field.std() + 1e-6)).astype(np.float32)


def _with_faults(
    settings: Data, seed: int, radio: np.ndarray, buildings: np.ndarray, distance: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the maps as a broken measurement would have left them."""
    rng = np.random.default_rng(seed + 1)
    radio = radio.copy()
    count = min(settings.corrupt_maps, len(radio))
    for city in rng.choice(len(radio), count, replace=False):
        row = rng.integers(settings.image_size - 2)
        radio[city, row : row + 2] = np.nan
    radio[: settings.blank_maps] = -1.0
    return radio, buildings, distance


def _examined(settings: Data, *parts: np.ndarray) -> list[np.ndarray]:
    """Returns the parts without the maps that are not finite, or as they are."""
    if settings.on_bad_map == "keep":
        return list(parts)
    bad = ~np.all([np.isfinite(part).all(axis=(1, 2)) for part in parts], axis=0)
    if not bad.any():
        return list(parts)
    named = ", ".join(map(str, np.flatnonzero(bad)[:10]))
    if settings.on_bad_map == "stop":
        raise DataError(
            f"{bad.sum()} of {len(bad)} maps are not finite (map {named}); "
            "repair them, or leave them out with data.on_bad_map: drop"
        )
    print(f"data: {bad.sum()} of {len(bad)} maps are not finite and left out (map {named})")
    if bad.all():
        raise DataError("no map is left")
    return [part[~bad] for part in parts]


def _turned(part: np.ndarray, turn: int) -> np.ndarray:
    part = np.rot90(part, turn % 4)
    return np.ascontiguousarray(part[:, ::-1] if turn >= 4 else part)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    if not path.exists():
        return None
    try:
        with np.load(path) as stored:
            return stored["radio"], stored["buildings"], stored["distance"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read ({error}); remove it to make it anew") from error


def _write(path: Path, *parts: np.ndarray) -> tuple[np.ndarray, ...]:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name("partial-" + path.name)
    np.savez(partial, **dict(zip(("radio", "buildings", "distance"), parts, strict=True)))
    partial.replace(path)
    return parts
