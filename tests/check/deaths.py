"""Work that ends its process in every way there is; a function of a module, as workers want it."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanguard.check.scan import Scan
    from nanguard.errors import SourceError


class Panic(BaseException):
    """What a library raises that has panicked: no Exception."""


def die(way: str, scan: Scan) -> str:
    """Dies in the way that is asked for; returns the way, with the process, if there is none."""
    if way == "abort":
        os.abort()
    if way == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "loop":
        while True:
            pass
    if way == "memory":
        return str(len(bytearray(4 << 30)))
    if way == "panic":
        raise Panic("in Rust")
    if way == "exit":
        sys.exit(3)
    if way == "leave":
        os._exit(3)
    if way == "raise":
        raise ZeroDivisionError("by zero")
    if way == "print":
        os.write(1, b"printed")
        os.write(2, b"printed")
    scan.progress(way, 3)
    return f"{way} {os.getpid()}"


def told(way: str, error: SourceError) -> str:
    """Returns what is said of work that was lost."""
    return f"{way}: {error.what}"
