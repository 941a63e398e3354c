"""Alerts, received by a server, a mail program and commands on this machine."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import nanguard
from nanguard import alerts as module
from nanguard.alerts import Alert, Alerts, receiver_of
from nanguard.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SECRET = "T0000-B0000-s3cretpath"


class Server(ThreadingHTTPServer):
    """A web server that keeps what is posted to it."""

    daemon_threads = True

    def __init__(self) -> None:
        self.received: list[tuple[str, dict[str, Any]]] = []
        self.status: list[int] = []
        self.held = threading.Event()
        self.held.set()
        super().__init__(("127.0.0.1", 0), Handler)

    def address(self, form: str = "slack", path: str = SECRET) -> str:
        return f"{form}+http://127.0.0.1:{self.server_port}/{path}"

    def wait_for(self, count: int) -> list[dict[str, Any]]:
        """Returns the first messages, once there are so many."""
        for _ in range(2000):
            if len(self.received) >= count:
                break
            time.sleep(0.02)
        return [body for _, body in self.received]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.held.wait(30)
        status = self.server.status.pop(0) if self.server.status else 200
        if status == 200:
            self.server.received.append((self.path, json.loads(body)))
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.end_headers()

    def do_GET(self) -> None:
        self.server.received.append((self.path, {"got": True}))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_args: object) -> None:
        """Says nothing."""


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield made
        made.held.set()
        made.shutdown()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PAUSE", 0.0)
    monkeypatch.delenv("RANK", raising=False)


ALERT = Alert(
    "division-by-zero", "step 7: <x> & 0/0", "train.py", step=7, advice="nanguard explain"
)


@pytest.mark.parametrize(
    ("form", "read"),
    [
        ("slack", lambda body: body["text"]),
        ("discord", lambda body: body["embeds"][0]["title"] + body["embeds"][0]["description"]),
        ("ntfy", lambda body: body["title"] + body["message"]),
        ("json", lambda body: body["text"]),
        (
            "teams",
            lambda body: "".join(
                block["text"] for block in body["attachments"][0]["content"]["body"]
            ),
        ),
    ],
)
def test_every_form_says_which_run_and_what_happened(
    server: Server, form: str, read: Callable[[dict[str, Any]], str]
):
    sender = Alerts([receiver_of(server.address(form))])
    sender.send(ALERT)
    assert sender.close() == []
    ((path, body),) = server.received
    words = read(body)
    assert "nanguard: train.py on " in words
    shown = "&lt;x&gt; &amp; 0/0" if form == "slack" else "<x> & 0/0"
    assert f"step 7: {shown}" in words
    assert "nanguard explain" in words
    assert path == ("/" if form == "ntfy" else f"/{SECRET}")
    if form == "ntfy":
        assert body["topic"] == SECRET
    if form == "discord":
        assert body["allowed_mentions"] == {"parse": []}
    if form == "json":
        assert (body["alarm"], body["step"], body["path"]) == ("division-by-zero", 7, "train.py")


@pytest.mark.parametrize(
    ("address", "form"),
    [
        ("https://hooks.slack.com/services/a/b", "slack"),
        ("https://discord.com/api/webhooks/1/x", "discord"),
        ("https://contoso.webhook.office.com/webhookb2/x", "teams"),
        ("https://prod-1.westeurope.logic.azure.com:443/workflows/x", "teams"),
        ("https://ntfy.sh/topic", "ntfy"),
        ("ntfy:topic", "ntfy"),
        ("https://example.org/hook", "json"),
        ("https://notdiscord.com/x", "json"),
        ("slack+https://mattermost.example.org/hooks/x", "slack"),
    ],
)
def test_the_form_follows_from_the_host(address: str, form: str):
    receiver = receiver_of(address)
    assert receiver.name.startswith(f"{form} webhook at ")
    assert "hooks/x" not in receiver.name
    assert "webhooks/1" not in receiver.name


def test_one_kind_is_sent_once_in_a_while_and_counted(server: Server):
    now = [0.0]
    sender = Alerts([receiver_of(server.address())], cool_down=60, clock=lambda: now[0])
    for second in (0, 1, 2, 59, 61):
        now[0] = float(second)
        sender.send(ALERT)
    sender.send(Alert("stopped", "the guard stopped the run", "train.py", urgent=True))
    sender.send(Alert("stopped", "the guard stopped the run", "train.py", urgent=True))
    sender.close()
    words = [body["text"] for _, body in server.received]
    assert len(words) == 4
    assert "more of this kind" not in words[0]
    assert "(and 3 more of this kind since the last alert)" in words[1]


def test_a_slow_receiver_holds_nothing_up(server: Server):
    server.held.clear()
    sender = Alerts([receiver_of(server.address())], cool_down=0)
    for step in range(500):
        sender.send(Alert("spike", f"step {step}"))
    assert server.received == []
    assert sender._waiting.qsize() <= module._WAITING
    server.held.set()
    sender.close()
    assert 1 <= len(server.received) <= module._WAITING + 2


@pytest.mark.parametrize(
    ("statuses", "problem"), [([500, 200], None), ([404, 404], "404"), ([302, 302], "302")]
)
def test_a_receiver_that_refuses_is_asked_twice(server: Server, statuses, problem, caplog):
    server.status = list(statuses)
    sender = Alerts([receiver_of(server.address())])
    with caplog.at_level(logging.DEBUG):
        sender.send(ALERT)
        problems = sender.close()
    assert len(server.received) == (problem is None)
    if problem is not None:
        assert problems == [
            f"no alert reached the slack webhook at 127.0.0.1: it answered {problem}"
        ]
    assert SECRET not in caplog.text + str(problems)


def test_nobody_there(caplog: pytest.LogCaptureFixture):
    guard_side = nanguard.notify(f"http://127.0.0.1:9/{SECRET}")
    guard_side.send(ALERT)
    guard_side.close()
    assert "no alert reached the json webhook at 127.0.0.1: it cannot be reached" in caplog.text
    assert SECRET not in caplog.text


def test_a_mail_goes_through_sendmail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "sendmail"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words; cat > {tmp_path}/mail\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sender = Alerts([receiver_of("mailto:ann@example.org,bo@example.org")])
    sender.send(ALERT)
    assert sender.close() == []
    mail = (tmp_path / "mail").read_text()
    assert "To: ann@example.org, bo@example.org\n" in mail
    assert "Subject: nanguard: train.py on" in mail
    assert "nanguard explain" in mail
    assert (tmp_path / "words").read_text() == "-i -t\n"
    program.write_text("#!/bin/sh\nexit 75\n")
    sender.send(Alert("other", "x"))
    assert sender.close() == ["no alert reached the mail: sendmail ended with 75"]


def test_a_command_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "COMMAND_LIMIT", 0.2)
    sender = Alerts([receiver_of("sleep 60")])
    sender.send(ALERT)
    (problem,) = sender.close()
    assert problem.endswith("it took more than 0.2 s and was ended")


def test_a_target_can_be_kept_elsewhere(server: Server, tmp_path: Path, monkeypatch):
    (tmp_path / "hook").write_text(server.address() + "\n")
    monkeypatch.setenv("HOOK", server.address("json"))
    sender = Alerts([receiver_of(f"file:{tmp_path / 'hook'}"), receiver_of("env:HOOK")])
    sender.send(ALERT)
    assert sender.close() == []
    assert len(server.received) == 2


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("  ", "the target is empty"),
        ("telegram+https://x.org/1", "there is no form 'telegram'"),
        ("mailto:", "mailto: needs an address"),
        ("ntfy:", "has no topic"),
        ("env:NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE is empty"),
        ("file:/no/such/file", "cannot be read"),
        ("https://", "has no host"),
    ],
)
def test_what_is_no_target(target: str, what: str):
    with pytest.raises(UsageError, match=what):
        receiver_of(target)


def test_notify_without_a_target_reads_the_environment(server: Server, monkeypatch):
    with pytest.raises(UsageError, match="there is nobody to notify"):
        nanguard.notify()
    monkeypatch.setenv("NANGUARD_NOTIFY", f"{server.address()}\n{server.address('json')}")
    sender = nanguard.notify()
    sender.send(ALERT)
    sender.close()
    assert len(server.received) == 2


def train(on_event: Callable[[Any], None], folder: Path, **options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    batches = [torch.randn(8, 4) for _ in range(12)]
    batches[5][2] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nanguard.Guard(model, optimizer, run_dir=folder, on_event=on_event, **options) as guard:
        for batch in guard.watch(batches):
            guard.backward(model(batch).pow(2).mean())
            guard.step()


def test_a_guard_tells_and_keeps_the_secret(server: Server, tmp_path: Path):
    sender = nanguard.notify(server.address(), run="night")
    train(sender, tmp_path)
    sender.close()
    ((_, body),) = server.received
    assert "nanguard: night on " in body["text"]
    assert "step 5: the loss is nan -&gt; batch skipped" in body["text"]
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert SECRET.encode() not in written


def test_a_guard_with_incidents_tells_why(server: Server, tmp_path: Path):
    sender = nanguard.notify(server.address("json"))
    train(sender, tmp_path, incidents=True)
    sender.close()
    ((_, body),) = server.received
    assert body["alarm"] == "bad-input-data"
    assert "step 5: " in body["message"]
    assert "takes in data that is already NaN in sample 2" in body["message"]
    assert "-> batch skipped (bad step 1" in body["message"]
    (folder,) = tmp_path.glob("step-*")
    assert f"nanguard explain {folder}" in body["text"]
    assert body["path"] == Path(sys.argv[0]).name


def test_ctrl_c_in_an_explanation_does_not_keep_an_alert_back(tmp_path: Path, monkeypatch):
    told: list[Any] = []

    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nanguard.diagnose.session.explain", interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(told.append, tmp_path, incidents=True)
    assert [str(event).partition(" (")[0] for event in told] == [
        "step 5: the loss is nan -> batch skipped"
    ]


def test_only_the_first_rank_tells(server: Server, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    sender = nanguard.notify(server.address())
    train(sender, tmp_path)
    sender.close()
    assert server.received == []


SCRIPT = """
import torch
from torch import nn
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    weight = torch.ones(4) * (step != 5)
    loss = (model(torch.randn(4, 4)).pow(2).squeeze(1) * weight).sum() / weight.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
{end}
"""


@pytest.mark.parametrize(
    ("end", "words", "code", "last"),
    [
        ("", (), 0, None),
        ("raise SystemExit(4)", (), 4, "the run ended with exit code 4"),
        ("", ("--on-bad", "stop"), 3, "the guard stopped the run: on_bad is 'stop'"),
    ],
)
def test_run_tells_of_an_explained_incident_and_of_a_bad_end(
    server: Server, tmp_path: Path, end: str, words: tuple[str, ...], code: int, last: str | None
):
    (tmp_path / "train.py").write_text(SCRIPT.format(end=end))
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "nanguard", "run", "--notify", "env:HOOK", *words]
    done = subprocess.run(
        [*command, "--", sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "HOOK": server.address()},
    )
    assert done.returncode == code, done.stderr
    texts = [body["text"] for _, body in server.received]
    assert len(texts) == (1 if last is None else 2)
    assert "train.py:8 divides by weight.sum(), which is 0: 0/0 = NaN" in texts[0]
    assert "nanguard explain .nanguard" in texts[0]
    if last is not None:
        assert last in texts[1]
    written = b"".join(one.read_bytes() for one in tmp_path.rglob("*") if one.is_file())
    assert SECRET.encode() not in written + done.stderr.encode()
