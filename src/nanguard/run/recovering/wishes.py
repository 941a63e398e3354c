"""What the user asks of a recovery, read and found possible before anything is started."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.check.config.edits import number_text
from nanguard.check.config.settings import number_of
from nanguard.errors import UsageError
from nanguard.run.recovering.audit import counted
from nanguard.run.recovering.configs import (
    ENDINGS,
    ConfigFile,
    Key,
    learning_rate_in,
    rate_key,
)
from nanguard.run.recovering.ladder import Means
from nanguard.run.recovering.templates import Template

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from nanguard.run.recovering.audit import Judged

# For each purpose, the placeholders of which its template needs one.
PURPOSES = {
    "resume": ("checkpoint", "step"),
    "lr": ("lr",),
    "skip": ("skip",),
    "seed": ("seed",),
}
_SHELLS = ("sh", "bash", "zsh", "dash", "ksh", "fish")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """The options of ``nanguard run --recover``.

    Attributes:
        checkpoints: A folder or pattern; None to find them.
        arguments: Templates of arguments, by purpose.
        config: A configuration file of the command's; None if there is none to rewrite.
        keys: Keys of that file, by purpose.
        lr: The learning rate of the first attempt; None to read it from the command.
        lr_cut: The factor of one cut.
        max_restarts: How many restarts there may be.
        backoff: Seconds before the first restart; each further one waits twice as long.
    """

    checkpoints: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    config: str | None = None
    keys: Mapping[str, str] = field(default_factory=dict)
    lr: float | None = None
    lr_cut: float = 0.5
    max_restarts: int = 3
    backoff: float = 1.0


@dataclass(frozen=True, slots=True)
class Changes:
    """What an attempt is told.

    Attributes:
        attempt: Its number, counted from 1.
        checkpoint: What it resumes from; empty for the beginning.
        step: The step of that checkpoint.
        lr: The learning rate; None to leave it.
        skip: How many steps of data it passes over; 0 for none.
        seed: The seed; None to leave it.
    """

    attempt: int
    checkpoint: str = ""
    step: int | None = None
    lr: float | None = None
    skip: int = 0
    seed: int | None = None

    def values(self) -> dict[str, str]:
        """Returns what placeholders stand for."""
        return {
            "attempt": str(self.attempt),
            "checkpoint": self.checkpoint,
            "step": "" if self.step is None else str(self.step),
            "lr": "" if self.lr is None else number_text(self.lr),
            "skip": str(self.skip),
            "seed": "" if self.seed is None else str(self.seed),
        }

    def purposes(self) -> set[str]:
        """Returns what there is to be told."""
        told = {"resume"} if self.checkpoint else set()
        told |= {"lr"} if self.lr is not None else set()
        told |= {"skip"} if self.skip else set()
        return told | ({"seed"} if self.seed is not None else set())

    def in_words(self) -> str:
        """Returns the changes as a part of a sentence."""
        from_where = f"from {self.checkpoint}" if self.checkpoint else "as at first"
        if self.checkpoint and self.step is not None:
            from_where += f" (step {self.step})"
        told = [from_where]
        if self.lr is not None:
            told.append(f"learning rate {number_text(self.lr)}")
        if self.skip:
            told.append(f"{counted(self.skip, 'step')} of data skipped")
        if self.seed is not None:
            told.append(f"seed {self.seed}")
        return ", ".join(told)


@dataclass(frozen=True, slots=True)
class Teller:
    """The ways to tell a command what to do differently.

    Attributes:
        command: The command, as the user wrote it.
        templates: Arguments, by purpose.
        config: The file that is rewritten; None for none.
        lr: The learning rate of the first attempt; None if it cannot be changed.
        seed: The seed of the first attempt.
    """

    command: tuple[str, ...]
    templates: Mapping[str, Template]
    config: ConfigFile | None
    lr: float | None
    seed: int

    @classmethod
    def of(cls, command: Sequence[str], wishes: Wishes) -> Teller:
        """Finds the ways.

        Raises:
            UsageError: One cannot work as written.
        """
        templates = {
            purpose: Template.of(text, f"--{purpose}-arg", PURPOSES[purpose])
            for purpose, text in wishes.arguments.items()
        }
        config = _config(command, wishes)
        given = {*templates, *({} if config is None else config.keys)}
        if "resume" not in given:
            raise UsageError(
                "nothing says how the command is told which checkpoint to resume from.",
                where="nanguard run --recover",
                do='Give, for example, --resume-arg "--resume {checkpoint}", or --config FILE '
                "--resume-key KEY.",
            )
        if templates and Path(command[0]).name in _SHELLS and "-c" in command[1:3]:
            raise UsageError(
                "arguments cannot be put into the text behind -c.",
                where=f"nanguard run --recover -- {command[0]} -c ...",
                do="Write the command itself behind the two dashes, or put the text into a script.",
            )
        lr = _starting_rate(command, wishes, templates.get("lr"), config) if "lr" in given else None
        return cls(tuple(command), templates, config, lr, _seed(command, templates, config))

    @property
    def means(self) -> Means:
        """What can be changed from attempt to attempt."""
        given = {*self.templates, *(() if self.config is None else self.config.keys)}
        return Means(lr="lr" in given, skip="skip" in given, seed="seed" in given)

    def resumes_from(self) -> str | None:
        """Returns the checkpoint that the command itself resumes from, if it says one."""
        template = self.templates.get("resume")
        found = None if template is None else template.value_in(self.command, "checkpoint")
        return found if found and Path(found).exists() else None

    def can_name(self, checkpoint: Judged | None) -> bool:
        """Returns whether a checkpoint can be told; one of no known step has no ``{step}``."""
        if checkpoint is None or checkpoint.step is not None:
            return True
        template, config = self.templates.get("resume"), self.config
        words = [word for group in template.groups for word in group.words] if template else []
        if config is not None and "resume" in config.keys:
            words.append(config.keys["resume"].template)
        return not any("{step}" in word for word in words)

    def command_for(self, changes: Changes, why: str, folder: Path) -> tuple[list[str], str | None]:
        """Returns the command of an attempt, and the configuration that was written for it.

        Args:
            changes: What it is told.
            why: What the attempt is for.
            folder: Where a configuration goes that cannot stand beside its original.

        Raises:
            SourceError: The configuration, or a key of it, is not there any more.
            OSError: It cannot be written.
        """
        values, purposes = changes.values(), changes.purposes()
        words, copy = list(self.command), None
        if self.config is not None and purposes & set(self.config.keys):
            copy = self.config.write(values, purposes, why, folder)
            words = self.config.into(words, copy)
        for purpose, template in self.templates.items():
            if purpose in purposes:
                words = template.into(words, values)
        return words, copy


def _config(command: Sequence[str], wishes: Wishes) -> ConfigFile | None:
    if wishes.config is None:
        if wishes.keys:
            purpose = next(iter(wishes.keys))
            raise UsageError(
                f"--{purpose}-key names a key, and no file it stands in.",
                where="nanguard run --recover",
                do="Give the file of the command, too: --config FILE",
            )
        return None
    keys = {
        purpose: Key.of(text, f"--{purpose}-key", PURPOSES[purpose][0])
        for purpose, text in wishes.keys.items()
    }
    if "lr" not in keys and "lr" not in wishes.arguments:
        found = rate_key(wishes.config)
        if found is not None:
            keys["lr"] = Key.of(found, "--lr-key", "lr")
    config = ConfigFile(wishes.config, keys)
    config.check(command)
    return config


def _starting_rate(
    command: Sequence[str], wishes: Wishes, template: Template | None, config: ConfigFile | None
) -> float:
    """Returns the learning rate of the first attempt.

    Raises:
        UsageError: Nothing says what it is.
    """
    looked: list[str] = []
    found = wishes.lr
    if found is None and template is not None:
        looked.append("the command")
        found = number_of(template.value_in(command, "lr"))
    if found is None and config is not None and "lr" in config.keys:
        looked.append(f"{config.path} at {config.keys['lr'].dotted}")
        found = config.number(config.keys["lr"].dotted)
    key = None if template is None else template.key_of("lr")
    for path in _configs_in(command) if template is not None else ():
        if found is None:
            looked.append(path)
            found = learning_rate_in(path, key)
    if found is None or not (math.isfinite(found) and found > 0):
        raise UsageError(
            f"the learning rate of the command is not known (looked at: {', '.join(looked)}).",
            where="nanguard run --recover",
            do="Say with which one it begins, for example: --lr 1e-4",
        )
    return found


def _configs_in(command: Sequence[str]) -> list[str]:
    """Returns the configuration files that a command names."""
    words = [word.partition("=")[2] if "=" in word else word for word in command[1:]]
    return [word for word in words if word.endswith(ENDINGS) and os.path.isfile(word)]  # noqa: PTH113 - as written


def _seed(
    command: Sequence[str], templates: Mapping[str, Template], config: ConfigFile | None
) -> int:
    template = templates.get("seed")
    found = None if template is None else number_of(template.value_in(command, "seed"))
    if found is None and config is not None and "seed" in config.keys:
        found = config.number(config.keys["seed"].dotted)
    return int(found) if found is not None and math.isfinite(found) else 0
