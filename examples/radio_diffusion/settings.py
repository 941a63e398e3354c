"""The settings of a run: read from YAML, changed by --set, checked before anything starts."""

from __future__ import annotations

import difflib
import re
import types
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

if TYPE_CHECKING:
    from pathlib import Path

# What a size stands for, unless a file or --set says otherwise.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model.width": 32,
        "model.multipliers": [1, 2],
        "model.blocks": 1,
        "data.image_size": 32,
        "data.cities": 24,
    },
    "small": {
        "model.width": 64,
        "model.multipliers": [1, 2, 4],
        "model.blocks": 2,
        "data.image_size": 64,
        "data.cities": 64,
    },
    "full": {
        "model.width": 160,
        "model.multipliers": [1, 2, 4, 4],
        "model.blocks": 2,
        "data.image_size": 256,
        "data.cities": 96,
    },
}


class SettingsError(Exception):
    """A setting that is missing, or that no run can have."""


@dataclass(frozen=True)
class Model:
    """The diffusion and its network."""

    width: int
    multipliers: list[int]
    blocks: int
    timesteps: int
    name: str = "radio_diffusion"
    objective: Literal["pred_KC"] = "pred_KC"
    loss_type: Literal["l2"] = "l2"
    norm: Literal["group", "none"] = "group"
    first_timestep: int = 1
    sampling_timesteps: int = 5
    loss_weight_max: float | None = 100.0
    loss_weight_eps: float = 1e-8
    loss_vlb_weight: float = 0.0
    prediction_bound: float | None = None


@dataclass(frozen=True)
class Vae:
    """The encoder of the maps."""

    embed_dim: int = 3
    scale_factor: float | Literal["auto"] = "auto"


@dataclass(frozen=True)
class Data:
    """The maps."""

    batch_size: int
    image_size: int
    cities: int
    name: str = "radio"
    wall_loss_db: float = 6.0
    corrupt_maps: int = 0
    blank_maps: int = 0
    on_bad_map: Literal["keep", "drop", "stop"] = "stop"


@dataclass(frozen=True)
class Trainer:
    """The training loop."""

    lr: float
    train_num_steps: int
    optimizer: Literal["adamw"] = "adamw"
    min_lr: float = 0.0
    warmup_steps: int = 0
    gradient_accumulate_every: int = 1
    save_and_sample_every: int = 1000
    resume_milestone: int = 0
    clip: float | None = None
    amp: bool = False
    fp16: bool = False
    nan_loss: Literal["ignore", "zero", "stop"] = "stop"
    check_inputs: bool = True
    log_every: int = 1
    ema_decay: float = 0.995
    ema_update_after_step: int = 0
    ema_update_every: int = 1


@dataclass(frozen=True)
class Settings:
    """All settings of a run."""

    model: Model
    data: Data
    trainer: Trainer
    vae: Vae
    size: Literal["tiny", "small", "full"] = "tiny"
    seed: int = 0
    device: str = "auto"
    accelerate_config: str | None = None
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"


_NUMBER = re.compile(r"[-+]?[0-9.]+[eE][-+]?[0-9]+")
# What is at least 1, and what is above 0 if it is set.
_COUNTS = (
    "model.width", "model.blocks", "model.timesteps", "model.sampling_timesteps",
    "vae.embed_dim", "data.batch_size", "data.image_size", "data.cities",
    "trainer.train_num_steps", "trainer.gradient_accumulate_every",
    "trainer.save_and_sample_every", "trainer.log_every", "trainer.ema_update_every",
)  # fmt: skip
_POSITIVE = (
    "trainer.lr", "trainer.clip", "model.loss_weight_max", "model.prediction_bound",
    "vae.scale_factor",
)  # fmt: skip
_NOT_NEGATIVE = (
    "trainer.min_lr", "trainer.warmup_steps", "trainer.resume_milestone", "model.first_timestep",
    "model.loss_weight_eps", "data.corrupt_maps", "data.blank_maps", "data.wall_loss_db",
    "trainer.ema_update_after_step",
)  # fmt: skip
_EXAMPLES = {
    "trainer.lr": "1.0e-5",
    "trainer.train_num_steps": "50000",
    "data.batch_size": "16",
    "model.timesteps": "1000",
}


def read_settings(path: Path, changes: list[str]) -> Settings:
    """Returns the settings of a file.

    Args:
        path: The YAML file.
        changes: What ``--set`` was given, such as ``trainer.lr=1.0e-5``.

    Raises:
        SettingsError: The file cannot be read, or a setting is missing or wrong.
    """
    values = _mapping(path)
    for change in changes:
        _put(values, *_split(change), replace=True)
    size = values.get("size", "tiny")
    for key, value in SIZES.get(size if isinstance(size, str) else "", {}).items():
        _put(values, key, value, replace=False)
    values["mixed_precision"] = _mixed_precision(path, values.get("accelerate_config"))
    settings = _build(Settings, values, "", path.name)
    _check_ranges(settings, path.name)
    return settings


