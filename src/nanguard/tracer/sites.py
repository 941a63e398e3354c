"""Where in the user's code something happens."""

from __future__ import annotations

import importlib.util
import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType

_OWN = str(Path(__file__).resolve().parents[1]) + os.sep
# Found without importing it: sites are also looked at where there is no torch.
_SPEC = importlib.util.find_spec("torch")
_TORCH = str(Path(_SPEC.origin or "").resolve().parent) + os.sep if _SPEC else "\0"
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = tuple({sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]})


@dataclass(frozen=True, slots=True)
class Site:
    """A place in a source file.

    Attributes:
        file: The file's path as Python knows it.
        line: 1-based line.
        function: The function's name.
        span: Where the expression lies, as (line, end line, column, end column), if known.
    """

    file: str
    line: int
    function: str
    span: tuple[int, int, int, int] | None = None

    @property
    def code(self) -> str:
        """The text of the line."""
        return linecache.getline(self.file, self.line).strip()


class _Files(dict[str, bool]):
    """Which files are the user's; asked once for each of them."""

    def __missing__(self, filename: str) -> bool:
        self[filename] = _is_users(filename)
        return self[filename]


# Returns whether a file is neither torch's, nor nanguard's, nor Python's own.
is_users: Callable[[str], bool] = _Files().__getitem__


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return filename in ("<stdin>", "<string>")
    if filename.startswith((_OWN, _TORCH)):
        return False
    return not filename.startswith(_STDLIB) or is_installed(filename)


def is_ours(filename: str) -> bool:
    """Returns whether a file belongs to nanguard."""
    return filename.startswith(_OWN)


def is_installed(filename: str) -> bool:
    """Returns whether a file belongs to an installed package, which nobody edits."""
    return filename.startswith(_SITE)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the nearest frame that belongs to the user's code."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


Place = tuple["CodeType", int, int]


def place_of(frame: FrameType) -> Place:
    """Returns where a frame is, at almost no cost; ``site_of`` makes sense of it later."""
    return frame.f_code, frame.f_lasti, frame.f_lineno or 0


def site_of(place: Place) -> Site:
    """Returns a place in words."""
    code, instruction, line = place
    return Site(code.co_filename, line, code.co_name, _span(code, instruction))


def here() -> Site | None:
    """Returns the place in the user's code that the caller was called from.

    Packages that only hand a call on are passed over, as ``accelerator.backward(loss)`` does with
    ``loss.backward()``: their functions are called like what they call.
    """
    nearest = frame = users_frame(sys._getframe(1))
    while (
        nearest is not None
        and frame is not None
        and is_installed(frame.f_code.co_filename)
        and frame.f_code.co_name == nearest.f_code.co_name
    ):
        frame = users_frame(frame.f_back)
    if frame is None or is_installed(frame.f_code.co_filename):
        frame = nearest
    return None if frame is None else site_of(place_of(frame))


def _span(code: CodeType, instruction: int) -> tuple[int, int, int, int] | None:
    positions: Any = getattr(code, "co_positions", None)
    if positions is None or instruction < 0:  # Python 3.10 does not know
        return None
    for index, place in enumerate(positions()):
        if index == instruction // 2:
            line, end_line, column, end_column = place
            if None in (line, end_line, column, end_column):
                return None
            return (line, end_line, column, end_column)
    return None
