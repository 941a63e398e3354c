"""The view of runs in a terminal, as lines of text of a given size."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.text import Text

from nanguard.check.log.quantities import Quantity
from nanguard.findings import name_of
from nanguard.view.report.fields import literal
from nanguard.view.terminal import status_words as words
from nanguard.view.terminal.plot import BAD, brief, draw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.view.terminal.channels import Channel, Happening
    from nanguard.view.terminal.watch_session import Session
    from nanguard.view.terminal.watched import WatchedRun

_SMALL = (
    (Quantity.GRAD_NORM, "gradient norm"),
    (Quantity.RATE, "learning rate"),
    (Quantity.SCALE, "scale"),
)
_LISTED = 8
_KEYS = "q quit  l log scale"
# Below this a frame holds no curve.
_LOW = 12


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
            lines += self._list(session, width, max(2, min(_LISTED, height // 5)))
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
        state, style = words.state_of(run) if run else ("waiting", words.WAITING)
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
            state, style = words.state_of(run)
            mark = "> " if place == chosen else "  "
            name = Text().append(mark + run.state.name, "bold" if place == chosen else "")
            name.truncate(max(10, width * 2 // 5), overflow="ellipsis", pad=True)
            where, share, _ = words.progress(run.state)
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
        where, share, speed = words.progress(run.state)
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
        return [Text(" " + "  ".join(words.numbers(run.state)))]

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
            at = "" if channel.lowest_step is None else f" at {words.spaced(channel.lowest_step)}"
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
        rows = [_told(one, width) for one in reversed(last)]
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


def _told(one: Happening, width: int) -> Text:
    style = BAD if one.alarm and not one.old else "red" if one.alarm else "yellow"
    if one.kind in ("finite-again", "returned", "long"):
        style = "green"
    clock = time.strftime("%H:%M:%S  ", time.localtime(one.clock)) if not one.old else "before    "
    text = Text().append(clock, "dim").append(words.happening(one), style)
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
