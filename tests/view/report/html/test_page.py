"""The page as text: what it holds, what it allows, and what a stranger cannot make of it."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import re
import struct
from array import array
from html.parser import HTMLParser

import pytest

from nanguard.view.report.html import asset, embedded, page, page_data
from nanguard.view.report.html.markup import Html, el, shown
from nanguard.view.report.verdict import judge
from nanguard.view.runs import Curve, EventKind, Panel, Run, RunEvent, open_runs
from tests.view.report.html.hostile import write_hostile
from tests.view.runs.runs import write_incident, write_record


class Parsed(HTMLParser):
    """The elements of a page, its visible text, and its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._within = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._within = tag

    def handle_endtag(self, tag):
        self._within = ""

    def handle_data(self, data):
        if self._within == "script":
            self.scripts.append(data)
        elif self._within != "style":
            self.text += data

    def of(self, tag):
        return [attrs for name, attrs in self.tags if name == tag]


def told(*paths) -> str:
    runs = open_runs(paths)
    for run in runs:
        judge(run)
    return page(runs)


@pytest.fixture(scope="module")
def night(tmp_path_factory):
    folder = write_record(tmp_path_factory.mktemp("runs") / "night")
    write_incident(folder / "incidents", 40)
    (folder / "config.yaml").write_text("training:\n  lr: 1e-4\n")
    return told(folder)


def test_parts_of_the_page(night):
    parsed = Parsed(night)
    assert [attrs["id"] for attrs in parsed.of("h2")] == [
        "verdict",
        "curves",
        "timeline",
        "incidents",
        "findings",
        "setting",
    ]
    assert len(parsed.of("h1")) == 1
    assert len(parsed.of("main")) == 1
    assert (
        "A loss or gradient went bad at step 40; the guard kept it out of the weights"
        in parsed.text
    )
    assert "[log-or-sqrt-domain, proven]" in parsed.text
    assert "It skipped 3 steps (first: bad step)." in parsed.text
    assert "3 of 120 values are not finite" in parsed.text
    for words in ("q = torch.log(p.clamp(min=1e-8))", "everything in float32", "lr: 1e-4", "2.8.0"):
        assert words in parsed.text
    assert "f00d" not in night  # the signature is nobody else's business


def test_anchors_lead_somewhere_and_are_unique(night):
    parsed = Parsed(night)
    ids = [attrs["id"] for _, attrs in parsed.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    targets = {attrs["href"] for attrs in parsed.of("a")}
    assert "#incident-0-0" in targets
    assert targets <= {f"#{name}" for name in ids}


def test_nothing_but_our_own_script_may_run(night):
    parsed = Parsed(night)
    policy = next(
        attrs["content"]
        for attrs in parsed.of("meta")
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    for name, kind in (("page.js", "script-src"), ("page.css", "style-src")):
        digest = hashlib.sha256(asset(name).encode()).digest()
        assert f"{kind} 'sha256-{base64.b64encode(digest).decode()}';" in policy
    assert not re.search(r"(?:src|href)=\"?(?:https?:)?//", night)
    assert not any(name == "style" or name.startswith("on") for _, a in parsed.tags for name in a)


def test_path_of_the_bad_value_is_a_picture(night):
    parsed = Parsed(night)
    (picture,) = [attrs for attrs in parsed.of("svg") if attrs.get("class") == "way"]
    assert "aten.log 3 not finite" in picture["aria-label"]
    assert "aten.log is the first that is not finite" in parsed.text
    assert len([a for a in parsed.of("rect") if a.get("class") == "bad"]) == 2


def test_hostile_strings_are_text(tmp_path):
    text = told(write_hostile(tmp_path))
    parsed = Parsed(text)
    assert "<script>window.owned=1</script>" in parsed.text
    assert len(parsed.of("script")) == 2
    assert not any(name.startswith("on") for _, attrs in parsed.tags for name in attrs)
    assert {tag for tag, _ in parsed.tags}.isdisjoint({"img", "iframe", "b", "i", "textarea"})
    for character in "\x1b\x07\x00\u202e\u2066\u200f":
        assert character not in text
    assert "\\x1b[31mred" in parsed.text
    assert "\\u202egpj.exe" in parsed.text
    assert "w … (cut: 100000 characters in all)" in parsed.text
    assert "z … (cut: 1000001 characters in all)" in parsed.text
    assert len(text) < 400_000
    json.loads(parsed.scripts[0])


def test_too_long_is_cut_and_says_so():
    assert shown("x" * 5000, 10) == "x" * 10 + " … (cut: 5000 characters in all)"
    assert shown("a\tb\r\nc") == "a   b\nc"


def test_markup_escapes_what_it_did_not_make():
    made = el("p", "<b>", Html("<i>kept</i>"), None, ["&"], title='"<', hidden=True, id=None)
    assert made == '<p title="&quot;&lt;" hidden>&lt;b&gt;<i>kept</i>&amp;</p>'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "Nothing was recorded: there is no number in this run."),
        ('{"step": 1, "loss": NaN}\n{"step": 2, "loss": NaN}\n', "The run went bad at step 1 and"),
        ('{"step": 5, "loss": 2.5}\n', "Every number that was recorded is finite"),
    ],
)
def test_poor_runs_have_a_page(tmp_path, content, words):
    path = tmp_path / "train.jsonl"
    path.write_text(content)
    assert words in Parsed(told(path)).text


