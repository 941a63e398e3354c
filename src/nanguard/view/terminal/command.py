"""Runs the user's command on an alarm; what a log says never becomes part of the command."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.view.terminal.channels import Happening

# Seconds a command may take.
LIMIT = 60.0
_TEXT = 400


@dataclass(slots=True)
class OnAlarm:
    """Runs a command, once for each kind of alarm and run, and again after a rest.

    The words of the alarm are in its environment: ``NANGUARD_ALARM`` (the kind),
    ``NANGUARD_MESSAGE``, ``NANGUARD_STEP``, ``NANGUARD_VALUE`` and ``NANGUARD_PATH``. The shell
    that runs the command sees them as values, whatever they hold.

    Attributes:
        command: The command.
        rest: Seconds before the same kind of alarm runs it again.
        quiet: Whether its output goes nowhere, as it would spoil the view.
    """

    command: str
    rest: float = 300.0
    quiet: bool = False
    _last: dict[tuple[str, str], float] = field(default_factory=dict)
    _running: list[tuple[subprocess.Popen[bytes], float]] = field(default_factory=list)

    def alarm(self, path: str, happening: Happening) -> str:
        """Runs the command, unless it ran a short time ago; returns what went wrong."""
        key, now = (path, happening.kind), time.monotonic()
        if key in self._last and now - self._last[key] < self.rest:
            return ""
        self._last[key] = now
        output = subprocess.DEVNULL if self.quiet else None
        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own command
                self._words(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **_environment(path, happening)},
                start_new_session=True,
            )
        except OSError as error:
            return f"the command for alarms cannot be run: {error.strerror or error}"
        self._running.append((process, now + LIMIT))
        return ""

    def poll(self) -> list[str]:
        """Returns what went wrong with commands that have ended, and ends those that hang."""
        problems: list[str] = []
        for entry in list(self._running):
            process, deadline = entry
            if process.poll() is None and time.monotonic() > deadline:
                process.kill()
                process.wait()
                problems.append(f"the command for alarms took more than {LIMIT:g} s and was ended")
            elif process.poll() is not None and process.returncode:
                problems.append(f"the command for alarms ended with {process.returncode}")
            if process.poll() is not None:
                self._running.remove(entry)
        return problems

    def finish(self) -> list[str]:
        """Waits for what is still running; returns what went wrong."""
        problems = self.poll()
        while self._running:
            time.sleep(0.05)
            problems += self.poll()
        return problems

    def _words(self) -> list[str]:
        # The command line of Windows puts values into the text before it reads it.
        return shlex.split(self.command) if os.name == "nt" else ["/bin/sh", "-c", self.command]


def _environment(path: str, happening: Happening) -> dict[str, str]:
    return {
        "NANGUARD_ALARM": happening.kind,
        "NANGUARD_MESSAGE": happening.text[:_TEXT],
        "NANGUARD_STEP": "" if happening.step is None else str(happening.step),
        "NANGUARD_VALUE": "" if happening.value is None else repr(happening.value),
        "NANGUARD_PATH": path,
    }
