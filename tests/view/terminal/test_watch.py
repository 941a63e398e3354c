"""``nanguard watch`` as a user runs it: in a terminal, in lines, in scripts."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nanguard.cli import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOGS = Path(__file__).parents[2] / "logs"
PROGRAM = (
    "import nanguard.view.terminal.watch_session as w; w.EVERY = 0.1\n"
    "import nanguard.view.terminal.watch_session as s; s._SEARCH = 0.2\n"
    "import nanguard.view.terminal.watch_session as r; r._QUIET = 0.5\n"
    "from nanguard.cli import main; main()"
)
GOOD = "step {n}/1000 loss {loss:.4f} grad_norm 0.5 lr 1e-4\n"


def good(first: int, count: int) -> str:
    return "".join(GOOD.format(n=n, loss=2.0 + n % 7 / 100) for n in range(first, first + count))


def add(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    def run_here(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["nanguard", "watch", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out + said.err

    return run_here


class Lines:
    """A watch that prints lines."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "watch", *words, "--every", "0.2"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        self.said = ""
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line

    def wait_for(self, words: str) -> None:
        _until(lambda: words in self.said, lambda: f"no {words!r} in:\n{self.said}")

    def end(self) -> int:
        code = self.process.wait(20)
        self._thread.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def _until(done: Callable[[], bool], else_say: Callable[[], str]) -> None:
    """Waits for something that comes, however busy the machine is; says what there is if not."""
    for _ in range(6000):
        if done():
            return
        time.sleep(0.02)
    pytest.fail(else_say())


@pytest.fixture
def watching() -> Iterator[Callable[..., Lines]]:
    started: list[Lines] = []

    def start(*words: object) -> Lines:
        started.append(Lines(*map(str, words)))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.kill()
        one.end()


def test_once_reads_what_is_there_and_scripts_see_whether_it_is_bad(
    tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    fine, bad = tmp_path / "fine.log", tmp_path / "bad.log"
    fine.write_text(good(0, 100))
    bad.write_text(good(0, 100) + "step 100/1000 loss nan grad_norm nan lr 1e-4")
    code, told = run(fine, "--once", "--until-alarm")
    assert (code, "no alarm" in told) == (0, True)
    code, told = run(bad, "--once", "--until-alarm")
    assert code == 1
    assert "ALARM" in told
    assert "step 100: loss is nan" in told
    assert run(bad, "--once")[0] == 0
    code, told = run(fine, bad, "--once", "--until-alarm")
    assert code == 1
    assert "fine.log  step 99 / 1 000  9.9%  loss 2.01  grad norm 0.5  lr 1.0e-04" in told
    assert "\x1b" not in told


def test_lines_follow_growth_rotation_truncation_and_deletion(
    tmp_path: Path, watching: Callable[..., Lines]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 10))
    watch = watching(path)
    watch.wait_for("step 9 / 1 000")
    add(path, good(10, 10))
    watch.wait_for("step 19 / 1 000")
    path.rename(tmp_path / "train.log.1")
    path.write_text(good(20, 10))
    watch.wait_for("was replaced")
    watch.wait_for("step 29 / 1 000")
    os.truncate(path, 0)
    watch.wait_for("was emptied")
    add(path, good(30, 10))
    watch.wait_for("step 39 / 1 000")
    path.unlink()
    watch.wait_for("was deleted")
    path.write_text(good(40, 10))
    watch.wait_for("step 49 / 1 000")
    watch.process.send_signal(signal.SIGINT)
    assert watch.end() == 0
    assert "Traceback" not in watch.said
    assert "\x1b" not in watch.said


def test_an_alarm_ends_it_and_what_was_bad_before_and_is_over_does_not(
    tmp_path: Path, watching: Callable[..., Lines]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 100) + "step 100/1000 loss inf\n" + good(101, 100))
    watch = watching(path, "--until-alarm")
    watch.wait_for("finite again")
    add(path, good(201, 50))
    watch.wait_for("step 250")
    assert watch.process.poll() is None
    add(path, "step 251/1000 loss nan\n")
    assert watch.end() == 1
    assert "ALARM" in watch.said
    assert "step 251: loss is nan" in watch.said


def test_a_run_that_is_bad_already_is_an_alarm(
    tmp_path: Path, run: Callable[..., tuple[int, str]]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 100) + "step 100/1000 loss nan\n" * 3)
    code, told = run(path, "--until-alarm")
    assert (code, "since before the watch" in told) == (1, True)


def test_the_end_of_a_run_is_a_quiet_end(tmp_path: Path, watching: Callable[..., Lines]) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 100))
    watch = watching(path, "--until-alarm")
    watch.wait_for("step 99")
    add(path, good(100, 5) + "Training finished.\n")
    assert watch.end() == 0
    assert "ALARM" not in watch.said


def test_the_end_of_the_process_is_the_end_of_the_run(
    tmp_path: Path, watching: Callable[..., Lines]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 100))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as job:
        watch = watching(path, "--pid", job.pid)
        watch.wait_for("step 99")
        assert watch.process.poll() is None
        job.kill()
    assert watch.end() == 0


