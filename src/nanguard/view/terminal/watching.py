"""Watches runs until somebody says that it is enough: in a view, or in plain lines."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanguard.view.terminal import words

if TYPE_CHECKING:
    from nanguard.view.terminal.channels import Happening
    from nanguard.view.terminal.screen import Screen
    from nanguard.view.terminal.session import Session
    from nanguard.view.terminal.view import View
    from nanguard.view.terminal.watched import Watched

# Seconds between two looks at the files, which are also two frames; less is too much for ssh.
EVERY = 0.5
# Looks are so much rarer when nothing has changed for a while.
_IDLE, _IDLE_AFTER = 1.0, 30.0


@dataclass(slots=True)
class Watching:
    """Looks at runs again and again.

    Attributes:
        session: The runs.
        on_alarm: What is run on an alarm; None for nothing.
        bell: Whether the terminal rings on an alarm.
        until_alarm: Whether the first alarm ends it.
        every: Seconds between two plain lines about a run.
        alarmed: Whether there was an alarm.
    """

    session: Session
    on_alarm: OnAlarm | None = None
    bell: bool = False
    until_alarm: bool = False
    every: float = 10.0
    alarmed: bool = False
    _changed: float = field(default_factory=time.monotonic)
    _lines: dict[int, tuple[float, int]] = field(default_factory=dict)

    def once(self) -> None:
        """Reads what is there."""
        self._look()
        while self.session.reading:
            self._look()
        self._last_words()

    def in_view(self, screen: Screen, view: View) -> None:
        """Shows runs until a key, Ctrl-C or, if asked for, an alarm or the end."""
        gpus = Gpus()
        following = True
        while following:
            for run, told in self._look():
                if told.alarm and not told.old:
                    view.chosen = self.session.runs.index(run)
                    if self.bell:
                        screen.bell()
            view.gpus = gpus.told()
            over = self._is_over()
            if over:
                self._last_words()
            screen.show(view.frame(self.session, *screen.size()))
            following = not over and self._keys(screen.wait(self._pause()), view)

    def in_lines(self) -> None:
        """Prints lines until Ctrl-C or, if asked for, an alarm or the end."""
        while True:
            self.print_news(self._look())
            if self._is_over():
                self.print_news(self._last_words())
                return
            time.sleep(self._pause())

    def print_news(self, news: list[tuple[Watched, Happening]], *, last: bool = False) -> None:
        """Prints what happened, and now and then how the runs are doing."""
        out: list[str] = []
        for run, told in news:
            mark = "ALARM" if told.alarm and not told.old else "alarm" if told.alarm else "event"
            out.append(f"{_clock()}  {mark}  {run.state.name}  {words.happening(told)}")
            if self.bell and told.alarm and not told.old and sys.stdout.isatty():
                out[-1] += "\a"
        for place, run in enumerate(self.session.runs):
            then, lines = self._lines.get(place, (0.0, -1))
            due = time.monotonic() - then >= self.every and lines != run.state.lines
            if last or (due and not run.reading):
                self._lines[place] = (time.monotonic(), run.state.lines)
                out.append(f"{_clock()}  {_status(run)}")
        if out:
            sys.stdout.write("\n".join(out) + "\n")
            sys.stdout.flush()

    def finish(self) -> list[str]:
        """Waits for commands that still run; returns what went wrong with them."""
        self.session.close()
        return self.on_alarm.finish() if self.on_alarm else []

    def _look(self) -> list[tuple[Watched, Happening]]:
        news = self.session.look()
        for run, told in news:
            self._react(run, told)
        if self.on_alarm and self.session.runs:
            for problem in self.on_alarm.poll():
                run = self.session.runs[0]
                news += [(run, told) for told in run.state.tell("command", problem)]
        if news or any(run.state.grown for run in self.session.runs):
            grown = max((run.state.grown or 0.0 for run in self.session.runs), default=0.0)
            self._changed = max(self._changed, grown)
        return news

    def _react(self, run: Watched, told: Happening) -> None:
        if not told.alarm or told.old:
            return
        self.alarmed = True
        if self.on_alarm is not None:
            problem = self.on_alarm.alarm(str(run.path), told)
            if problem:
                run.state.tell("command", problem)

    def _is_over(self) -> bool:
        if self.until_alarm and self.alarmed:
            return True
        asked = self.until_alarm or self.session.wanted.pid is not None
        return asked and self.session.ended()

    def _last_words(self) -> list[tuple[Watched, Happening]]:
        """Reads what came between the last look and the end, and lines that have no end."""
        news, last = self._look(), self.session.finish()
        for run, told in last:
            self._react(run, told)
        return news + last

    def _pause(self) -> float:
        if self.session.reading:
            return 0.0
        return _IDLE if time.monotonic() - self._changed > _IDLE_AFTER else EVERY

    def _keys(self, keys: str, view: View) -> bool:
        """Does what keys ask for; returns whether the view goes on."""
        if "q" in keys or "\x03" in keys:
            return False
        if "l" in keys:
            view.log = {None: True, True: False, False: None}[view.log]
        if "\t" in keys or "\x1b[B" in keys or "j" in keys:
            view.chosen += 1
        if "\x1b[A" in keys or "\x1b[Z" in keys or "k" in keys:
            view.chosen -= 1
        return True


def _status(run: Watched) -> str:
    state, _ = words.state_of(run)
    where, share, speed = words.progress(run.state)
    if run.wanted.once:
        # What was read at once tells nothing about the speed of the run.
        alarms, speed = run.state.alarms, ""
        state = f"{alarms} alarm{'' if alarms == 1 else 's'}" if alarms else "no alarm"
    done = "" if share is None else f"{share:.1%}"
    parts = [run.state.name, where, done, *words.numbers(run.state), speed, state]
    return "  ".join(part for part in parts if part)


def _clock() -> str:
    return time.strftime("%H:%M:%S")


# Seconds between two looks; a look takes some time of the driver.
_EVERY = 2.0
_MOST = 16
_GIB = float(1 << 30)


class Gpus:
    """The GPUs of this machine; none where NVML is not installed or finds no driver."""

    def __init__(self) -> None:
        self._nvml = _nvml()
        self._next = 0.0
        self._told: list[str] = []

    def told(self) -> list[str]:
        """Returns a line for each GPU."""
        if self._nvml is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self._told = self._look(self._nvml)
        return self._told

    def _look(self, nvml: Any) -> list[str]:
        told: list[str] = []
        try:
            for index in range(min(_MOST, nvml.nvmlDeviceGetCount())):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                memory = nvml.nvmlDeviceGetMemoryInfo(device)
                load = nvml.nvmlDeviceGetUtilizationRates(device).gpu
                used, total = memory.used / _GIB, memory.total / _GIB
                told.append(f"GPU {index}  {used:.1f} of {total:.0f} GiB  {load} %")
        except nvml.NVMLError:
            return told
        return told


def _nvml() -> Any:
    try:
        pynvml = import_module("pynvml")
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


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
