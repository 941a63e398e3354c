"""Figures that pages quote are in a result file, and are the ones that are there.

A figure is followed by a comment that nobody sees on the page and that names its file in
``benchmarks/results`` and its place in it: ``1.001<!--= guard.json rows > 0 > ratio > guard -->``.
Sections about costs, and the page about them, may hold no ratio without one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import suite

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [*ROOT.glob("README*.md"), *sorted((ROOT / "docs").glob("*.md"))]

QUOTED = re.compile(r"(?P<figure>[\d,]*\.?\d+)\**<!--= (?P<file>\S+) (?P<place>.+?) -->")
MARK = re.compile(r"<!--=")
COSTS = re.compile(
    r"^## (?:What it costs|Speed|Measured|开销)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL
)
CODE = re.compile(r"`[^`]*`")
# A number with a decimal point, or one of times; not the version of something.
RATIO = re.compile(r"(?<![\d.])\d+\.\d+(?![\d.])|\d+(?= times\b| 倍)")


def quoted(page: Path) -> list[tuple[str, str, str]]:
    return [m.group("figure", "file", "place") for m in QUOTED.finditer(page.read_text("utf-8"))]


def value_at(place: str, found):
    for key in place.split(" > "):
        found = found[int(key)] if isinstance(found, list) else found[key]
    return found


def says(figure: str, value: float) -> bool:
    """Returns whether a figure is a value, rounded to as many places as the figure has."""
    plain = figure.replace(",", "")
    places = len(plain.partition(".")[2])
    return abs(float(plain) - value) <= 0.5 * 10**-places + 1e-9


def bare(section: str) -> list[str]:
    """Returns the ratios of a section that name no result file."""
    return RATIO.findall(CODE.sub("", QUOTED.sub("", section)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_figure_is_the_one_in_its_file(page: Path):
    marks = quoted(page)
    assert len(marks) == len(MARK.findall(page.read_text("utf-8"))), "a comment follows no figure"
    for figure, file, place in marks:
        found = json.loads((RESULTS / file).read_text("utf-8"))
        assert says(figure, value_at(place, found)), f"{figure} is not {file}, {place}"


def about_costs(page: Path) -> list[str]:
    """Returns the parts of a page that say what something costs; of that about costs, all."""
    text = page.read_text("utf-8")
    return [text] if page.name == "cost.md" else COSTS.findall(text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_ratio_of_costs_is_without_a_file(page: Path):
    found = [figure for part in about_costs(page) for figure in bare(part)]
    assert found == [], f"{page.name} quotes figures that name no result file"


def test_both_readmes_quote_the_same():
    english, chinese = (sorted(quoted(ROOT / name)) for name in ("README.md", "README.zh-CN.md"))
    assert len(english) >= 10
    assert english == chinese


def test_figures_are_rounded_not_cut():
    assert says("1.04", 1.0391)
    assert says("12", 11.83)
    assert not says("1.03", 1.0391)
    assert bare("It takes 2.5 times, **1.2**<!--= a.json x --> and `0.5`, 3 times.") == ["2.5", "3"]


def test_make_bench_writes_what_is_quoted():
    files = {Path(file).stem for page in PAGES for _, file, _ in quoted(page)}
    # Two figures of runs that left no file, copied from the results page.
    assert files - {*suite.CPU, *suite.GPU} == {"earlier"}


@pytest.mark.parametrize(
    "name",
    [
        "check_cold_cpu", "lint_speed_cpu", "ops_speed_h200", "ops_speed_h200_compiled",
        "ops_speed_h200_large", "scan_checkpoint_cpu", "scan_data_cpu", "scan_log_cpu",
    ],
)  # fmt: skip
def test_result_files_say_where_they_come_from(name: str):
    about = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["environment"]
    assert {"command", "commit", "date", "cpu", "device", "torch", "python"} <= set(about)