def test_last_line_without_an_end_is_an_alarm_when_the_process_has_ended(
    tmp_path: Path, watching: Callable[..., Lines]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 100))
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as job:
        watch = watching(path, "--pid", job.pid, "--until-alarm")
        watch.wait_for("step 99")
        add(path, GOOD.format(n=100, loss=float("nan")).rstrip("\n"))
        job.kill()
    assert watch.end() == 1
    assert "ALARM" in watch.said


def test_a_log_that_stops_to_grow_is_an_alarm(
    tmp_path: Path, watching: Callable[..., Lines]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 10))
    watch = watching(path, "--stall", "1", "--until-alarm")
    watch.wait_for("step 9")
    add(path, good(10, 10))
    assert watch.end() == 1
    assert "nothing new for" in watch.said


def test_what_is_missing_is_said(tmp_path: Path, run: Callable[..., tuple[int, str]]) -> None:
    (tmp_path / "empty").mkdir()
    for path, said in (
        (tmp_path / "runs" / "train.log", "there is no such file or folder"),
        (tmp_path / "empty", "no run here"),
        ("s3://bucket/a.log", "cannot be watched"),
    ):
        code, told = run(path)
        assert code == 2
        assert said in told
        assert "do:" in told


def test_what_is_missing_is_waited_for(tmp_path: Path, watching: Callable[..., Lines]) -> None:
    path = tmp_path / "runs" / "train.log"
    watch = watching(path, "--wait", "--until-alarm")
    time.sleep(0.3)
    path.parent.mkdir()
    path.write_text(good(0, 10))
    watch.wait_for("step 9")
    add(path, "step 10/1000 loss nan\n")
    assert watch.end() == 1


def test_a_log_that_is_no_lines_is_read_anew_when_it_has_changed(
    tmp_path: Path, watching: Callable[..., Lines]
) -> None:
    path = tmp_path / "trainer_state.json"

    def write(losses: list[float]) -> None:
        rows = [{"step": at, "loss": loss} for at, loss in enumerate(losses)]
        new = tmp_path / "new"
        new.write_text(json.dumps({"log_history": rows}, indent=2))
        new.rename(path)

    write([3.0 - n / 100 for n in range(40)])
    watch = watching(path, "--until-alarm")
    watch.wait_for("step 39")
    write([3.0 - n / 100 for n in range(60)])
    watch.wait_for("step 59")
    assert watch.process.poll() is None
    write([*(3.0 - n / 100 for n in range(60)), float("nan")])
    assert watch.end() == 1
    assert "step 60: loss is nan" in watch.said


@pytest.mark.parametrize("name", ["tb_run1", "tb_ok"])
def test_a_folder_of_tensorboard_is_watched(
    name: str, tmp_path: Path, watching: Callable[..., Lines]
) -> None:
    watch = watching(shutil.copytree(LOGS / "open" / name, tmp_path / name))
    watch.wait_for("loss")
    watch.process.send_signal(signal.SIGINT)
    assert watch.end() == 0
    assert ("since before the watch" in watch.said) == (name == "tb_run1")


def test_a_folder_is_watched_with_the_runs_that_come_into_it(
    tmp_path: Path, watching: Callable[..., Lines]
) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.log").write_text(good(0, 10))
    watch = watching(tmp_path)
    watch.wait_for("  a  step 9")
    watch.wait_for("  b  step 9")
    (tmp_path / "c").mkdir()
    lines = [json.dumps({"step": n, "update": n, "loss": 2.0}) + "\n" for n in range(5)]
    (tmp_path / "c" / "metrics.jsonl").write_text("".join(lines))
    watch.wait_for("  c  step 4")
    event = {"code": "RUN001", "name": "x", "severity": "error", "message": "bad", "step": 4}
    (tmp_path / "c" / "events.jsonl").write_text(json.dumps(event) + "\n")
    watch.wait_for("guard: bad")


def test_the_command_gets_the_words_as_values_and_runs_none_of_them(
    tmp_path: Path, watching: Callable[..., Lines]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 10))
    out = tmp_path / "out"
    hostile = "WARNING NaN loss detected $(touch PWN1) `touch PWN2`; touch PWN3 \" ' && touch PWN4"
    command = f'cd {tmp_path}; printf "%s|%s|%s\\n" "$NANGUARD_ALARM" "$NANGUARD_STEP" "$NANGUARD_MESSAGE" >> out; echo $NANGUARD_MESSAGE > /dev/null'  # noqa: E501
    watch = watching(path, "--notify", command)
    watch.wait_for("step 9")
    add(path, f"{hostile}\n")
    _until(out.exists, lambda: watch.said)
    add(path, "step 10/1000 loss nan\n")
    _until(lambda: out.read_text().count("\n") == 2, lambda: out.read_text())
    add(path, good(11, 10) + "step 21/1000 loss nan\n")
    watch.wait_for("step 21: loss is nan")
    time.sleep(0.3)
    first, second = out.read_text().splitlines()
    assert first.startswith("log-says|9|the log says: WARNING NaN loss detected $(touch PWN1)")
    assert second == "non-finite-loss|10|loss is nan"
    assert not list(tmp_path.glob("PWN*"))


