"""Reads the configuration of a run, and refuses what cannot work."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_SIZED = ("model.width", "model.depth", "model.heads", "data.rows", "data.columns")
SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(zip(_SIZED, (128, 2, 1, 4, 8), strict=True)),
    "small": dict(zip(_SIZED, (256, 6, 4, 8, 16), strict=True)),
    "full": dict(zip(_SIZED, (768, 12, 12, 16, 16), strict=True)),
}


class SettingsError(ValueError):
    """A configuration that no run can be made of."""


def _one_of(*names: str) -> Callable[[Any], str | None]:
    return lambda value: None if value in names else f"has to be one of {', '.join(names)}"


def _number(least: float, *, above: bool = False, empty: bool = False) -> Callable[..., str | None]:
    def check(value: Any) -> str | None:
        if value is None and empty:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return "has to be a number; write 1.0e-4, because YAML takes 1e-4 for text"
        good = math.isfinite(value) and (value > least if above else value >= least)
        return None if good else f"has to be {'above' if above else 'at least'} {least:g}"

    return check


def _count(least: int, *, empty: bool = False) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        if value is None and empty:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            return "has to be a whole number"
        return None if value >= least else f"has to be at least {least}"

    return check


def _flag(value: Any) -> str | None:
    return None if isinstance(value, bool) else "has to be true or false"


def _betas(value: Any) -> str | None:
    good = isinstance(value, list) and len(value) == 2 and all(isinstance(v, float) for v in value)
    return None if good and all(0 <= v < 1 for v in value) else "has to be two numbers in [0, 1)"


# Every key, an example of its value, and what is wrong with a value.
KEYS: dict[str, tuple[str, Callable[[Any], str | None]]] = {
    "size": ("tiny", _one_of(*SIZES)),
    "device": ("auto", _one_of("auto", "cpu", "cuda")),
    "seed": ("0", _count(0)),
    "data.texts": ("2000", _count(1)),
    "data.rows": ("4", _count(1, empty=True)),
    "data.columns": ("8", _count(1, empty=True)),
    "data.faults": (
        "none",
        _one_of("none", "blank-lines", "bad-ids", "nan-pixels", "inf-pixels"),
    ),
    "data.drop_nonfinite": ("false", _flag),
    "data.workers": ("0", _count(0)),
    "codec.vocab_size": ("151643", _count(2)),
    "codec.checked": ("true", _flag),
    "model.name": ("token-image-dit", _one_of("token-image-dit")),
    "model.width": ("128", _count(2, empty=True)),
    "model.depth": ("2", _count(1, empty=True)),
    "model.heads": ("1", _count(1, empty=True)),
    "model.norm": ("rms", _one_of("rms", "no-eps", "eps-outside", "half", "nan-to-num")),
    "model.attention": ("masked", _one_of("masked", "global-test", "per-row")),
    "model.attention_scale": ("head", _one_of("head", "width")),
    "model.adaln_bound": ("1.0", _number(0, above=True, empty=True)),
    "diffusion.timesteps": ("1000", _count(2)),
    "diffusion.schedule": ("linear", _one_of("linear", "cosine", "cosine-bounded")),
    "diffusion.prediction": ("x0", _one_of("x0", "eps")),
    "loss.form": ("masked", _one_of("masked", "bytes", "safe")),
    "training.steps": ("800", _count(1)),
    "training.batch_size": ("4", _count(1)),
    "training.gradient_accumulation_steps": ("2", _count(1)),
    "training.accumulation_divisor": ("steps", _one_of("steps", "index")),
    "training.lr": ("1.0e-5", _number(0, above=True)),
    "training.warmup_steps": ("40", _count(0)),
    "training.max_grad_norm": ("1.0", _number(0)),
    "training.clip_order": ("after-unscale", _one_of("after-unscale", "before-unscale")),
    "training.bad_gradients": ("keep", _one_of("keep", "zero")),
    "training.stop_after_nan": ("5", _count(1)),
    "optimizer.name": ("adamw", _one_of("adamw")),
    "optimizer.weight_decay": ("0.01", _number(0)),
    "optimizer.betas": ("[0.9, 0.999]", _betas),
    "optimizer.eps": ("1.0e-8", _number(0)),
    "optimizer.adaln_lr_factor": ("1.0", _number(0, above=True)),
    "amp.enabled": ("true", _flag),
    "amp.dtype": ("fp16", _one_of("fp16", "bf16")),
    "amp.scope": ("auto", _one_of("auto", "model", "attention")),
    "ema.enabled": ("false", _flag),
    "ema.decay": ("0.99", _number(0)),
    "checkpoint.every_n_steps": ("200", _count(1)),
    "logging.every_n_steps": ("1", _count(1)),
}


@dataclass(frozen=True)
class Settings:
    """The settings of a run by their dotted names, or a section of them."""

    values: dict[str, Any]

    def __getitem__(self, key: str) -> Any:
        if key in self.values:
            return self.values[key]
        section = {k: v for k, v in self.values.items() if k.startswith(f"{key}.")}
        if not section:
            raise KeyError(key)
        return section

    @property
    def tokens(self) -> int:
        """How many tokens an image holds."""
        return int(self["data.rows"] * self["data.columns"])

    def as_tree(self) -> dict[str, Any]:
        """Returns the settings as a configuration file has them."""
        tree: dict[str, Any] = {}
        for key, value in self.values.items():
            *sections, name = key.split(".")
            place = tree
            for section in sections:
                place = place.setdefault(section, {})
            place[name] = value
        return tree


def read_settings(path: Path, changes: list[str], steps: int | None) -> Settings:
    """Returns the settings of a run.

    Args:
        path: The configuration file.
        changes: ``dotted.key=value``, each in place of what the file says.
        steps: How many steps to make, in place of what the file says.

    Raises:
        SettingsError: Something is missing, unknown, or of the wrong kind.
    """
    values = _read(path)
    for change in changes:
        key, sign, text = change.partition("=")
        if not sign or key not in KEYS:
            raise SettingsError(f"--set {change}: write dotted.key=value, with a key of {path}")
        values[key] = _value(change, text)
    if steps is not None:
        values["training.steps"] = steps
    for key, (example, wrong) in KEYS.items():
        if key not in values:
            name = key.rpartition(".")[2]
            raise SettingsError(f"{path}: {key} is missing; add it, e.g. {name}: {example}")
        problem = wrong(values[key])
        if problem:
            raise SettingsError(f"{path}: {key} is {values[key]!r}; it {problem}, e.g. {example}")
    return Settings(_filled(path, values))


def _value(change: str, text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"--set {change}: {text!r} is not a YAML value") from error
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: cannot be read ({error}); name a YAML file") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise SettingsError(f"{path}: holds no settings; begin with size: tiny")
    values = _flat(tree)
    for key in values:
        if key not in KEYS:
            raise SettingsError(f"{path}: {key} is no setting of this run; take it out")
    return values


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found.update(_flat(value, f"{name}.") if isinstance(value, dict) else {name: value})
    return found


def _filled(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Puts the numbers of a size where nothing else is asked for."""
    for key, number in SIZES[values["size"]].items():
        values[key] = number if values[key] is None else values[key]
    width, heads = values["model.width"], values["model.heads"]
    if width % (2 * heads):
        raise SettingsError(
            f"{path}: model.width is {width}; it has to be a multiple of twice the heads ({heads})"
        )
    return values
