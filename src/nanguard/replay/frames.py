"""Where a program is: its frames and their names, and when it reaches a line or calls a model.

The terms of a loss are found here, too: they are what a frame has names for. So is which of several
threads is watched: one that comes while another is within its step is left alone.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from nanguard.replay.region import NoRegionError
from nanguard.replay.tracer.sites import is_users, users_frame

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

    from torch import Tensor

    from nanguard.replay.region import Piece, Region

    Stack = list[tuple[FrameType, int]]

_MODULE_CALL = nn.Module._call_impl.__code__
# Up to Python 3.12 a frame keeps a copy of the names that somebody has asked it for.
_COPIES_NAMES = sys.version_info < (3, 13)


def outside(frame: FrameType | None) -> FrameType | None:
    """Returns the nearest frame that is neither torch's nor our own."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def stack_of(frame: FrameType | None) -> Stack:
    """Returns a frame and those that it was called by, with the line that each is on."""
    found: Stack = []
    while frame is not None:
        found.append((frame, frame.f_lineno or 0))
        frame = frame.f_back
    return found


def is_nested(frame: FrameType | None) -> bool:
    """Returns whether a module is called by another one."""
    calls = 0
    while frame is not None:
        calls += frame.f_code is _MODULE_CALL
        if calls > 1:
            return True
        frame = frame.f_back
    return False


def names_of(frame: FrameType) -> dict[str, Any]:
    """Returns the names of a frame and their values, as they are now."""
    local = frame.f_locals
    names = dict(local)
    let_go(frame, local)
    return names


def let_go(frame: FrameType, names: Any) -> None:
    """Empties the copy of its names that a frame keeps, unless the script itself has asked for it.

    It would keep values alive that the script has let go of since: last step's outputs, beside
    those of this step.
    """
    function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if _COPIES_NAMES and function and sys.getrefcount(names) <= _OWN_HOLDS + 1:
        names.clear()


def _count_holds(_frame: None, names: Any) -> int:
    return sys.getrefcount(names)


def _new_names() -> int:
    """Returns how often names are held that nobody else knows of, as ``let_go`` counts."""
    names: dict[str, Any] = {}
    return _count_holds(None, names)


_OWN_HOLDS = _new_names()


def hear_calls(cls: type, hear: Callable[[Any, Any], None]) -> Callable[[], None]:
    """Makes calls of a class of modules known; returns what undoes it.

    A hook on the module itself would be saved with it, and copied.
    """
    own = vars(cls).get("__call__")

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        hear(module, args)
        if own is not None:
            return own(module, *args, **kwargs)
        # Looked up each time: others replace it, too.
        return super(cls, module).__call__(*args, **kwargs)  # type: ignore[arg-type]

    setattr(cls, "__call__", call)  # noqa: B010 - a checker takes it for a mistake

    def undo() -> None:
        if vars(cls).get("__call__") is call:
            if own is None:
                delattr(cls, "__call__")
            else:
                setattr(cls, "__call__", own)  # noqa: B010

    return undo


class Lines:
    """Hears when the first line of a region is reached.

    Attributes:
        fresh: Whether a region that begins now is a new one, and not one that comes back to its
            first line: the end of a ``with`` block does.
    """

    def __init__(
        self,
        reached: Callable[[FrameType, Region, Piece], None],
        called: Callable[[FrameType, Region, Piece], None],
        returned: Callable[[FrameType], None],
    ) -> None:
        self.fresh = True
        self._reached, self._called, self._returned = reached, called, returned
        # By the line and the identity of its code, which takes long to compare.
        self._watched: dict[tuple[int, int], tuple[Region, Piece]] = {}
        self._calls: dict[tuple[int, int], tuple[Region, Piece]] = {}
        self._headers: set[tuple[int, int]] = set()
        self._tool: int | None = None

    def watch(self, region: Region, piece: Piece) -> None:
        """Waits for a piece from now on."""
        monitoring = sys.monitoring  # type: ignore[attr-defined]
        if self._tool is None:
            self._tool = next((n for n in (4, 3, 5) if monitoring.get_tool(n) is None), None)
            if self._tool is None:
                raise NoRegionError("all of Python's monitoring tools are in use")
            monitoring.use_tool_id(self._tool, "nanguard")
            monitoring.register_callback(self._tool, monitoring.events.LINE, self._line)
            monitoring.register_callback(self._tool, monitoring.events.PY_START, self._begins)
            monitoring.register_callback(self._tool, monitoring.events.PY_RETURN, self._returns)
        self._watched[(id(region.code), piece.first)] = (region, piece)
        if region.header is not None:
            self._headers.add((id(region.code), region.header))
        events = monitoring.events
        heard = events.LINE | events.PY_START | events.PY_RETURN
        monitoring.set_local_events(self._tool, region.code, heard)
        # Lines that were switched off because nobody waited for them.
        monitoring.restart_events()

    def watch_call(self, region: Region, piece: Piece) -> None:
        """Waits for the first call of a model in a region, too."""
        if (id(region.code), piece.first) not in self._watched:
            self._calls[(id(region.code), piece.first)] = (region, piece)

    def close(self) -> None:
        """Stops waiting."""
        if self._tool is not None:
            monitoring = sys.monitoring  # type: ignore[attr-defined]
            for region, _ in self._watched.values():
                monitoring.set_local_events(self._tool, region.code, 0)
            monitoring.free_tool_id(self._tool)
            self._tool = None
        self._watched.clear()

    def _begins(self, _code: CodeType, _offset: int) -> Any:
        self.fresh = True

    def _returns(self, _code: CodeType, _offset: int, _value: object) -> Any:
        self._returned(sys._getframe(1))

    def _line(self, code: CodeType, line: int) -> Any:
        key = (id(code), line)
        found = self._watched.get(key)
        if key in self._headers:
            self.fresh = True
            if found is None:
                return None
        call = self._calls.get(key)
        if call is not None:
            self._called(sys._getframe(1), *call)
            return None
        if found is None:
            return sys.monitoring.DISABLE  # type: ignore[attr-defined]
        if self.fresh or found[1].begins_once:
            self.fresh = False
            self._reached(sys._getframe(1), *found)
        return None