def _mapping(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} cannot be read ({error})") from error
    except yaml.YAMLError as error:
        line = str(error).replace("\n", " ")
        raise SettingsError(f"{path.name} is no YAML ({line})") from error
    if not isinstance(values, dict):
        raise SettingsError(f"{path.name} holds no settings; it begins with a mapping: model: ...")
    return values


def _split(change: str) -> tuple[str, Any]:
    key, equals, text = change.partition("=")
    if not equals or not key:
        raise SettingsError(f"--set {change}: write it as key=value, e.g. trainer.lr=1.0e-5")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"--set {change}: {text!r} is no value") from error
    # On a command line nobody writes 1.0e-5 for 1e-5, as YAML 1.1 wants it.
    is_number = isinstance(value, str) and _NUMBER.fullmatch(value)
    return key, float(value) if is_number else value


def _put(values: dict[str, Any], key: str, value: Any, *, replace: bool) -> None:
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise SettingsError(f"{key} cannot be set: {section} is no section")
    if replace or last not in values:
        values[last] = value


def _mixed_precision(path: Path, name: object) -> str:
    if name is None:
        return "no"
    values = _mapping(path.parent / str(name))
    # YAML 1.1 reads a bare no as false.
    said = values.get("mixed_precision", "no")
    return "no" if said is False else str(said)


def _build(kind: type, values: object, section: str, file: str) -> Any:
    if values is None:
        values = {}
    if not isinstance(values, dict):
        raise SettingsError(f"{file}: {section.rstrip('.')} has to be a section of settings")
    hints = get_type_hints(kind)
    for key in values:
        if key not in hints:
            near = difflib.get_close_matches(str(key), hints, 1)
            meant = f"; did you mean {section}{near[0]}?" if near else ""
            raise SettingsError(f"{file}: there is no setting {section}{key}{meant}")
    found = {}
    for field in fields(kind):
        name, hint = field.name, hints[field.name]
        if is_dataclass(hint):
            found[name] = _build(hint, values.get(name), f"{section}{name}.", file)
        elif name in values:
            found[name] = _typed(values[name], hint, section + name, file)
        elif field.default is MISSING:
            example = _EXAMPLES.get(section + name, "1")
            message = f"{file}: {section}{name} is missing; add it, e.g. {name}: {example}"
            raise SettingsError(message)
    return kind(**found)


def _typed(value: object, hint: Any, key: str, file: str) -> Any:
    """Returns a value as the type of its setting."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in kinds:
        if get_origin(kind) is Literal and value in get_args(kind):
            return value
        if kind is type(None) and value is None:
            return None
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        if kind is int and isinstance(value, float) and value == int(value):
            return int(value)
        if kind in (int, bool, str) and type(value) is kind:
            return value
        if get_origin(kind) is list and isinstance(value, list) and value:
            return [_typed(one, get_args(kind)[0], key, file) for one in value]
    raise SettingsError(f"{file}: {key} is {value!r}, {_wanted(kinds, value)}")


def _wanted(kinds: tuple[Any, ...], value: object) -> str:
    words = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}
    if float in kinds and isinstance(value, str):
        return "a text; write a number with a point, e.g. 1.0e-5"
    choices = [repr(one) for kind in kinds for one in get_args(kind) if get_origin(kind) is Literal]
    named = [words[kind] for kind in kinds if kind in words]
    return "where " + " or ".join(named + choices or ["a list of whole numbers"]) + " is needed"


def _check_ranges(settings: Settings, file: str) -> None:
    for keys, holds, what in (
        (_COUNTS, lambda x: x >= 1, "at least 1"),
        (_POSITIVE, lambda x: 0 < x < float("inf"), "above 0"),
        (_NOT_NEGATIVE, lambda x: 0 <= x < float("inf"), "0 or more"),
    ):
        for key in keys:
            section, name = key.split(".")
            value = getattr(getattr(settings, section), name)
            if isinstance(value, (int, float)) and not holds(value):
                raise SettingsError(f"{file}: {key} is {value!r}; it has to be {what}")
    if settings.data.image_size % (4 * 2 ** (len(settings.model.multipliers) - 1)):
        levels = len(settings.model.multipliers)
        raise SettingsError(
            f"{file}: data.image_size is {settings.data.image_size}; "
            f"{levels} levels need a multiple of {4 * 2 ** (levels - 1)}"
        )
