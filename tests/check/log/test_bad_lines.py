"""A damaged line of a log is a finding, and all other lines are read and judged."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from nanguard.check.log.log_reader import open_sources
from nanguard.check.log.quantities import Quantity
from nanguard.check.scan import Scan
from nanguard.cli import main
from nanguard.view.terminal.tail import LineReader
from nanguard.view.terminal.watch_state import RunState

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

COUNT, AT, NAN = 60, 30, 50


def loss(step: int) -> float:
    return float("nan") if step == NAN else 3.0 - step / 100


def as_json(step: int) -> str:
    return json.dumps({"step": step, "loss": loss(step), "grad_norm": 1.0 + step % 5 / 10})


def as_dict(step: int) -> str:
    return str({"step": step, "loss": loss(step), "grad_norm": 1.0 + step % 5 / 10})


def as_text(step: int) -> str:
    return f"step {step}/60 loss={loss(step)} grad_norm={1.0 + step % 5 / 10}"


def as_csv(step: int) -> str:
    return f"{step},{loss(step)},{1.0 + step % 5 / 10}"


FORMATS: dict[str, Callable[[int], str]] = {
    "metrics.jsonl": as_json,
    "metrics.log": as_json,
    "trainer.log": as_dict,
    "train.log": as_text,
    "metrics.csv": as_csv,
    "metrics.tsv": lambda step: as_csv(step).replace(",", "\t"),
}
CUT = {"metrics.jsonl", "metrics.log", "metrics.csv", "metrics.tsv"}


def header(name: str) -> list[bytes]:
    names = {"metrics.csv": b"step,loss,grad_norm", "metrics.tsv": b"step\tloss\tgrad_norm"}
    return [names[name]] if name in names else []


def cut_short(line: bytes) -> bytes:
    return line[: len(line) // 2 - 4]


def with_zeros(line: bytes) -> bytes:
    return b"\0" * 512 + line


def with_surrogate(line: bytes) -> bytes:
    if line.startswith(b'{"'):
        return line.replace(b'"loss"', b'"lo\\ud800ss"')
    if b"loss" in line:
        return line.replace(b"loss", b"lo\xed\xa0\x80ss")
    return line.replace(b"2.7", b"2\xed\xa0\x80.7")


def damaged(name: str, damage: Callable[[bytes], bytes]) -> bytes:
    lines = header(name) + [FORMATS[name](step).encode() for step in range(COUNT)]
    at = AT + len(header(name))
    lines[at] = damage(lines[at])
    return b"\n".join(lines) + b"\n"


CASES = [
    (name, damage)
    for name in FORMATS
    for damage in (cut_short, with_zeros, with_surrogate)
    # Half a line of plain text is a line of plain text.
    if damage is not cut_short or name in CUT
]


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_the_line_is_a_finding_and_the_rest_is_judged(
    name: str,
    damage: Callable[[bytes], bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    path.write_bytes(damaged(name, damage))
    monkeypatch.setattr(sys, "argv", ["nanguard", "check", "--format", "json", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    report = json.loads(capsys.readouterr().out)
    above = len(header(name)) + 1
    found = {one["name"]: one for one in report["findings"]}
    assert set(found) == {"unreadable-line", "non-finite-loss"}
    assert found["unreadable-line"]["line"] == AT + above
    assert found["unreadable-line"]["message"].startswith(f"line {AT + above} cannot be read: ")
    assert found["non-finite-loss"]["line"] == NAN + above
    assert report["not_checked"] == []

    (log,) = open_sources([path], Scan())
    (losses,) = log.of(Quantity.LOSS)
    assert len(losses) >= COUNT - 1
    assert [bad.line for bad in log.bad_lines] == [AT + above]

    state = RunState(name)
    reader = LineReader(path, path.read_bytes()[:65536])
    for line in path.read_bytes().splitlines(keepends=True):
        state.take(reader.read(line), old=False)
    assert state.logs[str(path)].bad_lines == log.bad_lines
    state.judge(old=False)
    assert {one.kind for one in state.happenings if one.alarm} == set(found)


@pytest.mark.parametrize("name", FORMATS)
def test_a_log_that_is_whole_or_still_being_written_has_no_bad_line(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    whole = damaged(name, lambda line: line)
    for text in (whole, whole[:-1], whole[:-9], whole.replace(b"\n", b"\r\n")):
        path.write_bytes(text)
        (log,) = open_sources([path], Scan())
        assert log.bad_lines == []


def test_a_large_log_is_searched_for_bad_lines_as_well(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    line = '{{"step": {}, "loss": 2.0, "grad_norm": 1.0, "lr": 0.0001, "time": 1.5e9}}\n'
    lines = [line.format(step).encode() for step in range(70_000)]
    lines[40_000] = b"x\n"
    lines[50_000] = b"\0" * 512 + lines[50_000]
    lines[60_000] = lines[60_000].replace(b"grad", b"\\udfff")
    path.write_bytes(b"".join(lines))
    assert path.stat().st_size > 4 << 20
    (log,) = open_sources([path], Scan())
    assert [bad.line for bad in log.bad_lines] == [40_001, 50_001, 60_001]
    assert len(log.of(Quantity.LOSS)[0]) == 69_999


def test_events_of_a_guard_with_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f"{as_json(step)}\n" for step in range(40)))
    event = '{"code": "RUN001", "name": "non-finite-loss", "step": 3, "message": "the loss is nan"}'
    events = tmp_path / "events.jsonl"
    events.write_bytes(f"{event}\n{event[:30]}\n".encode() + b"\0" * 512 + f"{event}\n".encode())
    (log,) = open_sources([tmp_path / "metrics.jsonl", events], Scan())
    assert [(bad.line, bad.path) for bad in log.bad_lines] == [(2, str(events)), (3, str(events))]
    assert len(log.notes) == 2