def terms_of(loss: Tensor, frame: FrameType | None) -> dict[str, float]:
    """Returns what a loss was added up from: the scalars named where it was last assigned.

    Args:
        loss: The loss.
        frame: The frame that calls backward, or one below it.
    """
    frame = users_frame(frame)
    while frame is not None:
        values = {n: v for n, v in frame.f_locals.items() if _is_scalar(v)}
        tree = _tree_of(frame)
        name = next((n for n, v in values.items() if v.data_ptr() == loss.data_ptr()), None)
        if name is None and tree is not None:
            # (loss / 4).backward(): what goes in has no name, but what it is made of has one.
            name = next((n for n in _called_with(tree, frame) if n in values), None)
        if name is not None and tree is not None:
            parts = _parts_of(name, tree, frame)
            return {n: float(values[n].detach()) for n in parts if n in values}
        frame = users_frame(frame.f_back)
    return {}


def _is_scalar(value: object) -> bool:
    return issubclass(type(value), torch.Tensor) and value.dim() == 0  # type: ignore[attr-defined]


def _tree_of(frame: FrameType) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(frame.f_code.co_filename)))
    except (SyntaxError, ValueError, RecursionError):
        return None


def _called_with(tree: ast.Module, frame: FrameType) -> list[str]:
    """Returns the names in what backward is called on, or with, on a frame's line."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        last = node.end_lineno or node.lineno
        if node.func.attr == "backward" and node.lineno <= (frame.f_lineno or 0) <= last:
            return [name for part in (node.func.value, *node.args) for name in _names_in(part)]
    return []


def _parts_of(name: str, tree: ast.Module, frame: FrameType) -> list[str]:
    """Returns the names in the last assignment to a variable before a frame's line.

    One that builds on the variable (``loss = loss / 4``, ``loss += decay``) adds to those before.
    """
    first, last = frame.f_code.co_firstlineno, frame.f_lineno or 0
    made = [
        node
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AugAssign)) and first <= node.lineno <= last
    ]
    found: list[str] = []
    for node in sorted(made, key=lambda node: node.lineno):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(t, ast.Name) and t.id == name for t in targets):
            names = _names_in(node.value)
            builds_on = isinstance(node, ast.AugAssign) or name in names
            found = [*(found if builds_on else []), *(n for n in names if n != name)]
    return found


def _names_in(node: ast.AST) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]


class Nobody:
    """A watcher that lets everything happen and remembers nothing."""

    clip_limit: float | None = None

    def backward(self, call: Callable[[], Any], tensors: Any) -> Any:
        """Runs a backward pass."""
        return call()

    def grad(self, call: Callable[[], Any], outputs: Any) -> Any:
        """Computes gradients."""
        return call()

    def func_grad(self, found: Any) -> Any:
        """Returns what was computed."""
        return found.result

    def step(self, optimizer: Any, call: Callable[..., Any], closure: Any) -> Any:
        """Runs the step of an optimizer."""
        return call()

    def scaler_step(self, scaler: Any, optimizer: Any, call: Callable[[], Any]) -> Any:
        """Runs the step of a GradScaler."""
        return call()

    def next_batch(self, own: Any, draw: Callable[[Any], Any]) -> Any:
        """Returns the next batch."""
        return draw(own)

    def choose(self, own: Any, draw: Callable[[Any], Any]) -> Any:
        """Returns which samples are taken for a batch."""
        return draw(own)

    def read(self, tensor: Any, value: Any) -> None:
        """Hears of a number that the script has read."""

    def scaled(self, scaler: Any, loss: Any) -> None:
        """Hears of a loss that is about to be scaled."""

    def made(self, optimizer: Any) -> None:
        """Hears of a new optimizer."""

    def loaded(self, state: Any) -> None:
        """Hears of state that a module has taken over."""

    def clipped(self, parameters: Any, norm: Any) -> None:
        """Hears of gradients that were clipped."""

    def captured(self, optimizer: Any) -> None:
        """Hears of a step that a CUDA graph takes up."""

    def replayed_graph(self) -> None:
        """Hears that a CUDA graph was replayed."""

    def collective(self) -> None:
        """Hears of something that the script does together with other ranks."""

    def begin_pass(self, loader: Any) -> None:
        """Hears that the script is about to go over a loader."""


class Turns:
    """Knows which threads train, and which of them are left alone.

    Args:
        tell: Called once for each thread that is left alone, with its name and the name of the one
            that is watched; None to leave none alone.
    """

    def __init__(self, tell: Callable[[str, str], None] | None) -> None:
        self._tell = tell
        # The thread inside, by its number; a dictionary, as it is looked up and set in one.
        self._inside: dict[str, int] = {}
        # Threads that are left alone, each with the one that is watched.
        self._alone: weakref.WeakKeyDictionary[threading.Thread, weakref.ref[threading.Thread]]
        self._alone = weakref.WeakKeyDictionary()
        # Whether there ever was one: as long as there was none, nothing has to be looked up.
        self.left_any_alone = False
        # Threads between their backward pass and their step, each with how many whole steps had
        # been made by then; how many there are now, and which thread made the last. By number.
        self._begun: dict[int, int] = {}
        self._steps = 0
        self._last: int | None = None
        # The thread that has trained so far; None if none has, 0 if several have.
        self._sole: int | None = None

    def is_alone(self) -> bool:
        """Returns whether this thread is one that nobody watches."""
        if not self.left_any_alone:
            return False
        here = threading.current_thread()
        other = self._alone.get(here)
        watched = None if other is None else other()
        if other is not None and (watched is None or not watched.is_alive()):
            # The thread that was watched has ended: this one may take its place.
            del self._alone[here]
            return False
        return other is not None

    def enter(self, *, step: bool) -> bool:
        """Notes that this thread begins a backward pass, or a step; returns whether it is new.

        Args:
            step: Whether it is a step.
        """
        here = threading.get_ident()
        if self._tell is None or self._inside.get("now") == here:
            return False
        if self.left_any_alone and self.is_alone():
            return False
        inside = self._inside.setdefault("now", here)
        if inside == here == self._sole:
            # Every step of every run comes here, and hardly any run has a second thread.
            if step:
                self._begun.pop(here, None)
                self._steps += 1
            else:
                self._begun.setdefault(here, self._steps)
            return True
        if self._sole != here:
            self._sole, self._last = (here if self._sole is None else 0), self._sole or self._last
        if inside != here:
            other = _alive(inside)
            if other is not None:
                self._leave_alone(self._tell, other)
                return False
            self._inside["now"] = here  # after a fork, the other one is not there any more
        if not step:
            self._begun.setdefault(here, self._steps)
            return True
        before = self._between(here)
        if before is not None:
            self._inside.clear()
            self._leave_alone(self._tell, before)
        return before is None

    def _between(self, here: int) -> threading.Thread | None:
        """Notes a step; returns who has made a whole one since the backward pass of this thread."""
        begun = self._begun.pop(here, None)
        if begun is None:
            # Whoever went backward did it for this thread, as the workers of a pool do.
            self._begun.clear()
            return None
        last = self._last
        if last is not None and last != here:
            other = _alive(last) if self._steps > begun else None
            if other is not None:
                return other
            there = {thread.ident for thread in threading.enumerate()}
            self._begun = {ident: at for ident, at in self._begun.items() if ident in there}
        self._steps, self._last = self._steps + 1, here
        return None

    def _leave_alone(self, tell: Callable[[str, str], None], watched: threading.Thread) -> None:
        here = threading.current_thread()
        self._alone[here] = weakref.ref(watched)
        self._begun.pop(threading.get_ident(), None)
        self.left_any_alone = True
        tell(here.name, watched.name)

    def leave(self) -> None:
        """Notes that what was new is over."""
        self._inside.clear()


def _alive(ident: int) -> threading.Thread | None:
    """Returns the thread of a number, if it is there."""
    return next((thread for thread in threading.enumerate() if thread.ident == ident), None)


def called_from(module: str) -> bool:
    """Returns whether a module is among the callers, by its name."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == module:
            return True
        frame = frame.f_back
    return False
