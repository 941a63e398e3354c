"""The server from outside: what it answers, to whom, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from nanguard.cli.reporting import run_serve
from nanguard.errors import NanguardError
from tests.nobody import as_nobody, open_folder
from tests.view.report.html.hostile import write_hostile
from tests.view.runs.runs import write_incident, write_record

if TYPE_CHECKING:
    from pathlib import Path

PAGES = {"Accept": "text/html"}


def ask(served: Any, path: str, method: str = "GET", **headers: str) -> tuple[int, dict, str]:
    """Asks for exactly this path; returns the code, the headers and the text."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        told = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, told, answer.read().decode()
    finally:
        connection.close()


def eventually(look: Any, times: int = 600) -> Any:
    """Returns what comes of looking, once it is something."""
    for _ in range(times):
        if found := look():
            return found
        time.sleep(0.1)
    raise AssertionError("it did not happen")


def indexed(served: Any, count: int) -> str:
    """Returns the overview once all runs were read."""

    def look() -> str:
        text = ask(served, "/")[2]
        return text if text.count("<tr id=") == count and "data-state=reading" not in text else ""

    return eventually(lambda: "still to be read" not in (t := look()) and t)


def keys(page: str) -> list[str]:
    return [part.partition('"')[0] for part in page.split('<tr id="run-')[1:]]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A server over some runs, one of them of a stranger, with links that lead out."""
    from tests.view.server.conftest import Served

    outside = tmp_path_factory.mktemp("outside")
    write_record(outside / "secret")
    (outside / "hparams.yaml").write_text("hidden: outside-secret\n")
    root = tmp_path_factory.mktemp("runs")
    night = write_record(root / "night")
    write_incident(night / "incidents", 40)
    write_hostile(root)
    write_record(root / "lost", bad=range(100, 120))
    (root / "linked").symlink_to(outside / "secret")
    half = root / "half"
    half.mkdir()
    (half / "metrics.jsonl").symlink_to(outside / "secret" / "metrics.jsonl")
    (half / "train.log").write_text("".join(f"step {n} loss: {5 - n}\n" for n in range(5)))
    (half / "hparams.yaml").symlink_to(outside / "hparams.yaml")
    one = Served(root)
    yield one
    one.end()


def test_overview_tells_of_every_run(site):
    page = indexed(site, 4)
    rows = {row.partition("</tr>")[0] for row in page.split("<tr id=")[1:]}
    night = next(row for row in rows if ">night<" in row)
    assert "#incident-0-0" in night
    assert "1 incident" in night
    assert "3 not finite" in night
    assert 'data-state="running"' in night
    lost = next(row for row in rows if ">lost<" in row)
    assert 'data-state="bad"' in lost
    assert ">nan<" in lost
    assert 'class="holes"' in lost
    assert "4 runs: 3 running, 1 bad." in page


def test_run_page_and_its_data(site):
    page = indexed(site, 4)
    key = next(k for k in keys(page) if ">night<" in page.partition(f'id="run-{k}"')[2][:400])
    code, headers, text = ask(site, f"/run/{key}")
    assert code == 200
    assert "A loss or gradient went bad at step 40" in text
    assert headers["content-type"].startswith("text/html")
    data = json.loads(ask(site, f"/run/{key}/data")[2])
    assert data["page"]["schema"] == "nanguard.page/1"
    assert next(iter(data["sections"])) == "verdict"
    assert data["state"] == "running"


def test_answers_say_what_a_browser_may_do(site):
    for path in ("/", "/assets/page.js", "/nothing", "/run/abc"):
        _, headers, _ = ask(site, path)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers
    assert "<script>" not in ask(site, "/")[2]
    assert "http" not in ask(site, "/")[2].replace("http-equiv", "").partition("<body")[0]


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/assets/../../../etc/passwd",
        "/assets/..%2f..%2fserve%2frunning.py",
        "/assets/running.py",
        "/assets//etc/passwd",
        "/run/..%2f..%2foutside",
        "/run/%00",
        "/run/linked/data",
        "/run/" + "a" * 5000,
        "//etc/passwd",
    ],
)
def test_no_path_leads_out(site, path):
    code, _, text = ask(site, path)
    assert code == 404
    assert "root:" not in text


def test_links_that_lead_out_are_not_followed(site):
    page = indexed(site, 4)
    assert "linked" not in page
    key = next(k for k in keys(page) if ">half<" in page.partition(f'id="run-{k}"')[2][:400])
    text = ask(site, f"/run/{key}")[2]
    assert "outside-secret" not in text
    assert "grad_norm" not in text
    assert "at step 4, is 1" in text


def test_hostile_names_and_lines_are_text(site):
    page = indexed(site, 4)
    assert "<b onmouseover" not in page
    assert "&lt;b onmouseover" in page
    key = next(k for k in keys(page) if "onmouseover" in page.partition(f'id="run-{k}"')[2][:400])
    data = json.loads(ask(site, f"/run/{key}/data")[2])
    said = "".join(html for _, html in data["sections"].values())
    assert "<img" not in said
    assert "<script" not in said
    assert "&lt;script&gt;window.owned" in said


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_other_names_are_turned_away(site, host):
    code, _, text = ask(site, "/", Host=host)
    assert code == 421
    assert "does not answer to the name" in text


@pytest.mark.parametrize("host", ["localhost", "localhost:9", "127.0.0.1", "[::1]:80"])
def test_own_names_are_answered(site, host):
    assert ask(site, "/", Host=host)[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(site, method):
    assert ask(site, "/", method)[0] == 405


def test_token_is_needed_beyond_this_machine(served, tmp_path):
    one = served(write_record(tmp_path / "run").parent, "--host", "0.0.0.0")
    token = one.address.partition("?token=")[2]
    assert len(token) >= 32
    assert ask(one, "/")[0] == 401
    assert ask(one, "/?token=wrong")[0] == 401
    assert ask(one, "/assets/page.css")[0] == 401
    assert ask(one, "/events")[0] == 401
    # A browser is led to an address without it.
    code, headers, _ = ask(one, f"/?x=1&token={token}", **PAGES)
    assert (code, headers["location"]) == (303, "/?x=1")
    cookie = headers["set-cookie"]
    assert "httponly" in cookie.lower()
    assert ask(one, "/", Cookie=cookie.partition(";")[0])[0] == 200
    # Another server on the same machine has set a cookie that is none by the book.
    assert ask(one, "/", Cookie=f'seen={{"a": 1}}; {cookie.partition(";")[0]}')[0] == 200
    assert ask(one, "/", Cookie="nanguard_token_1=x; %$=;")[0] == 401
    assert ask(one, f"/?token={token}")[0] == 200
    away = ask(one, f"//evil.example/?token={token}", **PAGES)
    assert away[0] == 404 or away[1]["location"].startswith("/evil")
    assert ask(one, f"/?token={token}", Host="evil.example")[0] == 421


def test_own_token_is_needed_and_not_printed(served, tmp_path):
    one = served(tmp_path, "--token", "abcdefgh")
    assert one.address == f"http://127.0.0.1:{one.port}/"
    assert ask(one, "/")[0] == 401
    assert ask(one, "/?token=abcdefgh")[0] == 200
    one.process.send_signal(signal.SIGINT)
    assert "abcdefgh" not in one.process.stdout.read()


def test_requests_that_are_never_whole_are_closed(site):
    half = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: "
    with (
        socket.create_connection(("127.0.0.1", site.port), timeout=100) as nothing,
        socket.create_connection(("127.0.0.1", site.port), timeout=100) as first,
        socket.create_connection(("127.0.0.1", site.port), timeout=100) as second,
        socket.create_connection(("127.0.0.1", site.port), timeout=100) as stream,
    ):
        stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in stream.recv(100)
        first.sendall(half)
        second.sendall(b"GET /assets/page.css HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert second.recv(100).startswith(b"HTTP/1.1 200")
        second.sendall(half)
        for connection in (nothing, first, second):
            while connection.recv(1 << 16):  # until it is closed, or the test fails by its timeout
                pass
        # What was asked for in full is answered for as long as it takes.
        stream.setblocking(False)
        with pytest.raises(BlockingIOError):
            while stream.recv(1 << 16):
                pass
    assert ask(site, "/")[0] == 200


def test_endless_headers_are_refused(site):
    code, _, _ = ask(site, "/", **{"X-Long": "x" * 15_000})
    assert code == 200
    code, _, _ = ask(site, "/", **{"X-Long": "x" * 20_000})
    assert code == 431
    with socket.create_connection(("127.0.0.1", site.port), timeout=100) as endless:
        endless.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        with contextlib.suppress(ConnectionError):  # closed while the rest was on its way
            endless.sendall(b"x" * 2_000_000)
            assert endless.recv(100).startswith(b"HTTP/1.1 400")
            while endless.recv(1 << 16):
                pass


def test_empty_folder_and_a_run_that_comes_and_goes(served, tmp_path):
    one = served(tmp_path)
    text = eventually(lambda: (t := ask(one, "/")[2]) and "no run here yet" in t and t)
    assert "0 runs" in text
    folder = write_record(tmp_path / "new", 20, bad=range(0))
    key = keys(indexed(one, 1))[0]
    assert ask(one, f"/run/{key}")[0] == 200
    for file in folder.iterdir():
        file.unlink()
    eventually(lambda: ask(one, f"/run/{key}")[0] == 404)
    assert "No such run" in ask(one, f"/run/{key}")[2]
    assert "gone" in ask(one, f"/run/{key}/data")[2]


def test_ends_at_once_with_open_streams(served, tmp_path):
    one = served(write_record(tmp_path / "run").parent)
    indexed(one, 1)
    with socket.create_connection(("127.0.0.1", one.port)) as stream:
        stream.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" in stream.recv(100)
        assert one.end() == 0


def failure(root: Path, **options: Any) -> str:
    given = {"host": "127.0.0.1", "port": 0, "token": None, "names": (), "browser": False}
    with pytest.raises(NanguardError) as caught:
        run_serve(root, **{**given, **options})
    return str(caught.value)


def test_says_why_it_cannot_start(tmp_path):
    assert "there is no such folder" in failure(tmp_path / "no")
    (tmp_path / "a.log").write_text("step 1 loss 2\n")
    assert "Give its folder" in failure(tmp_path / "a.log")
    assert "can be guessed" in failure(tmp_path, token="x")
    assert "no such address" in failure(tmp_path, host="192.0.2.1")
    assert "no such address" in failure(tmp_path, host="no.such.name.invalid")


def test_says_what_has_to_be_installed(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "nanguard.view.server.web_server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert "[serve]'" in failure(tmp_path)


def test_port_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "nanguard", "serve", str(tmp_path), "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert f"127.0.0.1:{port}: it is in use." in done.stderr
    assert "--port 0" in done.stderr
    assert "Traceback" not in done.stderr


def test_folder_without_permission():
    # Nobody may not be allowed to read Python's own files either.
    importlib.import_module("nanguard.view.server.web_server")
    with open_folder() as folder:
        folder.chmod(0)
        with as_nobody():
            assert "cannot be read" in failure(folder)


def test_name_that_is_no_unicode(served, tmp_path):
    write_record(tmp_path / os.fsdecode(b"run-\xff"))
    one = served(tmp_path)
    (key,) = keys(indexed(one, 1))
    code, _, text = ask(one, f"/run/{key}/data")
    assert code == 200
    assert json.loads(text)["name"] == "run-\udcff"
