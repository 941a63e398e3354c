"""Curves: bounded, every extreme kept, gaps marked and never crossed."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from nanguard.view.terminal.plot import PlotTrace, Scale, brief, draw
from nanguard.view.terminal.view import View
from nanguard.view.terminal.watch_session import Session, Wanted, Watching

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_trace_of_many_numbers_is_small_and_keeps_extremes_and_bad_ones() -> None:
    values = [2.0 + math.sin(n / 1000) for n in range(200_000)]
    values[123_456], values[77_777], values[150_001] = 99.0, -99.0, math.nan
    trace = PlotTrace()
    for at in range(0, len(values), 1250):
        trace.extend(values[at : at + 1250], list(range(at, at + 1250)))
    assert len(trace.buckets) <= 1024
    columns = trace.columns(140)
    assert max(one.high for one in columns) == 99.0
    assert min(one.low for one in columns) == -99.0
    assert sum(one.bad for one in columns) == 1
    assert sum(one.count for one in columns) == len(values)
    assert (trace.first, trace.last) == (0, 199_999)


def test_a_gap_is_marked_and_not_crossed() -> None:
    trace = PlotTrace()
    trace.extend([1.0] * 20 + [math.nan] * 20 + [1.0] * 20, list(range(60)))
    rows, _ = draw(trace, 49, 6, log=None, style="")
    texts = [row.plain[9:] for row in rows]
    axis = texts[-1]
    assert axis.count("\u00d7") >= 10
    (curve,) = [text for text in texts[:-1] if any("\u2800" < c <= "\u28ff" for c in text)]
    middle = curve[15:25]
    assert middle == "░" * 10
    assert "░" not in curve[:12]
    assert "░" not in curve[30:]


def test_a_few_peaks_do_not_flatten_a_curve_and_are_marked() -> None:
    trace = PlotTrace()
    values = [2.0 + n % 5 / 10 for n in range(200)]
    values[100] = 1e6
    trace.extend(values, list(range(200)))
    rows, scale = draw(trace, 60, 8, log=None, style="")
    assert scale.high < 3.0
    assert scale.most == 1e6
    assert "▲" in rows[0].plain
    _, whole = draw(trace, 60, 8, log=False, style="")
    assert whole.high == 1e6


def test_scales_hold_whatever_comes() -> None:
    for values in ([], [5.0], [0.0, 0.0], [-1e308, 1e308], [math.nan], [1e-300, 1e300], [-1.0]):
        trace = PlotTrace()
        trace.extend(values, None)
        for log in (None, True, False):
            rows, _ = draw(trace, 30, 5, log=log, style="")
            assert len(rows) == 5
            assert all(len(row) <= 30 for row in rows)
    assert Scale.of([], log=None).high == 1.0


def test_numbers_are_short() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        value = rng.uniform(-10, 10) * 10 ** rng.randrange(-300, 300)
        assert len(brief(value)) <= 8
    assert brief(65536.0) == "65536"
    assert brief(math.nan) == "nan"


def frame(paths: list[Path], width: int, height: int, **how: bool) -> list[str]:
    session = Session(Wanted(tuple(map(str, paths))))
    Watching(session).once()
    lines = View(**how).frame(session, width, height)
    session.close()
    assert len(lines) == height
    assert all(line.cell_len <= width for line in lines), [line.plain for line in lines]
    return [line.plain for line in lines]


def test_a_frame_fills_any_terminal(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text(
        "".join(
            f"step {n}/500 loss {'nan' if 60 < n < 80 else 5 / (n + 1):.4} lr 1e-4\n"
            if not 60 < n < 80
            else f"step {n}/500 loss nan lr 1e-4\n"
            for n in range(200)
        )
    )
    for width, height in ((80, 24), (160, 50), (40, 10), (20, 3), (300, 90), (1, 1)):
        width, height = max(20, width), max(3, height)
        told = "\n".join(frame([path], width, height))
        if height > 20:
            assert "step 199 / 500" in told
            assert "loss is nan" in told
    assert all(char.isascii() for line in frame([path], 80, 24, plain=True) for char in line)


def test_a_frame_of_several_runs_lists_them(tmp_path: Path) -> None:
    for name in "abcdef":
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text("step 1 loss 2.0\nstep 2 loss 1.5\n")
    told = "\n".join(frame([tmp_path], 100, 40))
    assert all(f"{name} " in told for name in "abcdef")
    assert "tab next run" in told


def test_hostile_lines_are_shown_as_text(tmp_path: Path) -> None:
    path = tmp_path / "a[red]\x1b[31m.log"
    path.write_text(
        "step 1 loss 2.0\nWARNING: NaN loss detected at step 2 \x1b]0;owned\x07 \u202e [bold]x\b\n"
    )
    told = "\n".join(frame([path], 120, 30))
    assert "\x1b" not in told
    assert "\x07" not in told
    assert "\u202e" not in told
    assert "NaN loss detected" in told
    assert "[bold]" in told


def test_what_follows_long_and_hostile_lines_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    parts = [b"loss " * 200_000, b"\x1b]" * 500_000, b"{" * 1_000_000, b"1." * 500_000]
    path.write_bytes(b"step 1 loss 2.0\n" + b"\n".join(parts) + b"\nstep 2 loss 1.0\n")
    told = "\n".join(frame([path], 100, 30))
    assert "step 2" in told


def test_no_colour_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.text import Text

    from nanguard.view.terminal.view import Screen

    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in Screen()._rendered(Text("bad", "red"))
