"""``nanguard run``: what was asked for, plainly or with recovery."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from nanguard.errors import MissingDependencyError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from nanguard.run.recovering.wishes import Wishes


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The options that belong to ``--recover``; None for those that were not given.

    Attributes:
        checkpoints: Where checkpoints are.
        arguments: Templates of arguments, by purpose.
        config: A configuration file of the command's.
        keys: Keys of it, by purpose.
        lr: The learning rate of the first attempt.
        lr_cut: The factor of one cut.
        max_restarts: How many restarts there may be.
        backoff: Seconds before the first restart.
    """

    checkpoints: str | None
    arguments: Mapping[str, str | None]
    config: str | None
    keys: Mapping[str, str | None]
    lr: float | None
    lr_cut: float | None
    max_restarts: int | None
    backoff: float | None

    def refuse(self) -> None:
        """Stops where an option was given that means nothing without ``--recover``.

        Raises:
            UsageError: One was.
        """
        given = [f"--{purpose}-arg" for purpose, text in self.arguments.items() if text is not None]
        given += [f"--{purpose}-key" for purpose, text in self.keys.items() if text is not None]
        given += [
            f"--{field.name.replace('_', '-')}"
            for field in fields(self)
            if field.name not in ("arguments", "keys") and getattr(self, field.name) is not None
        ]
        if given:
            raise UsageError(
                f"{given[0]} means nothing without --recover.",
                where="nanguard run",
                do="Give --recover, too; options of the command itself go behind the two dashes.",
            )

    def wishes(self) -> Wishes:
        """Returns the same for the launcher.

        Raises:
            UsageError: A number makes no sense.
        """
        from nanguard.run.recovering.wishes import Wishes

        if self.lr_cut is not None and not 0 < self.lr_cut <= 1:
            raise _wrong("--lr-cut", self.lr_cut, "a number above 0 and up to 1, such as 0.5")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise _wrong("--lr", self.lr, "a number above 0, such as 1e-4")
        if self.backoff is not None and not math.isfinite(self.backoff):
            raise _wrong("--backoff", self.backoff, "seconds, such as 5")
        given: dict[str, Any] = {
            name: value
            for name in ("lr_cut", "max_restarts", "backoff")
            if (value := getattr(self, name)) is not None
        }
        return Wishes(
            checkpoints=self.checkpoints,
            arguments={name: text for name, text in self.arguments.items() if text is not None},
            config=self.config,
            keys={name: text for name, text in self.keys.items() if text is not None},
            lr=self.lr,
            **given,
        )


def run_asked(
    command: Sequence[str],
    incidents: Path,
    asked: Asked,
    guarding: dict[str, Any],
    *,
    recover: bool,
) -> int:
    """Runs a command under the guard; returns the exit code.

    Args:
        command: The command.
        incidents: The folder for incidents.
        asked: How it is to be recovered, if it is.
        guarding: How it is guarded.
        recover: Whether it is.
    """
    if not recover:
        asked.refuse()
        from nanguard.run.command import run_command

        return run_command(command, incidents=incidents, **guarding)
    if importlib.util.find_spec("numpy") is None:  # before the run, and not when it has ended
        missing = ModuleNotFoundError(name="numpy")
        raise MissingDependencyError.of("nanguard run --recover", missing)
    from nanguard.run.recovering.recover import recover_command

    return recover_command(command, asked.wishes(), incidents=incidents, **guarding)


def _wrong(option: str, value: float, wanted: str) -> UsageError:
    return UsageError(
        f"{option} is {value:g}.", where="nanguard run --recover", do=f"Give {wanted}."
    )
