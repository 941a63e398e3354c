"""Watches runs until somebody says that it is enough: in a view, or in plain lines."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanguard.alerts import COMMAND_LIMIT, LIMIT, Alert
from nanguard.view.terminal.view import happening_text, numbers, progress, state_of

if TYPE_CHECKING:
    from nanguard.alerts import Alerts
    from nanguard.view.terminal.view import Screen, View
    from nanguard.view.terminal.watch_session import Session, WatchedRun
    from nanguard.view.terminal.watch_state import Happening

# Seconds between two looks at the files, which are also two frames; less is too much for ssh.
EVERY = 0.5
# Seconds between two looks when nothing has changed for the seconds that follow.
_IDLE, _IDLE_AFTER = 1.0, 30.0


@dataclass(slots=True)
class Watching:
    """Looks at runs again and again.

    Attributes:
        session: The runs.
        alerts: Where alarms are sent; None for nowhere.
        bell: Whether the terminal rings on an alarm.
        until_alarm: Whether the first alarm ends it.
        every: Seconds between two plain lines about a run.
        alarmed: Whether there was an alarm.
    """

    session: Session
    alerts: Alerts | None = None
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
        """Shows runs until a key, Ctrl-C or, if wanted, an alarm or the end."""
        gpus = Gpus()
        following = True
        while following:
            for run, happening in self._look():
                if happening.alarm and not happening.old:
                    view.chosen = self.session.runs.index(run)
                    if self.bell:
                        screen.bell()
            view.gpus = gpus.lines()
            over = self._is_over()
            if over:
                self._last_words()
            screen.show(view.frame(self.session, *screen.size()))
            following = not over and self._keys(screen.wait(self._pause()), view)

    def in_lines(self) -> None:
        """Prints lines until Ctrl-C or, if wanted, an alarm or the end."""
        while True:
            self.print_news(self._look())
            if self._is_over():
                self.print_news(self._last_words())
                return
            time.sleep(self._pause())

    def print_news(self, news: list[tuple[WatchedRun, Happening]], *, last: bool = False) -> None:
        """Prints what happened, and now and then how the runs are doing."""
        out: list[str] = []
        for run, happening in news:
            mark = (
                "ALARM"
                if happening.alarm and not happening.old
                else "alarm"
                if happening.alarm
                else "event"
            )
            out.append(f"{_clock()}  {mark}  {run.state.name}  {happening_text(happening)}")
            if self.bell and happening.alarm and not happening.old and sys.stdout.isatty():
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
        """Waits for alerts that are on their way; returns what went wrong with them."""
        self.session.close()
        return self.alerts.close(COMMAND_LIMIT + LIMIT) if self.alerts else []

    def _look(self) -> list[tuple[WatchedRun, Happening]]:
        news = self.session.look()
        for run, happening in news:
            self._react(run, happening)
        if self.alerts and self.session.runs:
            for problem in self.alerts.problems():
                run = self.session.runs[0]
                news += [(run, happening) for happening in run.state.report("alert", problem)]
        if news or any(run.state.grown for run in self.session.runs):
            grown = max((run.state.grown or 0.0 for run in self.session.runs), default=0.0)
            self._changed = max(self._changed, grown)
        return news

    def _react(self, run: WatchedRun, happening: Happening) -> None:
        if not happening.alarm or happening.old:
            return
        self.alarmed = True
        if self.alerts is not None:
            alert = Alert(
                happening.kind,
                happening.text,
                str(run.path),
                step=happening.step,
                value=happening.value,
            )
            self.alerts.send(alert)

    def _is_over(self) -> bool:
        if self.until_alarm and self.alarmed:
            return True
        asked = self.until_alarm or self.session.wanted.pid is not None
        return asked and self.session.ended()

    def _last_words(self) -> list[tuple[WatchedRun, Happening]]:
        """Reads what came between the last look and the end, and lines that have no end."""
        news, last = self._look(), self.session.finish()
        for run, happening in last:
            self._react(run, happening)
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


def _status(run: WatchedRun) -> str:
    state, _ = state_of(run)
    where, share, speed = progress(run.state)
    if run.wanted.once:
        # What was read at once tells nothing about the speed of the run.
        alarms, speed = run.state.alarms, ""
        state = f"{alarms} alarm{'' if alarms == 1 else 's'}" if alarms else "no alarm"
    done = "" if share is None else f"{share:.1%}"
    parts = [run.state.name, where, done, *numbers(run.state), speed, state]
    return "  ".join(part for part in parts if part)


def _clock() -> str:
    return time.strftime("%H:%M:%S")


# Seconds between two looks; a look takes some time of the driver.
_EVERY = 2.0
# GPUs that are listed.
_MOST_GPUS = 16
_GIB = float(1 << 30)


class Gpus:
    """The GPUs of this machine; none where NVML is not installed or finds no driver."""

    def __init__(self) -> None:
        self._nvml = _nvml()
        self._next = 0.0
        self._lines: list[str] = []

    def lines(self) -> list[str]:
        """Returns a line for each GPU."""
        if self._nvml is not None and time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self._lines = self._look(self._nvml)
        return self._lines

    def _look(self, nvml: Any) -> list[str]:
        lines: list[str] = []
        try:
            for index in range(min(_MOST_GPUS, nvml.nvmlDeviceGetCount())):
                device = nvml.nvmlDeviceGetHandleByIndex(index)
                memory = nvml.nvmlDeviceGetMemoryInfo(device)
                load = nvml.nvmlDeviceGetUtilizationRates(device).gpu
                used, total = memory.used / _GIB, memory.total / _GIB
                lines.append(f"GPU {index}  {used:.1f} of {total:.0f} GiB  {load} %")
        except nvml.NVMLError:
            return lines
        return lines


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
