"""Threads that train in turns, at once and in between: whose step may be taken for another's."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

import pytest

from nanguard.replay.frames import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Actor(threading.Thread):
    """A thread that does one thing after the other, when it is said to."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.todo: queue.Queue[Callable[[], Any] | None] = queue.Queue()
        self.done: queue.Queue[Any] = queue.Queue()
        self.start()

    def run(self) -> None:
        while (what := self.todo.get()) is not None:
            self.done.put(what())

    def does(self, what: Callable[[], Any]) -> Any:
        self.todo.put(what)
        return self.done.get(timeout=60)

    def end(self) -> None:
        self.todo.put(None)
        self.join(60)


class Scene:
    """Three threads, and who was left alone beside whom."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []
        self.turns = Turns(lambda alone, watched: self.told.append((alone, watched)))
        self.threads = {name: Actor(name) for name in "abc"}

    def plays(self, *calls: str) -> list[bool]:
        """Plays ``a backward`` and ``b step`` one after the other; returns which were watched."""
        return [self._one(*call.split()) for call in calls]

    def _one(self, name: str, what: str) -> bool:
        def do() -> bool:
            new = self.turns.enter(step=what == "step")
            if new:
                self.turns.leave()
            return not self.turns.is_alone()

        return bool(self.threads[name].does(do))


@pytest.fixture
def scene() -> Iterator[Scene]:
    made = Scene()
    yield made
    for thread in made.threads.values():
        thread.end()


def test_threads_that_take_turns_share_a_watch(scene: Scene):
    calls = ["a backward", "a backward", "a step", "b backward", "b step", "c step"]
    assert all(scene.plays(*calls, *calls))
    assert scene.told == []


@pytest.mark.parametrize(
    ("calls", "alone"),
    [
        (["a backward", "b backward", "b step", "a step"], "a"),
        (["a backward", "b backward", "a step", "b step"], "b"),
        (["a backward", "b backward", "b step", "b backward", "b step", "a step"], "a"),
    ],
)
def test_a_step_whose_loss_another_step_has_used_up_is_named(
    scene: Scene, calls: list[str], alone: str
):
    watched = {"a": "b", "b": "a"}[alone]
    assert scene.plays(*calls) == [True] * (len(calls) - 1) + [False]
    assert scene.told == [(alone, watched)]
    assert scene.plays(f"{alone} backward", f"{watched} backward", f"{alone} step") == [
        False,
        True,
        False,
    ]
    assert scene.told == [(alone, watched)]
    scene.threads[watched].end()
    assert scene.plays(f"{alone} backward", f"{alone} step") == [True, True]


def test_workers_that_go_backward_for_another_thread_are_one_run(scene: Scene):
    calls = ["a backward", "b backward", "c step", "b backward", "a backward", "c step"]
    assert all(scene.plays(*calls, "a backward", "a step", "b backward", "b step"))
    assert scene.told == []


def test_a_thread_that_comes_while_another_is_inside_is_left_alone(scene: Scene):
    assert scene.threads["a"].does(lambda: scene.turns.enter(step=False))
    assert scene.plays("b backward") == [False]
    scene.threads["a"].does(scene.turns.leave)
    assert scene.told == [("b", "a")]
    assert scene.plays("a step", "b backward", "b step", "a backward") == [True, False, False, True]
