"""JSON and TOML read into the same tree, with places."""

from __future__ import annotations

import codecs
import json
import math
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanguard.check.config.document import read_document
from nanguard.errors import SourceError
from nanguard.source.text import Text
from tests.check.config.test_yaml import plain

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(allow_nan=False),
        st.text(max_size=8),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(VALUES, st.sampled_from([None, 2]))
def test_json_means_what_the_standard_reader_takes_it_for(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    assert plain(read_document(Text("a.json", text)).roots[0]) == json.loads(text)


def test_json_has_places_comments_and_repeated_keys() -> None:
    text = '{\n  // note\n  "lr": 1e-4, /* x */\n  "b": {"c": [1, 2]},\n  "lr": NaN,\n}\n'
    root = read_document(Text("a.json", text)).roots[0]
    assert [(e.key, e.line, e.repeats) for e in root.entries] == [
        ("lr", 3, False),
        ("b", 4, False),
        ("lr", 5, True),
    ]
    assert text[root.entries[0].node.start : root.entries[0].node.end] == "1e-4"
    assert text[root.entries[0].start : root.entries[0].end] == '"lr"'
    assert math.isnan(root.entries[2].node.value)
    assert plain(root.entries[1].node) == {"c": [1, 2]}


@pytest.mark.parametrize(
    ("name", "content", "what", "line"),
    [
        ("a.json", '{"a": 1\n "b": 2}', "a comma or '}' is missing", 2),
        ("a.json", '{"a": 1}\n{"b": 2}', "behind the end", 2),
        ("a.json", "{'a': 1}", "double quotes", 1),
        ("a.json", '{"a": tru}', "no JSON value", 1),
        ("a.json", "[" * 500, "100 levels", 1),
        ("a.json", '{"a": 1' + "0" * 9000 + "}", "a number has 9001 digits", 1),
        ("a.json", "", "a value is missing", 1),
        ("a.toml", "a = 1\nb = \n", "a value is missing", 2),
        ("a.toml", "a = 1\na b = 2\n", "'=' is missing", 2),
        ("a.toml", "[a\nx = 1\n", "']' is missing", 1),
        ("a.toml", "a = 1\n[a]\nb = 2\n", "a value and cannot hold keys", 2),
        ("a.toml", "a = 07\n", "not TOML", 1),
        ("a.toml", "x = " + "[" * 500, "100 levels", 1),
    ],
)
def test_a_broken_file_is_an_error_with_its_line(
    name: str, content: str, what: str, line: int
) -> None:
    with pytest.raises(SourceError) as caught:
        read_document(Text(name, content))
    assert what in caught.value.what
    assert caught.value.where == f"{name}:{line}"


TOML = """# a run
title = "run \\u00e9"   # name
path = 'C:\\x'
lr = 1e-4
steps = 1_000
big = 0x1F
on = true
day = 1979-05-27 07:32:00
text = \"\"\"
two
lines\"\"\"
[model]
layers = [1, 2, # two
  3]
"quoted key".inner = {a = 1, b = [2.5, inf]}
[[stages]]
lr = 1
[[stages]]
lr = 2
[stages.extra]
x = 1
"""


def test_toml_means_what_the_standard_reader_takes_it_for() -> None:
    root = read_document(Text("a.toml", TOML)).roots[0]
    wanted = tomllib.loads(TOML)
    wanted["day"] = "1979-05-27 07:32:00"
    assert plain(root) == wanted


def test_toml_has_places() -> None:
    root = read_document(Text("a.toml", TOML)).roots[0]
    lr = next(entry for entry in root.entries if entry.key == "lr")
    assert (TOML[lr.start : lr.end], TOML[lr.node.start : lr.node.end], lr.line) == (
        "lr",
        "1e-4",
        4,
    )
    model = next(entry for entry in root.entries if entry.key == "model")
    layers = model.node.entries[0]
    assert TOML[layers.node.start : layers.node.end] == "[1, 2, # two\n  3]"


def test_toml_with_a_repeated_key_is_read_and_the_key_is_seen() -> None:
    root = read_document(Text("a.toml", "a = 1\nb = 2\na = 3\n")).roots[0]
    assert [entry.repeats for entry in root.entries] == [False, False, True]
    assert root.entries[0].node.value == 1


def test_toml_with_a_byte_order_mark_is_refused_as_its_reader_does() -> None:
    with pytest.raises(tomllib.TOMLDecodeError):
        tomllib.loads("\ufeffa = 1\n")
    with pytest.raises(SourceError, match="byte order mark"):
        read_document(Text("a.toml", "a = 1\n", codecs.BOM_UTF8))


def test_the_language_is_told_by_the_text_where_the_name_says_nothing() -> None:
    assert read_document(Text("-", '{"a": 1}')).format == "json"
    assert read_document(Text("-", "a: 1\n")).format == "yaml"
