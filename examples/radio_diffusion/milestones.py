"""Milestones: the whole state of a run, every so many steps."""

from __future__ import annotations

import os
import pickle
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path


class CheckpointError(Exception):
    """A checkpoint that this run cannot go on from."""


def milestone(folder: Path, step: int) -> Path:
    """Returns the path of the milestone of a step."""
    return folder / "checkpoints" / f"milestone-{step:06d}.pt"


def save(path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint; a reader sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def load(path: Path, parts: dict[str, Any]) -> int:
    """Puts a checkpoint into the parts of a run and returns its step.

    Raises:
        CheckpointError: It is not there, is damaged, or is one of another model.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint {path}") from error
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(f"{path} cannot be read ({reason})") from error
    if not isinstance(state, dict) or not {"step", *parts} <= state.keys():
        raise CheckpointError(f"{path} is no checkpoint of this training")
    try:
        for name, part in parts.items():
            part.load_state_dict(state[name])
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is a checkpoint of another model: {_short(error)}"
        ) from error
    return int(state["step"])


def _short(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[min(1, len(lines) - 1)].strip()[:160] if lines else type(error).__name__
