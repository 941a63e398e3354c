"""The README and its Chinese version say the same: structure, code, links and figures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SWITCHES = {"README.md": "[中文](README.zh-CN.md)", "README.zh-CN.md": "[English](README.md)"}

FENCED = re.compile(r"^```.*?^```[ \t]*$", flags=re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^(#{1,6}) ", flags=re.MULTILINE)
LINK = re.compile(r"\]\(([^()\s]+)\)")
NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def prose(page: str) -> str:
    """Returns a page without its code blocks and its language switch."""
    for switch in SWITCHES.values():
        page = page.replace(f"{switch}\n", "", 1)
    return FENCED.sub("", page)


def tables(page: str) -> list[list[str]]:
    """Returns the rows of each table of a page."""
    found = re.findall(r"(?:^\|.*\n)+", prose(page) + "\n", flags=re.MULTILINE)
    return [table.splitlines() for table in found]


def cells(row: str) -> list[str]:
    """Returns the cells of a row; a bar that is escaped does not end one."""
    return re.split(r"(?<!\\)\|", row.strip())[1:-1]


@pytest.fixture(scope="module")
def english() -> str:
    return text("README.md")


@pytest.fixture(scope="module")
def chinese() -> str:
    return text("README.zh-CN.md")


@pytest.mark.parametrize("name", SWITCHES)
def test_the_language_switch_is_right_under_the_title(name: str):
    title, *rest = text(name).splitlines()
    assert title.startswith("# ")
    assert next(line for line in rest if line) == SWITCHES[name]


def test_headings_have_the_same_levels_in_the_same_order(english: str, chinese: str):
    levels = HEADING.findall(prose(english))
    assert len(levels) > 8
    assert HEADING.findall(prose(chinese)) == levels


def test_code_blocks_are_identical(english: str, chinese: str):
    blocks = FENCED.findall(english)
    assert len(blocks) > 7
    assert FENCED.findall(chinese) == blocks


def test_code_blocks_and_tables_are_in_the_same_sections(english: str, chinese: str):
    def layout(page: str) -> list[str]:
        marked = FENCED.sub("```", page)
        return re.findall(r"^(#{1,6} |```|\| ---)", marked, flags=re.MULTILINE)

    assert layout(chinese) == layout(english)


def test_links_have_the_same_targets(english: str, chinese: str):
    targets = set(LINK.findall(prose(english)))
    assert len(targets) > 10
    assert set(LINK.findall(prose(chinese))) == targets


def test_tables_have_the_same_shape(english: str, chinese: str):
    def shape(page: str) -> list[list[int]]:
        return [[len(cells(row)) for row in table] for table in tables(page)]

    assert shape(english)
    assert shape(chinese) == shape(english)


def test_table_rows_have_the_same_numbers_in_the_same_order(english: str, chinese: str):
    pairs = [
        (row, other)
        for table, translated in zip(tables(english), tables(chinese), strict=True)
        for row, other in zip(table, translated, strict=True)
    ]
    assert any(NUMBER.search(row) for row, _ in pairs)
    for row, other in pairs:
        assert NUMBER.findall(other) == NUMBER.findall(row), f"{row}\n{other}"
