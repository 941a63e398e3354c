"""Asks the Linux kernel to keep a process, and all it starts, from writing outside of some folders.

Landlock (Linux 5.13 and later) needs no rights. What it forbids stays forbidden until the process
ends, to shells, compiled libraries and whatever else runs in it. The system calls have the same
numbers on every architecture.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_ASK_VERSION = 1
_PATH_BENEATH = 1
_NO_NEW_PRIVS = 38
# What can be done to a file that is there, and what only to a folder: bits of the kernel's own.
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_MOVE_BETWEEN_FOLDERS = 1 << 13
# Sockets without a file, and signals to processes outside.
_SCOPED = 0b11
# Versions of Landlock since which the kernel knows of these.
_KNOWS_TRUNCATION, _KNOWS_SCOPES = 3, 6
# Terminals, GPUs, shared memory, and what a process says about itself: nobody's files.
_DEVICES = ("/dev", "/proc")


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def version() -> int:
    """Returns which version of Landlock the kernel has; 0 for none.

    Before version 3 a file can still be cut off, which is as good as having none.
    """
    if not sys.platform.startswith("linux"):
        return 0
    found = int(_libc().syscall(_CREATE_RULESET, None, 0, _ASK_VERSION))
    return found if found >= _KNOWS_TRUNCATION else 0


def confine(folders: Iterable[Path]) -> None:
    """Keeps this process, and all it starts, from writing anywhere else for good.

    To be called while the process has one thread.

    Args:
        folders: Where it may still write.

    Raises:
        OSError: The kernel refuses.
    """
    known = version()
    if not known:
        raise OSError("this system cannot keep a process from writing files")
    within = _WRITE_FILE | _TRUNCATE | _REMOVE_AND_MAKE | _MOVE_BETWEEN_FOLDERS
    rules = _Ruleset(within, 0, _SCOPED if known >= _KNOWS_SCOPES else 0)
    # A kernel refuses what is longer than it knows, unless the rest is 0.
    size = ctypes.c_size_t(ctypes.sizeof(rules))
    ruleset = _called(_CREATE_RULESET, ctypes.byref(rules), size, 0)
    try:
        for folder in folders:
            _allow(ruleset, str(folder), within)
        for devices in _DEVICES:
            _allow(ruleset, devices, _WRITE_FILE | _TRUNCATE)
        _allow(ruleset, "/dev/shm", within)  # noqa: S108 - memory that processes share
        if _libc().prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "new privileges cannot be given up")
        _called(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, folder: str, rights: int) -> None:
    try:
        place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rule = _Beneath(rights, place)
        _called(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(place)


def _called(number: int, *args: object) -> int:
    """Makes a system call; returns what it returns."""
    result = int(_libc().syscall(number, *args))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
