"""Where in the user's code something happens."""

from __future__ import annotations

import functools
import importlib.util
import linecache
import os
import site
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nanguard

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, FrameType


def _spellings(*folders: str) -> tuple[str, ...]:
    """Returns folders in every spelling they are known by: a home or an environment may be a link.

    Python names files as they were found on its path, which may be another spelling than the one
    that ``resolve`` comes to.
    """
    found = {spelling for folder in folders if folder for spelling in (folder, _real(folder))}
    return tuple(sorted(spelling.rstrip(os.sep) + os.sep for spelling in found))


def _real(path: str) -> str:
    return os.path.realpath(path)


# Found without importing it: sites are also looked at where there is no torch.
_SPEC = importlib.util.find_spec("torch")
_PATHS = sysconfig.get_paths()
_OWN = _spellings(*nanguard.__path__)
_TORCH = _spellings(str(Path(_SPEC.origin).parent)) if _SPEC and _SPEC.origin else ()
_STDLIB = _spellings(_PATHS["stdlib"], _PATHS["platstdlib"], str(Path(os.__file__).parent))
_SITE = _spellings(_PATHS["purelib"], _PATHS["platlib"], site.getusersitepackages())


# How far up the stack it is looked who called the user's code.
_CALLERS = 8


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
    if _lies_in(filename, (*_OWN, *_TORCH)):
        return False
    return not _lies_in(filename, _STDLIB) or is_installed(filename)


class _Real(dict[str, str]):
    """Where files really lie; asked once for each of them."""

    def __missing__(self, filename: str) -> str:
        self[filename] = _real(filename)
        return self[filename]


_real_path: Callable[[str], str] = _Real().__getitem__


def _lies_in(filename: str, folders: tuple[str, ...]) -> bool:
    """Returns whether a file lies in one of some folders, by any of its names."""
    return filename.startswith(folders) or _real_path(filename).startswith(folders)


def is_ours(filename: str) -> bool:
    """Returns whether a file belongs to nanguard."""
    return _lies_in(filename, _OWN)


def is_installed(filename: str) -> bool:
    """Returns whether a file belongs to an installed package, which nobody edits."""
    return _lies_in(filename, _SITE)


def file_of(module: Any) -> str | None:
    """Returns the file of a module; does not wake one that is only imported once it is asked."""
    try:
        file = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:  # anything may stand among the modules
        return None
    return file if isinstance(file, str) else None


def is_part_of_script(module: Any) -> bool:
    """Returns whether a module is the user's own, and not installed."""
    file = file_of(module)
    return file is not None and is_users(file) and not is_installed(file)


def users_frame(frame: FrameType | None) -> FrameType | None:
    """Returns the nearest frame that belongs to the user's code."""
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


Place = tuple["CodeType", int, int]


def place_of(frame: FrameType) -> Place:
    """Returns where a frame is, at almost no cost; ``site_of`` makes sense of it later."""
    return frame.f_code, frame.f_lasti, frame.f_lineno or 0


def callers_of(frame: FrameType | None) -> tuple[Place, ...]:
    """Returns where the user's code was called from, the nearest place first.

    However deep in a library that is, the line that the user can edit is among them.

    Args:
        frame: Any frame; the nearest of the user's is where the code is, and not where it was
            called from.
    """
    found: list[Place] = []
    frame = users_frame(frame)
    library = True
    while frame is not None and (library or len(found) < _CALLERS):
        library = library and is_installed(frame.f_code.co_filename)
        frame = users_frame(frame.f_back)
        edited = frame is not None and not is_installed(frame.f_code.co_filename)
        if frame is not None and (edited or len(found) < _CALLERS):
            found.append(place_of(frame))
    return tuple(found)


def site_of(place: Place) -> Site:
    """Returns a place in words."""
    code, instruction, line = place
    return Site(code.co_filename, line, code.co_name, _span(code, instruction))


def site_of_function(function: Any) -> Site | None:
    """Returns where a function of the user's own begins; None for others."""
    while isinstance(function, functools.partial):
        function = function.func
    if not hasattr(function, "__code__"):  # an object that can be called
        function = vars(type(function)).get("__call__")
    code = getattr(function, "__code__", None)
    if code is None or not is_users(code.co_filename) or is_installed(code.co_filename):
        return None
    return Site(code.co_filename, code.co_firstlineno, code.co_name)


def here(constructs: object = None) -> Site | None:
    """Returns the place in the user's code that the caller was called from.

    Packages that only hand a call on are passed over, as ``accelerator.backward(loss)`` does with
    ``loss.backward()``: their functions are called like what they call.

    Args:
        constructs: An object that is being made; its own constructor is passed over.
    """
    frame = users_frame(sys._getframe(1))
    while frame is not None and constructs is not None and _is_constructor(frame, constructs):
        frame = users_frame(frame.f_back)
    nearest = frame
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


def _is_constructor(frame: FrameType, made: object) -> bool:
    code = frame.f_code
    if code.co_name != "__init__" or not code.co_argcount:
        return False
    return frame.f_locals.get(code.co_varnames[0]) is made


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


# The functions that read files of tensors, with what they call the file.
_READERS = {"serialization.py": ("load", "f"), "torch.py": ("load_file", "filename")}
_PACKAGES = ("torch", "safetensors")


def file_being_loaded(frame: FrameType | None) -> str | None:
    """Returns the file that tensors are being read from, as the script named it; None if none is.

    Args:
        frame: Where an operation is called.
    """
    above, file = users_frame(frame), None
    while frame is not None and frame is not above:
        path = Path(frame.f_code.co_filename)
        known = _READERS.get(path.name)
        if known and frame.f_code.co_name == known[0] and path.parent.name in _PACKAGES:
            file = frame.f_locals.get(known[1])
        elif file is not None and is_ours(frame.f_code.co_filename):
            # A second run reads what it has written itself from somewhere else.
            file = next(iter(frame.f_locals.get("args", ())), file)
        frame = frame.f_back
    if file is None:
        return None
    return os.fspath(file) if isinstance(file, (str, os.PathLike)) else str(file)
