"""What ``nanguard run`` leaves behind: a folder for each run, with its command and its end.

The launcher makes the folder and says what was run. The process that trains adds a line for each
step (``metrics.jsonl``) and for each event (``events.jsonl``), from numbers that the guard has
anyway, and its incidents.

An incident names the command it came from, and ``nanguard replay`` runs it. Incidents travel, so a
command is run without asking only if it is signed with a key that never leaves this account.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import shlex
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard import __version__
from nanguard.errors import LaunchError
from nanguard.incident import NAME as INCIDENT
from nanguard.masking import hidden_words
from nanguard.record import METRICS
from nanguard.run_folder import HOME, keep_out_of_git, make_private, open_private

if TYPE_CHECKING:
    from collections.abc import Sequence

SCHEMA = "nanguard.run/1"
RUN = "run.json"
RUNS = Path(HOME, "runs")
_NAMES = re.compile(r"[^A-Za-z0-9_.-]+")
_LONGEST_NAME = 40


def new_place(command: Sequence[str]) -> Path:
    """Returns a folder for a run that begins now, which is not there yet: ``TIME-NAME``."""
    base = RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{name_of_run(command)}"
    places = [base, *(base.with_name(f"{base.name}-{number}") for number in range(2, 1000))]
    return next((place for place in places if not place.exists()), base)


def name_of_run(command: Sequence[str]) -> str:
    """Returns how a run is called: after its script, its module, or its program."""
    words = list(command)
    script = next((Path(word).stem for word in words if word.endswith((".py", ".sh"))), "")
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    name = script or module or (Path(words[0]).name if words else "") or "run"
    return _NAMES.sub("-", name)[:_LONGEST_NAME].strip("-.") or "run"


class LaunchedRun:
    """The folder of a run, from its beginning to its end.

    Args:
        folder: The folder.
        command: The command.

    Raises:
        LaunchError: The folder cannot be written to.
    """

    def __init__(self, folder: Path, command: Sequence[str]) -> None:
        self.folder = folder
        self._new = not folder.exists()
        self._own = {RUN}
        try:
            if RUNS.parent in folder.parents:
                keep_out_of_git(RUNS.parent)
            make_private(folder)
            self._told: dict[str, Any] = {
                "schema": SCHEMA,
                "command": hidden_words(command),
                "folder": str(Path.cwd()),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "nanguard": __version__,
                "began": round(time.time(), 3),
            }
            self._write()
        except OSError as error:
            raise LaunchError(
                f"the run folder cannot be written to ({error.strerror or error}).",
                where=str(folder),
                do="Give a folder that this user may write to: nanguard run --run-dir DIR -- ...",
            ) from error

    def ended(self, code: int) -> None:
        """Says how the run ended; a run in which nothing trained leaves no folder behind."""
        with contextlib.suppress(OSError):
            if self._new and {path.name for path in self.folder.iterdir()} <= self._own:
                for name in self._own:
                    (self.folder / name).unlink()
                self.folder.rmdir()
                return
            self._told |= {"ended": round(time.time(), 3), "exit_code": code}
            self._write()

    def keep(self, name: str, content: str) -> Path:
        """Keeps what was run, where no file holds it; returns the file.

        Args:
            name: The name of the file.
            content: What was run.
        """
        path = self.folder.absolute() / name
        with open_private(path) as file:
            file.write(content.encode())
        self._own.add(name)
        return path

    def see_it(self) -> str | None:
        """Returns a line with the command that shows the run; None if there is nothing to see."""
        if not self.folder.is_dir() or not (
            (self.folder / METRICS).exists() or any(self.folder.glob(f"*/{INCIDENT}"))
        ):
            return None
        newest = RUNS in self.folder.parents
        where = "" if newest else f" {shlex.quote(str(self.folder))}"
        return f"see it: nanguard report{where}"

    def _write(self) -> None:
        draft = self.folder / f".{RUN}"
        with open_private(draft) as file:
            file.write((json.dumps(self._told, indent=1) + "\n").encode())
        draft.replace(self.folder / RUN)


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
