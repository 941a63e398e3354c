"""Reads the configuration and the DeepSpeed file, and says in one line what is wrong with them."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

import yaml

NUMBER = (int, float)
# Every key: the types it may have, an example, and whether it may be left out.
KEYS: dict[str, tuple[tuple[type, ...], str, bool]] = {
    "size": ((str,), "tiny", False),
    "seed": ((int,), "3", False),
    "device": ((str,), "auto", False),
    "data.train_jsonl_list": ((list,), "[data/food101_train.jsonl]", False),
    "data.val_jsonl_list": ((list,), "[data/food101_val.jsonl]", False),
    "data.first_label": ((int,), "0", False),
    "data.label_map": ((str,), "listed", False),
    "data.exported_names": ((bool,), "false", False),
    "data.on_bad_label": ((str,), "refuse", False),
    "data.fraction": (NUMBER, "1.0", False),
    "datasets.enable_logits_masking": ((bool,), "false", False),
    "datasets.mask_value": (NUMBER, "-1.0e+9", True),
    "datasets.only": ((str,), "all", False),
    "datasets.dataset_configs": ((dict,), "{food101: {num_classes: 101}}", False),
    "model.name": ((str,), "food_mixer", False),
    "model.num_labels": ((int,), "1024", False),
    "model.image_size": ((int,), "8", False),
    "model.patch_size": ((int,), "4", False),
    "model.width": ((int,), "96", False),
    "model.layers": ((int,), "2", False),
    "model.logit_clamp": (NUMBER, "50.0", True),
    "loss.type": ((str,), "cross_entropy", False),
    "training.steps": ((int,), "300", False),
    "training.batch_size": ((int,), "64", False),
    "training.optimizer": ((str,), "adamw", False),
    "training.lr": (NUMBER, "1.0e-6", False),
    "training.head_lr_scale": (NUMBER, "200", False),
    "training.weight_decay": (NUMBER, "1.0e-4", False),
    "training.warmup_steps": ((int,), "20", False),
    "training.max_grad_norm": (NUMBER, "0.5", False),
    "training.bf16": ((bool,), "false", False),
    "training.fp16": ((bool,), "false", False),
    "training.deepspeed": ((str,), "ds_config.json", True),
    "training.plan": ((str,), "none", False),
    "training.eval_steps": ((int,), "50", False),
    "training.save_steps": ((int,), "100", False),
    "training.loss_alarm": (NUMBER, "50.0", False),
    "training.wandb": ((bool,), "false", False),
}
CHOICES = {
    "size": ("tiny", "full"),
    "device": ("auto", "cpu", "cuda"),
    "data.label_map": ("listed", "alphabetical"),
    "data.on_bad_label": ("keep", "refuse", "clamp"),
    "loss.type": ("cross_entropy", "label_smoothing", "focal"),
    "training.optimizer": ("adamw", "sgd"),
    "training.plan": ("none", "staged"),
}


class Settings:
    """The configuration by dotted key, complete and of the right types."""

    def __init__(self, tree: dict[str, Any], deepspeed: dict[str, Any]) -> None:
        self.tree = tree
        self.deepspeed = deepspeed

    def __getitem__(self, key: str) -> Any:
        return _find(self.tree, key)

    @property
    def datasets(self) -> dict[str, dict[str, Any]]:
        """The data sets in the order of the configuration."""
        return dict(self["datasets.dataset_configs"])

    @property
    def precision(self) -> str:
        """What is computed in; as with DeepSpeed's engine, its own file counts."""
        for name in ("fp16", "bf16"):
            said = self.deepspeed.get(name, {}).get("enabled")
            if said or (said is None and self[f"training.{name}"]):
                return name
        return "fp32"

    @property
    def clip(self) -> float:
        """The norm that gradients are clipped to; 0 for none."""
        return float(self.deepspeed.get("gradient_clipping", self["training.max_grad_norm"]))

    def write(self, out: Path) -> None:
        """Writes the configuration as it counts, and the DeepSpeed file beside it."""
        text = yaml.safe_dump(self.tree, sort_keys=False, allow_unicode=True)
        (out / "config.yaml").write_text(text, encoding="utf-8")
        if self["training.deepspeed"]:
            text = json.dumps(self.deepspeed, indent=2) + "\n"
            (out / Path(self["training.deepspeed"]).name).write_text(text, encoding="utf-8")


