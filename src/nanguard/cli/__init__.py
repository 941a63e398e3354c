"""The command line."""

from __future__ import annotations

from typing import Any

from nanguard.cli.entry import main

__all__ = ["app", "main"]


def __getattr__(name: str) -> Any:
    if name != "app":
        raise AttributeError(f"module 'nanguard.cli' has no attribute {name!r}")
    from nanguard.cli.commands import app

    return app
