"""The files of a preset."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanguard.advice.presets.writing import notes, written

if TYPE_CHECKING:
    from nanguard.advice.presets.choice import Choice
    from nanguard.advice.presets.tree import Config

_NAMES = {"accelerate": "accelerate", "deepspeed": "ds_config", "lightning": "stable"}


@dataclass(frozen=True, slots=True)
class File:
    """One file of a preset.

    Attributes:
        name: What it is called where nobody says otherwise.
        content: What it holds.
        notes: What is said about its values, where it has no room for comments.
        executable: Whether it is a program.
    """

    name: str
    content: str
    notes: str = ""
    executable: bool = False


def files_of(choice: Choice) -> tuple[File, ...]:
    """Returns the files of a preset; one, but for the launch."""
    if choice.family == "launch":
        from nanguard.advice.presets.families.launch import script

        launch = File("launch.sh", script(choice.values), executable=True)
        return launch, _file(choice, "accelerate")
    return (_file(choice, choice.family),)


def _file(choice: Choice, family: str) -> File:
    module = importlib.import_module(f"nanguard.advice.presets.families.{family}")
    config: Config = module.config(choice.values)
    name = f"{_NAMES.get(family, 'train')}.{choice.language}"
    said = notes(config) if choice.language == "json" else ""
    return File(name, written(config, choice.language), said)
