"""How runs of several ranks end: torch may abort a rank after the script's last line."""

from __future__ import annotations

# Said if Python ends while one of torch's threads still wants it: one run in ten on a busy machine.
_TORN_DOWN = "terminate called without an active exception"


def came_to_its_end(code: int, output: str) -> bool:
    """Returns whether the scripts ran to their last lines; look at what they wrote as well."""
    return code == 0 or _TORN_DOWN in output
