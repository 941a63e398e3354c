"""``nanguard``: the commands and how they end.

Exit codes: 0 for a clean end, 1 for findings, 2 when nanguard could not do its work. ``run`` ends
with the code of the command, or with 3 when the guard stopped it.
"""

from __future__ import annotations

from nanguard.cli.commands import after, before, during, showing
from nanguard.cli.commands.app import app

__all__ = ["after", "app", "before", "during", "showing"]
