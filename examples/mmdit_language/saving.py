"""Checkpoints: written whole or not at all, and enough to go on bit for bit."""

from __future__ import annotations

import os
import pickle
import re

import torch
from settings import ConfigError

_NAME = re.compile(r"step-(\d+)\.pt")


def save(folder, step, run, shape, keep):
    """Writes a checkpoint after ``step`` steps, and removes the oldest beyond ``keep``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:06d}.pt"
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    state = {name: part.state_dict() for name, part in run.items()}
    state |= {"step": step, "shape": shape, "rng": {"cpu": torch.get_rng_state(), "cuda": cuda}}
    half_written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    torch.save(state, half_written)
    half_written.replace(path)
    kept = sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))
    for old in kept[:-keep]:
        old.unlink()
    return path


def load(path, run, shape):
    """Puts a run back to where a checkpoint left it; returns the step."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        why = "it is no checkpoint, or one that needs code of its own to be run"
        raise ConfigError(f"{path}: cannot be loaded: {why}; resume from another one") from None
    except (OSError, RuntimeError, EOFError) as error:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"{path}: cannot be loaded: {why}; resume from another one") from None
    if not isinstance(state, dict):
        raise ConfigError(f"{path}: is no checkpoint of this run: it holds no dict")
    missing = [name for name in (*run, "step", "shape", "rng") if name not in state]
    if missing:
        raise ConfigError(f"{path}: is no checkpoint of this run: {missing[0]} is not in it")
    for key, value in shape.items():
        if state["shape"].get(key) != value:
            raise ConfigError(
                f"{path}: is of another model: {key} is {state['shape'].get(key)} there, and "
                f"{value} in the config; resume with the config it was trained with"
            )
    for name, part in run.items():
        part.load_state_dict(state[name])
    torch.set_rng_state(state["rng"]["cpu"])
    if torch.cuda.is_available() and state["rng"]["cuda"]:
        torch.cuda.set_rng_state_all(state["rng"]["cuda"])
    return state["step"]
