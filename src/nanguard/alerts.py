"""Tells somebody that a run needs them: a webhook, a mail, a command.

Alerts are sent by a thread of their own. Nothing that goes wrong with one reaches the run: it does
not wait, it does not fail, and what could not be sent is reported once. The addresses of webhooks
are secrets. They are kept in this process only, and are not part of any message, log or file.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, replace
from email.message import EmailMessage
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, Protocol

from nanguard.errors import UsageError
from nanguard.masking import hidden

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from nanguard.guard.journal import Event

log = logging.getLogger("nanguard")

VARIABLE = "NANGUARD_NOTIFY"
# Seconds before the same kind of alert about the same run is sent again.
COOL_DOWN = 300.0
# Seconds that one attempt may take, and before the second and last one.
LIMIT = 10.0
_PAUSE = 2.0
# Seconds that a command may take.
COMMAND_LIMIT = 60.0
# Seconds that the end of a process waits for alerts that are on their way.
_AT_END = 15.0
# Alerts that wait to be sent; more come only where something is badly wrong with the receiver.
_WAITING = 100
# Characters of a message: the shortest limit of a receiver is Discord's, 2000.
_LONGEST = 1500
_RED, _AMBER = 15158332, 15844367  # as Discord counts colours
_FORMS = ("slack", "discord", "teams", "ntfy", "json")
_HOSTS = {
    "hooks.slack.com": "slack",
    "discord.com": "discord",
    "discordapp.com": "discord",
    "webhook.office.com": "teams",
    "logic.azure.com": "teams",
    "powerplatform.com": "teams",
    "ntfy.sh": "ntfy",
}


@dataclass(frozen=True, slots=True)
class Alert:
    """What somebody should know.

    Attributes:
        kind: The name of what happened, such as ``division-by-zero``; alerts of one kind are sent
            once in a while only.
        text: What happened, in words.
        run: Which run it is about: a folder, a log, a command.
        urgent: Whether it is always sent: the run has ended.
        step: The step, if there is one.
        value: The number it is about, if there is one.
        advice: A command that tells more.
    """

    kind: str
    text: str
    run: str = ""
    urgent: bool = False
    step: int | None = None
    value: float | None = None
    advice: str = ""

    @property
    def title(self) -> str:
        """A line that says where it comes from."""
        where = f"{self.run} on {socket.gethostname()}" if self.run else socket.gethostname()
        return f"nanguard: {where}"

    @property
    def body(self) -> str:
        """The words, with the command that tells more."""
        return f"{self.text}\n{self.advice}" if self.advice else self.text


class Receiver(Protocol):
    """Somebody who receives alerts.

    Attributes:
        name: How the receiver is called in messages; never its address.
    """

    name: str

    def send(self, alert: Alert) -> str:
        """Sends an alert; returns what went wrong, or nothing."""


def receiver_of(target: str, *, quiet: bool = False) -> Receiver:
    """Returns who is meant by a target.

    Args:
        target: ``https://...`` (the form follows from the host, or stands before it, such as
            ``slack+https://...``), ``ntfy:TOPIC``, ``mailto:a@b.c``, ``env:NAME`` or ``file:PATH``
            that hold one of these, or a command.
        quiet: Whether the output of a command goes nowhere.

    Raises:
        UsageError: It is none of these.
    """
    text = target.strip()
    scheme, _, rest = text.partition(":")
    if not text:
        raise _wrong("the target is empty", "Give a webhook, a mailto: address or a command.")
    if scheme in ("env", "file"):
        return receiver_of(_kept(scheme, rest), quiet=quiet)
    if scheme == "mailto":
        return Mail(urllib.parse.unquote(rest))
    if scheme == "ntfy":
        return Webhook("ntfy", "https://ntfy.sh/" + rest.strip("/"))
    form, plus, plain = scheme.rpartition("+")
    if plain in ("http", "https") and rest.startswith("//"):
        if plus and form not in _FORMS:
            raise _wrong(f"there is no form {form!r}", f"The forms are {', '.join(_FORMS)}.")
        address = text.removeprefix(f"{form}+")
        return Webhook(form or _form_of(address), address)
    return CommandReceiver(text, quiet=quiet)


class Webhook:
    """A web address that takes JSON.

    Args:
        form: How the JSON looks: ``slack``, ``discord``, ``teams``, ``ntfy`` or ``json``.
        address: The address; it is a secret.
    """

    def __init__(self, form: str, address: str) -> None:
        parts = urllib.parse.urlsplit(address)
        if not parts.hostname:
            raise _wrong("the address of a webhook has no host", "Give https://HOST/...")
        self.name = f"{form} webhook at {parts.hostname}"
        self._form = form
        self._address = address
        if form == "ntfy":
            base, _, self._topic = parts.path.rstrip("/").rpartition("/")
            if not self._topic:
                raise _wrong("the address of an ntfy server has no topic", "Give ntfy:TOPIC.")
            self._address = urllib.parse.urlunsplit(parts._replace(path=f"{base}/"))

    def send(self, alert: Alert) -> str:
        """Posts an alert; returns what went wrong, or nothing."""
        body = json.dumps(self._json(alert)).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "nanguard"}
        request = urllib.request.Request(  # noqa: S310 - http or https, see receiver_of
            self._address, data=body, headers=headers, method="POST"
        )
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            with opener.open(request, timeout=LIMIT) as answer:
                answer.read(1024)
        except urllib.error.HTTPError as error:
            return f"it answered {error.code}"
        except urllib.error.URLError as error:
            return f"it cannot be reached ({getattr(error.reason, 'strerror', '') or 'no answer'})"
        except (OSError, HTTPException) as error:
            return f"it cannot be reached ({type(error).__name__})"
        return ""

    def _json(self, alert: Alert) -> dict[str, Any]:
        title, body = alert.title, alert.body[:_LONGEST]
        if self._form == "slack":
            return {"text": f"*{_slack(title)}*\n{_slack(body)}"}
        if self._form == "discord":
            colour = _RED if alert.urgent else _AMBER
            card = {"title": title[:250], "description": body, "color": colour}
            # Nobody is called by name, whatever a log says.
            return {"embeds": [card], "allowed_mentions": {"parse": []}}
        if self._form == "teams":
            return _teams_card(title, body)
        if self._form == "ntfy":
            priority = 5 if alert.urgent else 4
            return {"topic": self._topic, "title": title, "message": body, "priority": priority}
        return {"text": f"{title}\n{body}", **_fields(alert)}


class Mail:
    """A mail through the ``sendmail`` of this machine.

    Args:
        address: The address, or several with commas.
    """

    def __init__(self, address: str) -> None:
        self.name = "mail"
        self._to = [one.strip() for one in address.partition("?")[0].split(",") if one.strip()]
        if not self._to or any("@" not in one or "\n" in one for one in self._to):
            raise _wrong("mailto: needs an address", "Give mailto:name@example.org.")

    def send(self, alert: Alert) -> str:
        """Hands a mail over; returns what went wrong, or nothing."""
        path = shutil.which("sendmail") or shutil.which("sendmail", path="/usr/sbin:/usr/lib")
        if path is None:
            return "there is no sendmail on this machine"
        mail = EmailMessage()
        mail["To"] = ", ".join(self._to)
        mail["Subject"] = " ".join(f"{alert.title}: {alert.text}".split())[:200]
        mail.set_content(f"{alert.body}\n")
        try:
            done = subprocess.run(  # noqa: S603 - the addresses stand in the mail, not in the words
                [path, "-i", "-t"],
                input=mail.as_bytes(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=COMMAND_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"sendmail took more than {COMMAND_LIMIT:g} s"
        except OSError as error:
            return f"sendmail cannot be run: {error.strerror}"
        return f"sendmail ended with {done.returncode}" if done.returncode else ""


class CommandReceiver:
    """A command of the user's, which finds the alert in its environment.

    The shell that runs it sees ``NANGUARD_ALARM`` (the kind), ``NANGUARD_MESSAGE``,
    ``NANGUARD_STEP``, ``NANGUARD_VALUE`` and ``NANGUARD_PATH`` as values, whatever they hold.

    Args:
        command: The command.
        quiet: Whether its output goes nowhere, as it would spoil a view.
    """

    def __init__(self, command: str, *, quiet: bool = False) -> None:
        self.name = "command for alarms"
        self._command = command
        self._output = subprocess.DEVNULL if quiet else None

    def send(self, alert: Alert) -> str:
        """Runs the command; returns what went wrong, or nothing."""
        # The command line of Windows puts values into the text before it reads it.
        shell = ["/bin/sh", "-c", self._command]
        words = shlex.split(self._command) if os.name == "nt" else shell
        fields = {f"NANGUARD_{name.upper()}": str(value) for name, value in _fields(alert).items()}
        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own command
                words,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, **fields},
                start_new_session=True,
            )
        except OSError as error:
            return f"it cannot be run: {error.strerror or error}"
        try:
            code = process.wait(COMMAND_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"it took more than {COMMAND_LIMIT:g} s and was ended"
        return f"it ended with {code}" if code else ""


class Alerts:
    """Sends alerts beside whatever else is done. Can be given to a guard as ``on_event``.

    Args:
        receivers: Who receives the alerts.
        run: Which run it is about, where an alert does not say.
        cool_down: Seconds before the same kind of alert about the same run is sent again.
        on_problem: Called, in another thread, with what went wrong; it is kept for ``problems``
            if None.
        clock: Returns the time in seconds.
    """

    def __init__(
        self,
        receivers: Sequence[Receiver],
        *,
        run: str = "",
        cool_down: float = COOL_DOWN,
        on_problem: Callable[[str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._receivers = tuple(receivers)
        self._run = run
        self._rest = cool_down
        self._clock = clock
        self._last: dict[tuple[str, str], float] = {}
        self._held_back: dict[tuple[str, str], int] = {}
        self._waiting: queue.Queue[Alert | None] = queue.Queue(_WAITING)
        self._problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._on_problem = on_problem or self._problems.put
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()

    def __call__(self, event: Event) -> None:
        """Sends what a guard did about a step, and why it had to; from one rank only.

        Args:
            event: The event, as ``Guard(on_event=...)`` passes it.
        """
        severe = event.finding.severity.value != "info" or event.action.value != "step"
        if not severe or not event.tells:
            return
        kind, said, advice, incident = event.finding.name, str(event), "", event.incident
        if incident is not None:
            advice = f"nanguard explain {shlex.quote(str(incident.folder))}"
            if incident.sentence:
                kind, said = incident.cause, f"{incident.sentence}{event.done}"
        stopped = event.action.value == "stop"
        self.send(Alert(kind, said, urgent=stopped, step=event.finding.step, advice=advice))

    def send(self, alert: Alert) -> None:
        """Sends an alert soon, unless one of its kind was sent a short time ago."""
        key, now = (alert.run, alert.kind), self._clock()
        if not alert.urgent and now - self._last.get(key, -1e18) < self._rest:
            self._held_back[key] = self._held_back.get(key, 0) + 1
            return
        self._last[key] = now
        more = self._held_back.pop(key, 0)
        since = f" (and {more} more of this kind since the last alert)" if more else ""
        sent = replace(alert, run=alert.run or self._run, text=hidden(f"{alert.text}{since}"))
        try:
            self._waiting.put_nowait(sent)
        except queue.Full:
            return
        self._start()

    def problems(self) -> list[str]:
        """Returns what went wrong since this was last asked, without any address."""
        found = []
        while not self._problems.empty():
            found.append(self._problems.get())
        return found

    def close(self, seconds: float = _AT_END) -> list[str]:
        """Waits a while for alerts that are on their way; returns what went wrong."""
        if self._thread is not None and os.getpid() == self._pid:
            try:
                self._waiting.put(None, timeout=seconds)
            except queue.Full:
                return self.problems()
            self._thread.join(seconds)
            self._thread = None
        return self.problems()

    def _start(self) -> None:
        if self._thread is None or os.getpid() != self._pid:
            self._pid = os.getpid()
            self._thread = threading.Thread(target=self._work, name="nanguard-alerts", daemon=True)
            self._thread.start()
            atexit.register(self.close)

    def _work(self) -> None:
        failed: set[str] = set()
        while (alert := self._waiting.get()) is not None:
            for receiver in self._receivers:
                problem = _sent(receiver, alert)
                if problem and receiver.name not in failed:
                    failed.add(receiver.name)
                    self._on_problem(f"no alert reached the {receiver.name}: {problem}")


def notify(*targets: str, run: str = "", cool_down: float = COOL_DOWN) -> Alerts:
    """Returns something that tells others of a run, to be given to a guard as ``on_event``.

    For example:

        guard = Guard(model, optimizer, on_event=nanguard.notify("https://hooks.slack.com/..."))

    Args:
        targets: Web addresses, ``ntfy:TOPIC``, ``mailto:``, ``env:NAME``, ``file:PATH`` or
            commands; those in the lines of the variable ``NANGUARD_NOTIFY`` if there are none.
        run: How the run is called in messages; the script's name by default.
        cool_down: Seconds before the same kind of alert is sent again.

    Raises:
        UsageError: A target is not understood, or there is none.
    """
    named = targets or tuple(os.environ.get(VARIABLE, "").splitlines())
    if not named:
        raise _wrong(
            "there is nobody to notify", f"Name a target, or set ${VARIABLE}.", "nanguard.notify()"
        )
    receivers = [receiver_of(one) for one in named]
    run = run or os.path.basename(sys.argv[0])  # noqa: PTH119 - a name, not a place
    return Alerts(receivers, run=run, cool_down=cool_down, on_problem=_warn)


def _warn(problem: str) -> None:
    log.warning("nanguard: %s", problem)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A webhook that moved is an error: what is posted does not go to an address nobody named."""

    def redirect_request(self, *_args: Any, **_kwargs: Any) -> None:
        """Follows nothing."""


