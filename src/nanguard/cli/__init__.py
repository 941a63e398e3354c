"""The command line."""

from __future__ import annotations

from nanguard.cli.entry import main

__all__ = ["main"]