def test_several_runs_and_their_names(tmp_path):
    text = told(write_record(tmp_path / "a"), write_record(tmp_path / "b"))
    data = json.loads(Parsed(text).scripts[0])
    assert [run["name"] for run in data["runs"]] == ["a", "b"]


def columns(data, curve):
    """Decodes a curve as the script of the page does."""
    numbers = data["numbers"]
    raw = base64.b64decode(numbers["bytes"])
    raw = gzip.decompress(raw) if numbers["packing"] == "gzip" else raw

    def column(told):
        offset, count, kind = told
        size = int(kind[1:])
        planes = [raw[offset + p * count : offset + (p + 1) * count] for p in range(size)]
        plain = bytes(planes[i % size][i // size] for i in range(count * size))
        return struct.unpack(f"<{count}{kind[0]}", plain)

    lows = column(curve["lows"])
    highs = column(curve["highs"]) if "highs" in curve else lows
    counts = column(curve["counts"]) if "counts" in curve else [1] * len(lows)
    if "xs" in curve:
        return column(curve["xs"]), lows, highs, counts
    xs = [curve["first"]]
    for step in column(curve["steps"]):
        xs.append(xs[-1] + step)
    return xs[: len(lows)], lows, highs, counts


@pytest.mark.parametrize("stride", [1, 0.25])
@pytest.mark.parametrize("budget", [10_000_000, 40_000])
def test_numbers_of_the_page_are_those_of_the_run(budget, stride):
    count = 50_000
    values = array("f", [math.sin(n / 900) + (n == 31_234) * 99 for n in range(count)])
    values[100] = math.nan
    values[40_000] = -math.inf
    xs = [n * stride for n in range(count)]
    run = Run("r", "r", curves=[Curve("loss", Panel.LOSS, xs, values)])
    data = json.loads(json.dumps(page_data([run], budget), allow_nan=False))
    (curve,) = data["runs"][0]["curves"]
    places, lows, highs, counts = columns(data, curve)
    assert curve["points"] == count
    assert sum(counts) == count - 2
    assert max(highs) == max(v for v in values if math.isfinite(v))
    assert curve["gaps"] == [
        [100 * stride, 100 * stride, 1, 0, 0],
        [40_000 * stride, 40_000 * stride, 0, 0, 1],
    ]
    peak = highs.index(max(highs))
    assert places[peak] <= 31_234 * stride < places[peak + 1]
    assert (curve["largest"] == 1) == (budget > 1_000_000)
    if budget < 1_000_000:
        assert len(lows) * 9 < budget * 2
        # Beside a gap every point is there by itself.
        beside = next(n for n, x in enumerate(places) if x == 101 * stride)
        assert counts[beside] == 1
        assert lows[beside] == values[101]


def test_numbers_cannot_end_their_script():
    assert "<" not in embedded({"name": "</script><!--<script>"})


def test_around_an_event_every_point_is_in_the_page():
    values = array("f", [float(n % 89) for n in range(50_000)])
    run = Run("r", "r", curves=[Curve("loss", Panel.LOSS, range(50_000), values)])
    run.events = [RunEvent(EventKind.ROLLBACK, 20_000, "rolled back")]
    data = page_data([run], 40_000)
    places, lows, _, counts = columns(data, data["runs"][0]["curves"][0])
    near = [n for n, x in enumerate(places) if 19_900 < x < 20_100]
    assert [counts[n] for n in near] == [1] * 199
    assert [lows[n] for n in near] == list(values[19_901:20_100])