def _sent(receiver: Receiver, alert: Alert) -> str:
    """Sends an alert, twice at most; returns what went wrong."""
    try:
        problem = receiver.send(alert)
        if problem and isinstance(receiver, Webhook):
            time.sleep(_PAUSE)
            problem = receiver.send(alert)
    except Exception as error:  # noqa: BLE001 - an alert must not end the thread that sends the next
        # Its words may hold the address.
        return type(error).__name__
    return problem


def _form_of(address: str) -> str:
    host = urllib.parse.urlsplit(address).hostname or ""
    return next((form for end, form in _HOSTS.items() if f".{host}".endswith(f".{end}")), "json")


def _kept(scheme: str, name: str) -> str:
    """Returns a target that is kept in an environment variable or in a file."""
    if scheme == "env":
        value = os.environ.get(name, "")
        if not value:
            raise _wrong(f"the environment variable {name} is empty", "Set it to a target.")
    else:
        try:
            with open(name, encoding="utf-8") as file:  # noqa: PTH123
                value = file.readline()
        except (OSError, UnicodeDecodeError) as error:
            raise _wrong(f"{name} cannot be read ({type(error).__name__})", "Check it.") from error
    if value.partition(":")[0] in ("env", "file"):
        raise _wrong(f"{scheme}:{name} names another place", "Put the target itself there.")
    return value


def _fields(alert: Alert) -> dict[str, Any]:
    return {
        "alarm": alert.kind,
        "message": alert.text[:400],
        "step": "" if alert.step is None else alert.step,
        "value": "" if alert.value is None else repr(alert.value),
        "path": alert.run,
    }


def _slack(text: str) -> str:
    """Returns a text in which Slack finds no links and no names."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _teams_card(title: str, body: str) -> dict[str, Any]:
    lines = [
        {"type": "TextBlock", "text": title, "weight": "Bolder", "wrap": True},
        {"type": "TextBlock", "text": body.replace("\n", "\n\n"), "wrap": True},
    ]
    card = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": lines,
    }
    kind = "application/vnd.microsoft.card.adaptive"
    return {"type": "message", "attachments": [{"contentType": kind, "content": card}]}


def _wrong(what: str, do: str, where: str = "--notify") -> UsageError:
    return UsageError(f"{what}.", where=where, do=do)
