"""Alerts of ``nanguard run``: new incidents, and a bad end.

They are sent by the launcher, which reads what the guarded processes have written. So the process
that trains neither waits for them nor knows the address of a webhook.
"""

from __future__ import annotations

import shlex
import threading
import time
from typing import TYPE_CHECKING

from nanguard import incident as incidents
from nanguard.alerts import Alert
from nanguard.errors import IncidentError
from nanguard.masking import hidden_words
from nanguard.view.report.words import in_a_line, symptom

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from nanguard.alerts import Alerts
    from nanguard.incident import Incident

# Seconds between two looks at the folder of incidents.
_LOOK = 1.0
# Seconds that the explanation of an incident is waited for.
_EXPLAINING = 90.0


class Alerting:
    """Looks for incidents while a command runs, and sends them.

    Args:
        alerts: Where alerts go; None for nowhere.
        folder: Where the incidents of the run are written.
        command: The command.
    """

    def __init__(self, alerts: Alerts | None, folder: Path, command: Sequence[str]) -> None:
        self._alerts = alerts
        self._folder = folder
        self._run = " ".join(hidden_words(command))[:200]
        self._known = set(folder.glob(f"*/{incidents.NAME}"))
        self._waiting: dict[Path, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, name="nanguard-alerting", daemon=True)

    def __enter__(self) -> Alerting:
        if self._alerts is not None:
            self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def ended(self, code: int, *, stopped: bool) -> None:
        """Sends what is left, and that the run has ended, if it has ended badly.

        Args:
            code: The exit code of the command.
            stopped: Whether the guard ended it.
        """
        self.__exit__()
        if self._alerts is None:
            return
        self._look(last=True)
        if stopped:
            text = "the guard stopped the run"
            self._alerts.send(Alert("stopped", text, self._run, urgent=True))
        elif code:
            text = f"the run ended with exit code {code}"
            self._alerts.send(Alert("ended", text, self._run, urgent=True))

    def _look_on(self) -> None:
        while not self._over.wait(_LOOK):
            self._look()

    def _look(self, *, last: bool = False) -> None:
        new = sorted(set(self._folder.glob(f"*/{incidents.NAME}")) - self._known)
        self._known.update(new)
        now = time.monotonic()
        self._waiting |= dict.fromkeys(new, now)
        for path, since in list(self._waiting.items()):
            try:
                found = incidents.read(path)
            except IncidentError:  # counted as another one of a known fault, and gone
                del self._waiting[path]
                continue
            if last or _is_explained(found) or now - since > _EXPLAINING:
                del self._waiting[path]
                self._send(found, path.parent)

    def _send(self, found: Incident, folder: Path) -> None:
        cause = found.get("cause") or {}
        step = found.get("step")
        said = in_a_line(found) or f"step {step}: {symptom(found.get('symptom') or {})}"
        advice = f"nanguard explain {shlex.quote(str(folder))}"
        kind = str(cause.get("code") or "bad-step")
        number = step if isinstance(step, int) else None
        if self._alerts is not None:
            self._alerts.send(Alert(kind, said, self._run, step=number, advice=advice))


def _is_explained(found: Incident) -> bool:
    return bool(found.get("cause"))
