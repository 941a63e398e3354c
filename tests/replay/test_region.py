"""The piece of a script that makes a step: which lines, which names, and calling it again."""

from __future__ import annotations

import linecache
import sys
from typing import TYPE_CHECKING, Any

import pytest

from nanguard.replay.region import NoRegionError, Region, source_of

if TYPE_CHECKING:
    from types import FrameType


def run(text: str, name: str, **names: Any) -> tuple[dict[str, Any], list[tuple[FrameType, int]]]:
    """Runs a script from memory; returns its globals and the frames that called ``mark``."""
    marks: list[tuple[FrameType, int]] = []

    def mark(*_args: Any) -> None:
        frame = sys._getframe(1)
        marks.append((frame, frame.f_lineno))

    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    module = {"mark": mark, "__name__": "script", **names}
    exec(compile(text, name, "exec"), module)
    return module, marks


def region_of(text: str, name: str, **names: Any) -> tuple[Region, dict[str, Any]]:
    """Returns the region around the first two marks of a script."""
    module, marks = run(text, name, **names)
    (frame, first), (other, second) = marks[:2]
    assert frame is other
    return Region(frame.f_code, module, (first, second)), module


LOOP = """
total = 0
for step, (x, y) in enumerate([(1, 2), (3, 4)]):
    x = x + 1
    if x > 100:
        z = 1
    mark()
    out = x * y + total
    total += out
    mark()
    print(out)
"""


def test_body_of_the_innermost_loop():
    region, _ = region_of(LOOP, "loop.py")
    assert (region.kind, region.first, region.last) == ("loop", 4, 11)


def test_live_names_are_what_is_read_before_it_is_written():
    region, _ = region_of(LOOP, "loop.py")
    assert set(region.whole().live) == {"x", "y", "total"}


def test_called_again_it_gives_the_same_and_leaves_the_run_alone():
    region, module = region_of(LOOP, "loop.py")
    before = module["total"]
    seen: dict[str, Any] = {}
    region.whole().call(module, {"x": 3, "y": 4, "total": 4}, None, seen.update)
    assert (seen["out"], seen["total"]) == (20, 24)
    assert module["total"] == before


def test_piece_that_begins_at_a_line():
    region, module = region_of(LOOP, "loop.py")
    piece = region.at(8)
    assert (piece.first, set(piece.live)) == (8, {"x", "y", "total"})
    seen: dict[str, Any] = {}
    piece.call(module, {"x": 5, "y": 2, "total": 1}, None, seen.update)
    assert seen["out"] == 11


WITHIN = """
import contextlib
def work(items):
    for item in items:
        with contextlib.suppress(ValueError):
            item = item * 2
            if item:
                doubled = item * 2
                mark(doubled)
            else:
                doubled = 0
            mark()
work([1])
"""


def test_what_surrounds_a_statement_stays_and_what_stands_before_it_goes():
    region, module = region_of(WITHIN, "within.py")
    piece = region.at(9)
    assert "item" not in piece.stores
    seen: dict[str, Any] = {}
    piece.call(module, {"items": [], "item": 7, "doubled": 3}, None, seen.update)
    assert seen["doubled"] == 3


METHOD = """
class Base:
    def size(self):
        return 5
class Trainer(Base):
    def __init__(self):
        self.__count = 0
    def size(self):
        return 1
    def step(self, batch):
        '''Documented.'''
        mark()
        self.__count += super().size() + batch
        mark()
        return self.__count
trainer = Trainer()
trainer.step(1)
"""


def test_private_names_and_super_in_a_method():
    region, module = region_of(METHOD, "method.py")
    assert (region.kind, region.first) == ("function", 12)
    trainer = module["trainer"]
    region.whole().call(
        module, {"self": trainer, "batch": 2}, module["Trainer"], lambda _names: None
    )
    assert trainer._Trainer__count == 6 + 7


CLOSURES = """
def outer():
    count = 0
    def step(x):
        nonlocal count
        count += x
        mark()
        add = lambda y: count + y
        values = [add(v) for v in range(x) if v]
        mark()
        return values
    return step(3), count
outer()
"""


def test_nonlocal_names_belong_to_the_replay():
    region, module = region_of(CLOSURES, "closures.py")
    seen: dict[str, Any] = {}
    region.whole().call(module, {"x": 3, "count": 10}, None, seen.update)
    assert (seen["count"], seen["values"]) == (13, [14, 15])


def test_name_that_was_not_bound_is_not_bound_again():
    region, module = region_of(WITHIN, "within.py")
    with pytest.raises(UnboundLocalError):
        region.whole().call(module, {"items": []}, None, lambda _names: None)


LEAVES = """
for step in range(3):
    mark()
    if step == 0:
        mark()
        continue
    break
"""


def test_continue_and_break_end_the_piece():
    region, module = region_of(LEAVES, "leaves.py")
    for step in (0, 1):
        region.whole().call(module, {"step": step}, None, lambda _names: None)


def test_names_are_seen_also_when_it_raises():
    text = "for a in [1]:\n    mark()\n    b = a / (a - 1 if a > 1 else 1)\n    mark()\n"
    region, module = region_of(text, "raises.py")
    seen: dict[str, Any] = {}
    with pytest.raises(TypeError):
        region.whole().call(module, {"a": "x"}, None, seen.update)
    assert seen["a"] == "x"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f():\n    mark()\n    yield 1\n    mark()\nlist(f())\n", "yields within the step"),
        ("mark()\nmark()\n", "not in a loop or a function"),
    ],
)
def test_code_that_cannot_be_called_says_why(text, message):
    module, marks = run(text, f"refused{len(text)}.py")
    (frame, first), (_, second) = marks
    with pytest.raises(NoRegionError, match=message):
        Region(frame.f_code, module, (first, second)).whole()


def test_source_that_changed_since_the_run_began():
    module, marks = run("for i in [1]:\n    mark()\n    mark()\n", "changed.py")
    linecache.cache["changed.py"] = (1, None, ["for i in [2]:\n", "    mark(i)\n"], "changed.py")
    with pytest.raises(NoRegionError, match="has changed since"):
        source_of(marks[0][0].f_code, module)


def test_source_that_nobody_has():
    marks = []
    exec(compile("mark()", "nowhere.py", "exec"), {"mark": lambda: marks.append(sys._getframe(1))})
    with pytest.raises(NoRegionError, match="cannot be read"):
        source_of(marks[0].f_code, {})


def test_changed_text_is_run_instead():
    region, module = region_of(LOOP, "loop.py")
    piece = region.changed(region.whole(), LOOP.replace("x * y + total", "x * y - total"))
    seen: dict[str, Any] = {}
    piece.call(module, {"x": 3, "y": 4, "total": 4}, None, seen.update)
    assert seen["out"] == 12


def test_change_before_the_piece_is_refused():
    region, _ = region_of(LOOP, "loop.py")
    text = LOOP.replace("    x = x + 1\n", "    x = x + 1\n    y = y + 1\n")
    with pytest.raises(NoRegionError, match="before the step"):
        region.changed(region.at(8), text)
