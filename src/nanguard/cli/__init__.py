"""The command line."""

from nanguard.cli.main import app, main

__all__ = ["app", "main"]