def stop(message: str) -> NoReturn:
    """Ends the program before training has begun."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


def arguments(about: str) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--config", default="config.yaml", help="the configuration, YAML")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="sets")
    parser.add_argument("--out", type=Path, default=Path("runs/last"), help="what it writes")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from")
    parser.add_argument("--steps", type=int, default=0, help="stop after so many steps")
    return parser.parse_args()


def read(args: argparse.Namespace) -> Settings:
    """Returns the configuration with what the command line changes in it."""
    tree = _load(args.config)
    for one in args.sets:
        key, sign, text = one.partition("=")
        if not sign:
            stop(f"--set {one}: write KEY=VALUE, such as training.lr=1.0e-6")
        _put(tree, key, _number(yaml.safe_load(text)))
    _judge(tree, args.config)
    _judge_datasets(tree, args.config)
    return Settings(tree, _deepspeed(tree, Path(args.config)))


def _load(name: str) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
    except OSError as error:
        stop(f"{name} cannot be read ({error.strerror}); name a file with --config")
    except yaml.YAMLError as error:
        stop(f"{name} is no YAML: {' '.join(str(error).split())[:200]}")
    if not isinstance(tree, dict):
        stop(f"{name} holds no settings; it needs sections data, datasets, model and training")
    return tree


def _deepspeed(tree: dict[str, Any], config: Path) -> dict[str, Any]:
    name = _find(tree, "training.deepspeed")
    if not name:
        return {}
    path = config.parent / name
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        stop(f"{config}: training.deepspeed is {name}, which cannot be read ({error.strerror})")
    except ValueError as error:
        stop(f"{path} is no JSON: {error}")
    if not isinstance(found, dict):
        stop(f"{path} holds no settings")
    return found


def _find(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *sections, leaf = key.split(".")
    for part in sections:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            stop(f"--set {key}: {part} is no section of the configuration")
    tree[leaf] = value


def _number(value: Any) -> Any:
    # On a command line 1e-5 means a number; YAML 1.1 takes it for a text.
    try:
        return float(value) if isinstance(value, str) and "e" in value.lower() else value
    except ValueError:
        return value


def _keys(tree: dict[str, Any], before: str = "") -> list[str]:
    found = []
    for name, value in tree.items():
        key = f"{before}{name}"
        inner = isinstance(value, dict) and key not in KEYS
        found += _keys(value, f"{key}.") if inner else [key]
    return found


def _judge(tree: dict[str, Any], name: str) -> None:
    for key in _keys(tree):
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            stop(f"{name}: {key} is not known" + (f"; did you mean {near[0]}?" if near else ""))
    for key, (types, example, optional) in KEYS.items():
        leaf, value = key.rpartition(".")[2], _find(tree, key)
        if value is None and optional:
            continue
        if value is None:
            stop(f"{name}: {key} is missing; add it, e.g. {leaf}: {example}")
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            stop(f"{name}: {key} is {value!r}, not {_words(types)}; write e.g. {leaf}: {example}")
        if key in CHOICES and value not in CHOICES[key]:
            stop(f"{name}: {key} is {value!r}; it can be {', '.join(CHOICES[key])}")
        if types == (int,) and key != "seed" and value < int(key == "training.batch_size"):
            stop(f"{name}: {key} is {value}; it cannot be that small")


def _judge_datasets(tree: dict[str, Any], name: str) -> None:
    known = _find(tree, "datasets.dataset_configs")
    for dataset, inner in known.items():
        place = f"datasets.dataset_configs.{dataset}"
        for key, example in (("num_classes", 101), ("eval_ratio", 0.1)):
            value = inner.get(key) if isinstance(inner, dict) else None
            if isinstance(value, bool) or not isinstance(value, NUMBER) or not value > 0:
                stop(f"{name}: {place}.{key} is {value!r}; write e.g. {key}: {example}")
    only = _find(tree, "datasets.only")
    if only != "all" and only not in known:
        stop(f"{name}: datasets.only is {only!r}; it can be all, {', '.join(known)}")
    if _find(tree, "model.image_size") % _find(tree, "model.patch_size"):
        stop(f"{name}: model.patch_size has to divide model.image_size")


def _words(types: tuple[type, ...]) -> str:
    names = {(str,): "a text", (int,): "a whole number", (bool,): "true or false"}
    return names.get(types, {list: "a list", dict: "a section"}.get(types[0], "a number"))


os.environ.setdefault("WANDB_SILENT", "true")
