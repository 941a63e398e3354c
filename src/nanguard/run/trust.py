"""Knows the commands that this user has run before, so that no incident can make up another.

An incident names the command it came from, and ``nanguard replay`` runs it. Incidents travel, so a
command is run without asking only if it is signed with a key that never leaves this account.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
from pathlib import Path

_LENGTH = 32


def sign(command: list[str], folder: str) -> str | None:
    """Returns a signature of a command in a folder; None if no key can be kept."""
    key = _key(make=True)
    return None if key is None else _signature(key, command, folder)


def is_ours(command: list[str], folder: str, signature: object) -> bool:
    """Returns whether a signature says that this user ran a command in a folder."""
    key = _key(make=False)
    if key is None or not isinstance(signature, str):
        return False
    mine = _signature(key, command, folder).encode()
    return hmac.compare_digest(mine, signature.encode("utf-8", "replace"))


def _signature(key: bytes, command: list[str], folder: str) -> str:
    return hmac.new(key, json.dumps([command, folder]).encode(), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes | None:
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    path = Path(state, "nanguard", "key")
    with contextlib.suppress(OSError):
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Another run may be making one at the same moment; the first that is there, counts.
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(secrets.token_bytes(_LENGTH))
        key = path.read_bytes()
        if len(key) == _LENGTH:
            return key
    return None
