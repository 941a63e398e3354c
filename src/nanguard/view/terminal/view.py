"""The view of runs in a terminal: their state in words, the lines, and the screen they are on."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from nanguard.check.log.quantities import Quantity
from nanguard.findings import name_of
from nanguard.view.report.words import literal
from nanguard.view.terminal.plot import BAD, brief, draw

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType, TracebackType

    from nanguard.view.terminal.watch_session import Session, WatchedRun
    from nanguard.view.terminal.watch_state import Channel, Happening, RunState

GOOD, WAITING = "green", "yellow"
_SMALL = (
    (Quantity.GRAD_NORM, "gradient norm"),
    (Quantity.RATE, "learning rate"),
    (Quantity.SCALE, "scale"),
)
# Runs that the list shows above the curve.
_MOST_LISTED = 8
_KEYS = "q quit  l log scale"
# Below this a frame holds no curve.
_LOW = 12
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
_LEAVE = "\x1b[?7h\x1b[?25h\x1b[?1049l"
_ENDING = ("SIGTERM", "SIGHUP")


def state_of(run: WatchedRun) -> tuple[str, str]:
    """Returns how a run is doing, and the style to show it in."""
    bad = run.state.bad_now()
    if bad:
        return f"ALARM: {bad}", BAD
    if run.problem:
        return run.problem, WAITING
    if run.reading:
        return f"reading {run.share:.0%}", WAITING
    if run.stalled:
        return "ALARM: stalled", BAD
    if run.ended():
        return "ended", GOOD
    if not run.state.channels:
        lines = run.state.lines
        return f"no numbers yet in {lines} lines" if lines else "nothing written yet", WAITING
    if run.state.grown is None or time.monotonic() - run.state.grown > 30.0:
        since = "" if run.state.grown is None else f" for {_span(_quiet(run.state))}"
        return f"quiet{since}", WAITING
    return "running", GOOD


def progress(state: RunState) -> tuple[str, float | None, str]:
    """Returns where a run is, which share of all that is, and how fast it goes."""
    if state.step is None:
        where = f"{state.lines:,} lines".replace(",", " ")
    else:
        where = f"step {spaced(state.step)}"
        where += f" / {spaced(state.total)}" if state.total else ""
    if state.epoch is not None:
        where += f"  epoch {state.epoch:g}"
    share = min(1.0, state.step / state.total) if state.step and state.total else None
    return where, share, _speed(state)


def _speed(state: RunState) -> str:
    pace = state.pace()
    if pace is None:
        return ""
    speed = f"{pace:.3g} steps/s" if pace >= 1.0 else f"{1.0 / pace:.3g} s/step"
    if state.total and state.step is not None and state.step < state.total:
        speed += f"  ETA {_span((state.total - state.step) / pace)}"
    return speed


def numbers(state: RunState) -> list[str]:
    """Returns the last number of each role, with its name."""
    out: list[str] = []
    for role, name in (
        (Quantity.LOSS, "loss"),
        (Quantity.GRAD_NORM, "grad norm"),
        (Quantity.RATE, "lr"),
        (Quantity.SCALE, "scale"),
    ):
        channel = state.main(role)
        if channel is not None:
            out.append(f"{name} {brief(channel.last)}")
    return out


def happening_text(one: Happening) -> str:
    """Returns a happening in words: where, what, and how often."""
    where = "" if one.step is None else f"step {spaced(one.step)}"
    if one.last is not None and one.last != one.step:
        where += f" to {spaced(one.last)}"
    often = f" ({one.count} times)" if one.count > 1 else ""
    return f"{where}: {one.text}{often}" if where else f"{one.text}{often}"


def spaced(number: int) -> str:
    """Returns a whole number with spaces between its thousands."""
    return f"{number:,}".replace(",", " ")


def _quiet(state: RunState) -> float:
    return 0.0 if state.grown is None else time.monotonic() - state.grown


def _span(seconds: float) -> str:
    if seconds < 90.0:
        return f"{seconds:.0f} s"
    minutes = seconds / 60.0
    if minutes < 90.0:
        return f"{minutes:.0f} min"
    return f"{minutes / 60.0:.1f} h" if minutes < 48 * 60 else f"{minutes / 1440.0:.1f} days"


@dataclass(slots=True)
class View:
    """Draws a session.

    Attributes:
        plain: Whether only ASCII can be shown.
        log: Whether the loss is drawn on a log scale; None to choose.
        chosen: Which run is shown.
        gpus: A line for each GPU.
    """

    plain: bool = False
    log: bool | None = None
    chosen: int = 0
    gpus: list[str] = field(default_factory=list)

    def frame(self, session: Session, width: int, height: int) -> list[Text]:
        """Returns as many lines as the terminal has."""
        width, height = max(20, width), max(3, height)
        run = session.runs[self.chosen % len(session.runs)] if session.runs else None
        lines = [self._head(session, run, width)]
        if len(session.runs) > 1:
            lines += self._list(session, width, max(2, min(_MOST_LISTED, height // 5)))
        lines += [
            Text(f" waiting for {literal(path)}: {why}", "yellow")
            for path, why in session.missing.items()
        ]
        if run is not None:
            lines.append(self._progress(run, width))
            lines += self._body(run, width, height - len(lines) - 1)
        lines = lines[: height - 1]
        lines += [Text()] * (height - 1 - len(lines))
        lines.append(self._foot(session, width))
        for line in lines:
            line.truncate(width, overflow="crop" if self.plain else "ellipsis")
        return lines

    def _head(self, session: Session, run: WatchedRun | None, width: int) -> Text:
        clock = time.strftime("%H:%M:%S ")
        state, style = state_of(run) if run else ("waiting", WAITING)
        name = run.state.name if run else ""
        left = Text().append(" nanguard watch  ", "bold")
        dot = "* " if self.plain else "● "
        room = width - len(left) - len(clock) - 4
        right = Text(dot + state, style)
        right.truncate(max(12, room - min(len(name), room // 2)), overflow="ellipsis")
        left.append(_end_of(name, room - len(right))).append("  ")
        left.append_text(right)
        return _apart(left, Text(clock, "dim"), width)

    def _list(self, session: Session, width: int, most: int) -> list[Text]:
        """Returns a line for each run, those around the chosen one if there are many."""
        chosen = self.chosen % len(session.runs)
        first = max(0, min(chosen - most // 2, len(session.runs) - most))
        lines: list[Text] = []
        for place, run in list(enumerate(session.runs))[first : first + most]:
            state, style = state_of(run)
            mark = "> " if place == chosen else "  "
            name = Text().append(mark + run.state.name, "bold" if place == chosen else "")
            name.truncate(max(10, width * 2 // 5), overflow="ellipsis", pad=True)
            where, share, _ = progress(run.state)
            done = "" if share is None else f" {share:.0%}"
            loss = run.state.main(Quantity.LOSS)
            last = "" if loss is None else f"  loss {name_of(loss.last)}"
            name.append(f" {where}{done}{last}  ").append(state, style)
            lines.append(name)
        hidden = len(session.runs) - len(lines)
        if hidden or session.left_out:
            more = f", and {session.left_out} that are not watched" if session.left_out else ""
            lines[-1].append(f"  ({hidden} more runs{more})", "dim")
        return lines

    def _progress(self, run: WatchedRun, width: int) -> Text:
        where, share, speed = progress(run.state)
        text = Text().append(f" {where}  ", "bold")
        if share is not None:
            size = max(0, min(40, width - len(text) - len(speed) - 12))
            done = round(share * size)
            text.append(("#" if self.plain else "━") * done, "green")
            text.append(("." if self.plain else "━") * (size - done), "bright_black")
            text.append(f" {share:.1%}  ")
        return text.append(speed, "cyan")

    def _body(self, run: WatchedRun, width: int, height: int) -> list[Text]:
        events = max(3, min(height // 3, len(run.state.happenings) + 2, 18))
        small = [(run.state.main(role), name) for role, name in _SMALL]
        shown = [(channel, name) for channel, name in small if channel is not None]
        if height < _LOW:
            return [*self._numbers(run), *self._events(run, width, max(3, height - 1))]
        between = max(5, height // 5) if shown else 0
        lines = self._loss(run, width, height - events - between)
        if shown:
            lines += self._side_by_side(shown, width, between)
        return lines + self._events(run, width, events)

    def _numbers(self, run: WatchedRun) -> list[Text]:
        return [Text(" " + "  ".join(numbers(run.state)))]

    def _loss(self, run: WatchedRun, width: int, height: int) -> list[Text]:
        channel = run.state.main(Quantity.LOSS)
        if channel is None:
            said = "no loss in this log yet"
            return self._box(Text("loss"), [Text(said, "dim")], width, height)
        rows, scale = draw(
            channel.trace, width - 4, height - 2, log=self.log, style="cyan", plain=self.plain
        )
        title = _named(channel, channel.series.name)
        if channel.lowest < float("inf"):
            at = "" if channel.lowest_step is None else f" at {spaced(channel.lowest_step)}"
            title.append(f"  lowest {name_of(channel.lowest)}{at}", "dim")
        if scale.most > scale.high:
            title.append(f"  {'^' if self.plain else '▲'} up to {brief(scale.most)}", "yellow")
        title.append("  log" if scale.log else "", "dim")
        for other in self._others(run, channel):
            title.append(f"  {other.name} {name_of(other.last)}", "magenta")
        return self._box(title, rows, width, height)

    def _others(self, run: WatchedRun, main: Channel) -> list[Channel]:
        roles = (Quantity.LOSS, Quantity.ACCURACY)
        own = [c for c in run.state.channels.values() if c.series.role in roles and c is not main]
        return own[:3]

    def _side_by_side(
        self, shown: Sequence[tuple[Channel, str]], width: int, height: int
    ) -> list[Text]:
        boxes: list[list[Text]] = []
        left = width
        for place, (channel, name) in enumerate(shown):
            own = left // (len(shown) - place)
            left -= own
            rows, scale = draw(
                channel.trace, own - 4, height - 2, log=None, style="blue", plain=self.plain
            )
            title = _named(channel, name).append("  log" if scale.log else "", "dim")
            boxes.append(self._box(title, rows, own, height))
        return [_joined(row) for row in zip(*boxes, strict=True)]

    def _events(self, run: WatchedRun, width: int, height: int) -> list[Text]:
        last = list(run.state.happenings)[-(height - 2) :]
        rows = [_happening_line(one, width) for one in reversed(last)]
        alarms = run.state.alarms
        title = Text("events")
        if alarms:
            title.append(f"  {alarms} alarm{'' if alarms == 1 else 's'}", BAD)
        return self._box(title, rows or [Text("nothing so far", "dim")], width, height)

    def _foot(self, session: Session, width: int) -> Text:
        keys = _KEYS + ("  tab next run" if len(session.runs) > 1 else "")
        return _apart(
            Text().append(" " + "   ".join(self.gpus), "green"), Text(keys + " ", "dim"), width
        )

    def _box(self, title: Text, rows: Sequence[Text], width: int, height: int) -> list[Text]:
        """Returns lines in a frame; as many rows as it holds."""
        corners, across, down = ("+" * 4, "-", "|") if self.plain else ("╭╮╰╯", "─", "│")
        title = title.copy()
        title.truncate(width - 6, overflow="ellipsis")
        top = Text().append(f"{corners[0]}{across} ", "bright_black").append_text(title).append(" ")
        top.append(across * (width - top.cell_len - 1) + corners[1], "bright_black")
        lines = [top]
        for number in range(height - 2):
            row = rows[number].copy() if number < len(rows) else Text()
            row.truncate(width - 4, overflow="ellipsis", pad=True)
            lines.append(
                Text()
                .append(f"{down} ", "bright_black")
                .append_text(row)
                .append(f" {down}", "bright_black")
            )
        lines.append(Text(corners[2] + across * (width - 2) + corners[3], "bright_black"))
        return lines


def _named(channel: Channel, name: str) -> Text:
    finite = channel.last - channel.last == 0
    text = Text(f"{literal(name, 60)} ")
    return text.append(brief(channel.last), "bold" if finite else BAD)


def _happening_line(one: Happening, width: int) -> Text:
    style = BAD if one.alarm and not one.old else "red" if one.alarm else "yellow"
    if one.kind in ("finite-again", "returned", "long"):
        style = "green"
    clock = time.strftime("%H:%M:%S  ", time.localtime(one.clock)) if not one.old else "before    "
    text = Text().append(clock, "dim").append(happening_text(one), style)
    text.truncate(width - 4, overflow="ellipsis")
    return text


def _end_of(name: str, room: int) -> str:
    """Returns the end of a path, which tells more than its beginning."""
    return name if len(name) <= room else f"...{name[len(name) - room + 3 :]}" if room > 3 else ""


def _apart(left: Text, right: Text, width: int) -> Text:
    room = width - right.cell_len
    if room < left.cell_len:
        left.truncate(max(0, room - 1), overflow="ellipsis")
    return left.append(" " * max(0, room - left.cell_len)).append_text(right)


def _joined(row: tuple[Text, ...]) -> Text:
    out = Text()
    for part in row:
        out.append_text(part)
    return out


class Ended(SystemExit):
    """A signal asked the program to end."""


class Screen:
    """The terminal while it shows a view; as it was before, afterwards.

    Attributes:
        bytes: How much was written to it.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._input = sys.stdin.fileno() if sys.stdin and sys.stdin.isatty() else None
        self._modes: Any = None
        self._shown: list[str] = []
        self._size = (0, 0)
        self._console = Console(force_terminal=True, legacy_windows=False, markup=False)
        self._handlers: dict[int, Any] = {}
        self._open_input = True

    def __enter__(self) -> Screen:
        for name in (*_ENDING, "SIGTSTP"):
            if hasattr(signal, name):
                number = getattr(signal, name)
                react = self._pause if name == "SIGTSTP" else _end
                self._handlers[number] = signal.signal(number, react)
        self._enter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # a terminal that is gone needs nothing back
            self._leave()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def size(self) -> tuple[int, int]:
        """Returns columns and lines."""
        try:
            found = os.get_terminal_size(sys.stdout.fileno())
        except OSError:
            return 80, 24
        return (found.columns or 80), (found.lines or 24)

    def show(self, lines: list[Text]) -> None:
        """Draws a frame: what is there already is not sent again."""
        size = self.size()
        out: list[str] = []
        if size != self._size:
            self._size, self._shown = size, []
            out.append("\x1b[2J")
        rendered = [self._rendered(line) for line in lines[: size[1]]]
        for number, line in enumerate(rendered):
            if number >= len(self._shown) or self._shown[number] != line:
                out.append(f"\x1b[{number + 1};1H{line}\x1b[K")
        self._shown = rendered
        self._write("".join(out))

    def bell(self) -> None:
        """Rings."""
        self._write("\a")

    def wait(self, seconds: float) -> str:
        """Waits, and returns the keys that were pressed meanwhile."""
        if self._input is None or not self._open_input:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._input], [], [], seconds)
        if not ready:
            return ""
        keys = os.read(self._input, 64)
        self._open_input = bool(keys)
        return keys.decode("utf-8", "replace")

    def _rendered(self, line: Text) -> str:
        with self._console.capture() as captured:
            self._console.print(line, end="", soft_wrap=True, highlight=False)
        return captured.get()

    def _write(self, text: str) -> None:
        if not text:
            return
        encoding = sys.stdout.encoding or "utf-8"
        data = text.encode(encoding, "replace")
        self.bytes += len(data)
        sys.stdout.buffer.write(data)
        sys.stdout.flush()

    def _enter(self) -> None:
        if self._input is not None:
            import termios
            import tty

            self._modes = termios.tcgetattr(self._input)
            tty.setcbreak(self._input)
        self._size = (0, 0)
        self._write(_ENTER)

    def _leave(self) -> None:
        self._write(_LEAVE)
        if self._input is not None and self._modes is not None:
            import termios

            termios.tcsetattr(self._input, termios.TCSADRAIN, self._modes)

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Gives the terminal back while the program is stopped."""
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._enter()


def _end(number: int, frame: FrameType | None) -> None:
    raise Ended(128 + number)
