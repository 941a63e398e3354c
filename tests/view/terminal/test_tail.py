"""Files that grow, are replaced, emptied and deleted are followed without losing a line."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING

from nanguard.view.terminal import tail as tails
from nanguard.view.terminal.tail import Tail
from tests.nobody import as_nobody, open_folder

if TYPE_CHECKING:
    from pathlib import Path


def all_of(tail: Tail) -> tuple[bytes, list[str]]:
    text, news = b"", []
    while True:
        piece = tail.look()
        text += piece.text
        news += piece.news
        if not piece.more:
            return text, news


def test_growth_comes_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\ntw")
    tail = Tail(path)
    assert all_of(tail) == (b"one\n", ["opened"])
    with path.open("ab") as file:
        file.write(b"o\nthree\r")
    assert all_of(tail) == (b"two\nthree\r", [])
    with path.open("ab") as file:
        file.write(b"last")
    assert all_of(tail) == (b"", [])
    assert tail.rest() == b"last"


def test_a_rotated_file_is_read_to_its_end_and_the_new_one_from_its_beginning(
    tmp_path: Path,
) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\n")
    tail = Tail(path)
    all_of(tail)
    with path.open("ab") as file:
        file.write(b"two\nno end")
    path.rename(tmp_path / "a.log.1")
    path.write_bytes(b"three\n")
    assert all_of(tail) == (b"two\nno end\nthree\n", ["rotated"])


def test_an_emptied_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\ntwo\n")
    tail = Tail(path)
    all_of(tail)
    os.truncate(path, 0)
    assert all_of(tail) == (b"", ["truncated"])
    with path.open("ab") as file:
        file.write(b"new\n")
    assert all_of(tail) == (b"new\n", [])


def test_a_file_that_was_written_anew_and_is_longer_now_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\ntwo\n")
    tail = Tail(path)
    all_of(tail)
    path.write_bytes(b"another run, with more in it\nthan before\n")
    text, news = all_of(tail)
    assert text == b"another run, with more in it\nthan before\n"
    assert news == ["truncated"]


def test_a_deleted_file_is_followed_when_it_returns(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"one\n")
    tail = Tail(path)
    all_of(tail)
    path.unlink()
    assert all_of(tail) == (b"", ["deleted"])
    assert tail.problem == "it was deleted"
    # Another file keeps the number of the old one from being given again.
    (tmp_path / "other").touch()
    path.write_bytes(b"two\n")
    assert all_of(tail) == (b"two\n", ["returned"])
    assert tail.problem == ""


def test_an_endless_line_is_cut_and_the_next_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * (10 << 20) + b"\nnext\n")
    text, _ = all_of(Tail(path))
    first, second, rest = text.split(b"\n")
    assert len(first) <= tails.CHUNK + tails.LONGEST
    assert (second, rest) == (b"next", b"")


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"".join(b"line %05d\n" % n for n in range(1000)))
    tail = Tail(path, backlog=100)
    text, _ = all_of(tail)
    assert text.startswith(b"line 00991\n")
    assert tail.skipped == 11_000 - 100


def test_what_may_not_be_read_is_said_and_read_once_it_may() -> None:
    with open_folder() as folder:
        path = folder / "a.log"
        path.write_bytes(b"one\n")
        path.chmod(0)
        tail = Tail(path)
        with as_nobody():
            assert all_of(tail) == (b"", [])
        assert "Permission denied" in tail.problem
        path.chmod(0o644)
        with as_nobody():
            assert all_of(tail)[0] == b"one\n"
        assert tail.problem == ""


def test_a_pipe_does_not_hold_the_watch_up(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    tail = Tail(path)
    assert all_of(tail) == (b"", [])
    assert tail.problem == "it is no regular file"


def test_nothing_is_lost_while_a_thread_writes_and_rotates(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.touch()
    tail = Tail(path)
    done = threading.Event()

    def write() -> None:
        for part in range(4):
            with path.open("ab", buffering=0) as file:
                for n in range(500):
                    file.write(b"%d\n" % (500 * part + n))
            time.sleep(0.05)
            path.rename(tmp_path / f"a.log.{part}")
            path.touch()
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    seen = b""
    while not done.is_set():
        seen += all_of(tail)[0]
    seen += all_of(tail)[0]
    thread.join()
    assert [int(n) for n in seen.split()] == list(range(2000))


def test_what_is_old_and_what_came_since_are_never_one_piece(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"old\n" * 400_000)
    tail = Tail(path)
    pieces = [tail.look()]
    with path.open("ab") as file:
        file.write(b"new\n")
    while pieces[-1].more:
        pieces.append(tail.look())
    assert pieces[-1].text == b"new\n"
    assert {line for piece in pieces[:-1] for line in piece.text.split()} == {b"old"}


def test_a_file_that_comes_later_is_new_from_its_beginning(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "a.log")
    assert all_of(tail) == (b"", [])
    (tmp_path / "a.log").write_bytes(b"one\n")
    assert all_of(tail) == (b"one\n", ["opened"])
    assert tail.old == 0
