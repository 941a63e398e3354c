"""Reads the configuration, and says in one line what is wrong with it."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import yaml

NUMBER = (int, float)
# Every key: the types it may have, an example, and whether it may be left empty.
KEYS: dict[str, tuple[tuple[type, ...], str, bool]] = {
    "size": ((str,), "tiny", False),
    "seed": ((int,), "0", False),
    "device": ((str,), "auto", False),
    "data.train_path": ((str,), "data/train.npz", False),
    "data.val_path": ((str,), "data/val.npz", False),
    "data.num_classes": ((int,), "6", False),
    "data.samples": ((int,), "384", True),
    "data.length": ((int,), "24", True),
    "data.features": ((int,), "12", True),
    "data.gain": (NUMBER, "1.0", False),
    "data.bad_records": ((int,), "0", False),
    "data.first_label": ((int,), "0", False),
    "data.scan": ((bool,), "true", False),
    "data.even_batches": ((bool,), "true", False),
    "data.drop_last": ((bool,), "true", False),
    "model.name": ((str,), "attn_pool", False),
    "model.width": ((int,), "48", True),
    "model.layers": ((int,), "2", True),
    "model.norm": ((str,), "layer", False),
    "model.init": ((str,), "default", False),
    "model.score_bound": (NUMBER, "10.0", True),
    "training.epochs": ((int,), "50", False),
    "training.batch_size": ((int,), "16", False),
    "training.gradient_accumulation_steps": ((int,), "1", False),
    "training.optimizer": ((str,), "adamw", False),
    "training.lr": (NUMBER, "5.0e-5", False),
    "training.weight_decay": (NUMBER, "1.0e-4", False),
    "training.adam_epsilon": (NUMBER, "1.0e-8", False),
    "training.scheduler": ((str,), "cosine", False),
    "training.warmup_epochs": ((int,), "5", True),
    "training.max_grad_norm": (NUMBER, "1.0", True),
    "training.label_smoothing": (NUMBER, "0.1", False),
    "training.mixed_precision": ((str,), "'no'", False),
    "training.on_nan": ((str,), "skip-together", False),
    "training.save_every_epochs": ((int,), "1", False),
    "training.timeout_s": (NUMBER, "600", False),
    "training.logging_nan_inf_filter": ((bool,), "false", False),
    "training.tensorboard": ((bool,), "true", False),
}
OPTIONAL = {"training.max_grad_norm", "training.warmup_epochs", "model.score_bound"}
CHOICES = {
    "size": ("tiny", "small", "full"),
    "device": ("auto", "cpu", "cuda"),
    "model.norm": ("layer", "batch", "none"),
    "model.init": ("default", "empty", "zero-temperature", "large"),
    "training.optimizer": ("adamw", "sgd"),
    "training.scheduler": ("cosine", "constant"),
    "training.mixed_precision": ("no", "bf16", "fp16"),
    "training.on_nan": ("go-on", "skip-together", "skip-alone"),
}
# What a size fills in where the configuration leaves a key empty.
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"samples": 320, "length": 24, "features": 12, "width": 48, "layers": 2},
    "small": {"samples": 4096, "length": 64, "features": 32, "width": 128, "layers": 4},
    "full": {"samples": 60_000, "length": 512, "features": 128, "width": 512, "layers": 8},
}
# The options of most scripts for Accelerate, as launch scripts hand them over.
OPTIONS = {
    "learning_rate": "training.lr",
    "lr_scheduler": "training.scheduler",
    "warmup_epochs": "training.warmup_epochs",
    "max_grad_norm": "training.max_grad_norm",
    "adam_weight_decay": "training.weight_decay",
    "adam_epsilon": "training.adam_epsilon",
    "label_smoothing": "training.label_smoothing",
    "num_train_epochs": "training.epochs",
    "train_batch_size": "training.batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "save_every_epochs": "training.save_every_epochs",
    "seed": "seed",
}


class Settings:
    """The configuration by dotted key, complete and of the right types."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def __getitem__(self, key: str) -> Any:
        return self.values[key]

    def write(self, path: Path) -> None:
        """Writes the configuration as it counts, after every --set."""
        tree: dict[str, Any] = {}
        for key, value in self.values.items():
            section, _, leaf = key.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[leaf] = value
        path.write_text(yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")


def stop(message: str) -> NoReturn:
    """Ends the program before training has begun; one rank says why."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


def arguments(about: str) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--config", default="config.yaml", help="the configuration, YAML")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/last"), help="log, checkpoints, data"
    )
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps")
    for name in OPTIONS:
        parser.add_argument(f"--{name}", help=f"the same as --set {OPTIONS[name]}=VALUE")
    return parser.parse_args()


def read(args: argparse.Namespace) -> Settings:
    """Returns the configuration with what the command line changes in it."""
    values = _flat(_load(args.config), args.config)
    given = {OPTIONS[name]: getattr(args, name) for name in OPTIONS if getattr(args, name)}
    for key, text in [*given.items(), *(_pair(one) for one in args.sets)]:
        values[key] = _number(yaml.safe_load(text))
    _judge(values, args.config)
    for key in KEYS:
        if values.get(key) is None:
            values[key] = SIZES[values["size"]].get(key.rpartition(".")[2])
    return Settings({key: values[key] for key in KEYS})


def _load(name: str) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        stop(f"{name} cannot be read ({error.strerror}); name a file with --config")
    except yaml.YAMLError as error:
        stop(f"{name} is no YAML: {' '.join(str(error).split())}")
    if not isinstance(tree, dict):
        stop(f"{name} holds no settings; it needs sections data, model and training")
    return tree


def _flat(tree: dict[str, Any], name: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for section, inner in tree.items():
        if isinstance(inner, dict):
            values.update({f"{section}.{key}": value for key, value in inner.items()})
        elif f"{section}." in " ".join(KEYS):
            stop(f"{name}: {section} is {inner!r}; it has to be a section of settings")
        else:
            values[str(section)] = inner
    return values


def _pair(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign:
        stop(f"--set {text}: write KEY=VALUE, such as training.lr=5.0e-5")
    return key, value


def _number(value: Any) -> Any:
    # On a command line 1e-5 means a number; YAML 1.1 takes it for a text.
    try:
        return float(value) if isinstance(value, str) and "e" in value.lower() else value
    except ValueError:
        return value


def _judge(values: dict[str, Any], name: str) -> None:
    for key in values:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            stop(f"{name}: {key} is not known" + (f"; did you mean {near[0]}?" if near else ""))
    for key, (types, example, empty) in KEYS.items():
        leaf, value = key.rpartition(".")[2], values.get(key)
        if key not in values and not empty:
            stop(f"{name}: {key} is missing; add it, e.g. {leaf}: {example}")
        if value is None and empty:
            continue
        if leaf == "mixed_precision" and value is False:
            values[key] = value = "no"  # an unquoted no is a false in YAML 1.1
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            stop(f"{name}: {key} is {value!r}, not {_words(types)}; write e.g. {leaf}: {example}")
        if key in CHOICES and value not in CHOICES[key]:
            stop(f"{name}: {key} is {value!r}; it can be {', '.join(CHOICES[key])}")
    for key in ("training.epochs", "training.batch_size", "data.num_classes"):
        if values[key] < 1:
            stop(f"{name}: {key} is {values[key]}; it has to be 1 or more")


def _words(types: tuple[type, ...]) -> str:
    names = {(str,): "a text", (int,): "a whole number", (bool,): "true or false"}
    return names.get(types, "a number")