def test_a_command_that_fails_is_told_and_ends_nothing(
    tmp_path: Path, watching: Callable[..., Lines]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 10))
    watch = watching(path, "--notify", "exit 7")
    watch.wait_for("step 9")
    add(path, "step 10/1000 loss nan\n")
    watch.wait_for("no alert reached the command for alarms: it ended with 7")
    add(path, good(11, 5))
    watch.wait_for("step 15")


class Terminal:
    """A terminal of a given size with a watch in it."""

    def __init__(self, width: int, height: int, *words: str, **environment: str) -> None:
        self.own, self.other = pty.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(self.other)
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "watch", *words],
            stdin=self.other,
            stdout=self.other,
            stderr=self.other,
            env={**os.environ, "TERM": "xterm-256color", **environment},
            start_new_session=True,
        )
        self.said = ""

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.other, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def read(self, seconds: float = 0.1) -> str:
        new = b""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if select.select([self.own], [], [], left)[0]:
                new += os.read(self.own, 1 << 16)
        told = new.decode(errors="replace")
        self.said += told
        return told

    def wait_for(self, words: str) -> None:
        _until(lambda: bool(self.read() is None or words in self.said), lambda: repr(self.said))

    def press(self, keys: bytes) -> None:
        os.write(self.own, keys)

    def end(self) -> int:
        _until(lambda: self.read() is None or self.process.poll() is not None, lambda: self.said)
        self.read()
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.own)
        os.close(self.other)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(width: int, height: int, *words: object, **environment: str) -> Terminal:
        opened.append(Terminal(width, height, *map(str, words), **environment))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def rows_named(told: str) -> list[int]:
    return [int(row) for row in re.findall(r"\x1b\[(\d+);1H", told)]


def test_the_view_draws_resizes_and_gives_the_terminal_back(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 200))
    screen = terminal(80, 24, path)
    screen.wait_for("q quit")
    assert "\x1b[?1049h" in screen.said
    assert max(rows_named(screen.said)) == 24
    assert termios.tcgetattr(screen.other) != screen.before
    add(path, "step 200/1000 loss nan\n")
    screen.wait_for("ALARM")
    screen.said = ""
    screen.resize(120, 40)
    screen.wait_for("\x1b[40;1H")
    assert "\x1b[2J" in screen.said
    screen.press(b"l")
    screen.press(b"q")
    assert screen.end() == 0
    assert "\x1b[?25h\x1b[?1049l" in screen.said
    assert termios.tcgetattr(screen.other) == screen.before
    assert "Traceback" not in screen.said


def test_only_what_has_changed_is_sent(tmp_path: Path, terminal: Callable[..., Terminal]) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 200))
    screen = terminal(160, 50, path)
    screen.wait_for("q quit")
    screen.read(0.5)
    quiet = screen.read(1.2)
    # The clock, and nothing else.
    assert set(rows_named(quiet)) <= {1}
    assert len(quiet) < 2000


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_leave_the_terminal_as_it_was(
    tmp_path: Path, terminal: Callable[..., Terminal], number: signal.Signals
) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 20))
    screen = terminal(80, 24, path)
    screen.wait_for("q quit")
    screen.process.send_signal(number)
    assert screen.end() == (0 if number == signal.SIGINT else 128 + number)
    assert "\x1b[?1049l" in screen.said
    assert termios.tcgetattr(screen.other) == screen.before
    assert "Traceback" not in screen.said


def test_a_view_that_is_stopped_gives_the_terminal_back_and_takes_it_again(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 20))
    screen = terminal(80, 24, path)
    screen.wait_for("q quit")
    screen.process.send_signal(signal.SIGTSTP)
    screen.wait_for("\x1b[?1049l")
    assert termios.tcgetattr(screen.other) == screen.before
    screen.said = ""
    screen.process.send_signal(signal.SIGCONT)
    screen.wait_for("q quit")
    assert "\x1b[?1049h" in screen.said
    screen.press(b"q")
    assert screen.end() == 0


def test_the_bell_rings_once_for_an_alarm_and_not_for_what_a_log_holds(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 20) + "WARNING: NaN loss detected at step 3\a\a\x1b]0;owned\x07\n")
    screen = terminal(80, 24, path, "--bell")
    screen.wait_for("q quit")
    assert "\a" not in screen.said
    assert "owned\x07" not in screen.said
    add(path, "step 20/1000 loss nan\n")
    screen.wait_for("\a")
    screen.read(0.5)
    assert screen.said.count("\a") == 1


def test_a_terminal_without_colours_is_respected(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 20))
    grey = terminal(80, 24, path, NO_COLOR="1")
    grey.wait_for("q quit")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", grey.said)


def test_lines_are_printed_on_a_terminal_that_has_no_screen(
    tmp_path: Path, terminal: Callable[..., Terminal]
) -> None:
    path = tmp_path / "train.log"
    path.write_text(good(0, 20) + "step 20/1000 loss nan\n")
    dumb = terminal(80, 24, path, "--until-alarm", TERM="dumb")
    assert dumb.end() == 1
    assert "ALARM" in dumb.said
    assert "\x1b" not in dumb.said
