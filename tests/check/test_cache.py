"""Outcomes that are kept from one check to the next."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanguard.check.code_check import Cache
from nanguard.check.outcome import FileOutcome, NotChecked, Seen
from nanguard.check.selection import Selection
from nanguard.findings import Finding, Fix, Severity
from tests.check.plugin import told

KEPT = Path(".nanguard/cache/check.json")


def project(folder: Path) -> None:
    for number in range(6):
        (folder / f"f{number}.py").write_text(f"x = {number}\nBAD\n")


def test_the_second_report_is_the_first(tmp_path: Path, plugin: Path):
    project(tmp_path)
    first = told(".", cwd=tmp_path, plugin=plugin)
    assert len(json.loads((tmp_path / KEPT).read_text())["entries"]) == 6
    assert told(".", cwd=tmp_path, plugin=plugin) == first
    assert (tmp_path / ".nanguard/cache/.gitignore").read_text() == "*\n"


def test_it_is_really_used_and_only_for_what_is_the_same(tmp_path: Path, plugin: Path):
    project(tmp_path)
    told(".", cwd=tmp_path, plugin=plugin)
    kept = json.loads((tmp_path / KEPT).read_text())
    for entry in kept["entries"].values():
        entry["seen"][0]["message"] = "from the cache"
    (tmp_path / KEPT).write_text(json.dumps(kept))
    (tmp_path / "f3.py").write_text("BAD = 1\n")

    def messages(*words: str) -> list[str]:
        return [f["message"] for f in told(".", *words, cwd=tmp_path, plugin=plugin)["findings"]]

    assert messages() == ["from the cache"] * 3 + ["BAD is bad"] + ["from the cache"] * 2
    assert messages("--no-cache") == ["BAD is bad"] * 6
    assert messages("--select", "bad-word") == ["BAD is bad"] * 6


@pytest.mark.parametrize(
    "content",
    [b"", b"\0\xff", b"[]", b"{", b"[" * 99999, b'{"schema": "nanguard.cache/1", "entries": []}'],
)
def test_a_broken_cache_is_no_cache(tmp_path: Path, plugin: Path, content: bytes):
    project(tmp_path)
    (tmp_path / KEPT).parent.mkdir(parents=True)
    (tmp_path / KEPT).write_bytes(content)
    assert len(told(".", cwd=tmp_path, plugin=plugin)["findings"]) == 6


def test_broken_entries_are_overlooked(tmp_path: Path, plugin: Path):
    project(tmp_path)
    told(".", cwd=tmp_path, plugin=plugin)
    kept = json.loads((tmp_path / KEPT).read_text())
    broken = [None, [], {}, {"seen": 1}, {"seen": [{}]}, "x"]
    kept["entries"] = dict(zip(kept["entries"], broken, strict=True))
    (tmp_path / KEPT).write_text(json.dumps(kept))
    assert len(told(".", cwd=tmp_path, plugin=plugin)["findings"]) == 6


def test_nothing_is_written_through_a_link(tmp_path: Path, plugin: Path):
    project(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / ".nanguard").symlink_to(elsewhere, target_is_directory=True)
    assert len(told(".", cwd=tmp_path, plugin=plugin)["findings"]) == 6
    assert list(elsewhere.iterdir()) == []


def test_everything_comes_back(tmp_path: Path):
    fix = Fix("write it so", safe=True, plan=("first", "then"))
    finding = Finding("X001", "x", Severity.INFO, "m", "f.py", 3, None, "w", 4, 1, (fix,))
    outcome = FileOutcome(
        "f.py", [Seen(finding, "text", ("diff",))], True, [NotChecked("f.py", "why")], 2
    )
    cache = Cache(tmp_path, Selection())
    cache.put(cache.key("f.py", b"data"), outcome)
    cache.save()
    again = Cache(tmp_path, Selection())
    assert again.get(again.key("f.py", b"data"), "f.py") == outcome
    assert again.get(again.key("g.py", b"data"), "g.py") is None
    assert Cache(tmp_path, Selection(("X",))).key("f.py", b"data") != again.key("f.py", b"data")
