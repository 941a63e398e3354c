"""Where a program is: its frames and their names, and when it reaches a line or calls a model.

The terms of a loss are found here, too: they are what a frame has names for.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
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
