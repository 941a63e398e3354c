"""The configuration: read, changed by ``--set``, and checked before anything is trained."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import yaml
from model import SIZES

_NUMBER, _COUNT, _SWITCH, _NAME = "a number", "a whole number", "true or false", "a word"
# key: (what it is, the smallest value or the choices, an example)
_KEYS = {
    "size": (_NAME, tuple(SIZES), "tiny"),
    "seed": (_COUNT, 0, "1"),
    "device": (_NAME, None, "auto"),
    "model.name": (_NAME, ("mmdit",), "mmdit"),
    "model.attention": (_NAME, ("joint", "fused"), "fused"),
    "model.qk_norm": (_SWITCH, None, "false"),
    "data.documents": (_COUNT, 40, "4000"),
    "data.blank_lines": (_COUNT, 0, "12"),
    "data.latent_scale": (_NUMBER, 0.0, "1.0"),
    "diffusion.min_mask_ratio": (_NUMBER, 0.0, "0.15"),
    "diffusion.max_mask_ratio": (_NUMBER, 0.0, "1.0"),
    "loss.text": (_NAME, ("mean", "safe"), "safe"),
    "loss.latent": (_NAME, ("mse", "normalised"), "mse"),
    "training.optimizer": (_NAME, ("adamw",), "adamw"),
    "training.learning_rate": (_NUMBER, 1e-12, "1.0e-4"),
    "training.min_lr": (_NUMBER, 0.0, "1.0e-5"),
    "training.warmup_steps": (_COUNT, 0, "40"),
    "training.max_steps": (_COUNT, 1, "400"),
    "training.batch_size": (_COUNT, 1, "16"),
    "training.gradient_accumulation_steps": (_COUNT, 1, "2"),
    "training.max_grad_norm": (_NUMBER, 0.0, "1.0"),
    "training.weight_decay": (_NUMBER, 0.0, "0.01"),
    "training.mixed_precision": (_NAME, ("bf16", "fp32"), "bf16"),
    "training.latent_loss_weight": (_NUMBER, 0.0, "0.1"),
    "training.on_nan": (_NAME, ("zero", "none", "skip"), "skip"),
    "training.save_steps": (_COUNT, 1, "1000"),
    "training.save_total_limit": (_COUNT, 1, "3"),
    "training.eval_steps": (_COUNT, 1, "1000"),
}
_MAY_BE_EMPTY = {"loss.clamp": (_NUMBER, 0.0, "100")}


class ConfigError(Exception):
    """A run that cannot begin, and what to change."""


def arguments(words=None):
    """Returns what the command line says."""
    parser = argparse.ArgumentParser(description="Trains the latent diffusion language model.")
    parser.add_argument("--config", default="config.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", default="runs/mmdit", help="where log and checkpoints go")
    parser.add_argument("--resume", metavar="CHECKPOINT")
    parser.add_argument("--steps", type=int, help="stop here; the schedule stays as it is")
    return parser.parse_args(words)


def read(path, changes=()):
    """Returns the settings as one dict with dotted keys."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}; name one with --config") from None
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: holds no settings; begin with the config.yaml beside train.py")
    found = dict(_flat(tree))
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise ConfigError(f"--set {change}: has no value; write --set KEY=VALUE")
        found[key.strip()] = _value(value)
    known = {**_KEYS, **_MAY_BE_EMPTY}
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ConfigError(
            f"{path}: {unknown[0]} is no setting of this run; there are: {', '.join(known)}"
        )
    return {key: _checked(path, key, found) for key in known}


def _checked(path, key, found):
    what, limit, example = {**_KEYS, **_MAY_BE_EMPTY}[key]
    name = key.rpartition(".")[2]
    if found.get(key) is None and key in _MAY_BE_EMPTY:
        return None
    if key not in found:
        raise ConfigError(f"{path}: {key} is missing; add it, e.g. {name}: {example}")
    value = found[key]
    if not _is(value, what):
        raise ConfigError(f"{path}: {key} is {value!r}, not {what}; e.g. {name}: {example}")
    if isinstance(limit, tuple) and value not in limit:
        raise ConfigError(f"{path}: {key} is {value!r}; it can be {', '.join(limit)}")
    if isinstance(limit, (int, float)) and value < limit:
        raise ConfigError(f"{path}: {key} is {value}; it has to be {limit} or more")
    return value


def _is(value, what):
    if what == _SWITCH or isinstance(value, bool):
        return what == _SWITCH and isinstance(value, bool)
    if what == _NUMBER:
        return isinstance(value, (int, float)) and math.isfinite(value)
    return isinstance(value, int if what == _COUNT else str)


def _flat(tree, above=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _value(text):
    """Returns a value of the command line; YAML reads 1e-4 as text, people mean a number."""
    try:
        value = yaml.safe_load(text)
        return float(value) if isinstance(value, str) else value
    except (ValueError, yaml.YAMLError):
        return text
