"""YAML as PyYAML's safe loader understands it, with places."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nanguard.check.config.document import read_document
from nanguard.errors import SourceError
from nanguard.source.text import Text

if TYPE_CHECKING:
    from nanguard.check.config.node import Node


def read(content: str) -> Node:
    return read_document(Text("run.yaml", content)).roots[0]


def plain(node: Node) -> Any:
    if node.kind == "scalar":
        return node.value
    if node.kind == "sequence":
        return [plain(item) for item in node.items]
    return {entry.key: plain(entry.node) for entry in node.effective()}


WORDS = ("yes", "no", "on", "off", "true", "False", "null", "~", "0x1F", "017", "1_000", "1:30")
SCALARS = st.one_of(
    st.from_regex(r"\A[-+]?[0-9]{1,4}(\.[0-9]{0,3})?([eE][-+]?[0-9]{1,2})?\Z"),
    st.sampled_from(WORDS),
    st.from_regex(r"\A[a-z][a-z0-9_/.-]{0,12}\Z"),
    st.sampled_from(["'1e-5'", '"no"', "2001-12-14", "!!float 1e7", "!!str 12", "1e-5", "1.0e5"]),
)


@given(st.lists(SCALARS, min_size=1, max_size=8))
def test_scalars_mean_what_the_safe_loader_takes_them_for(values: list[str]) -> None:
    text = "".join(f"k{at}: {value}\n" for at, value in enumerate(values))
    assert plain(read(text)) == yaml.safe_load(text)


@given(
    st.recursive(
        st.one_of(st.integers(-9, 9), st.booleans(), st.text("abc é好😀", max_size=5)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.dictionaries(st.text("abcdef", min_size=1, max_size=4), inner, max_size=4),
        ),
        max_leaves=20,
    ),
    st.booleans(),
)
def test_trees_are_those_of_the_safe_loader(value: Any, flow: bool) -> None:
    text = yaml.safe_dump({"root": value}, allow_unicode=True, default_flow_style=flow)
    assert plain(read(text)) == yaml.safe_load(text)


def test_a_value_is_where_it_stands() -> None:
    text = "é: 好😀\nlr: &peak !!float 1e-4   # peak\nempty:\nlist: [1, 'two']\n"
    root = read(text)
    places = {e.key: (text[e.start : e.end], text[e.node.start : e.node.end]) for e in root.entries}
    assert places == {
        "é": ("é", "好😀"),
        "lr": ("lr", "1e-4"),
        "empty": ("empty", ""),
        "list": ("list", "[1, 'two']"),
    }
    assert [entry.line for entry in root.entries] == [1, 2, 3, 4]
    assert [text[i.start : i.end] for i in root.entries[3].node.items] == ["1", "'two'"]


def test_merged_entries_come_from_their_base_and_are_overridden() -> None:
    root = read("base: &b {lr: 1, steps: 2}\nlong:\n  <<: *b\n  steps: 9\n")
    entries = {e.key: e for e in root.entries[1].node.effective()}
    assert (entries["lr"].node.value, entries["lr"].merged, entries["lr"].line) == (1, True, 1)
    assert (entries["steps"].node.value, entries["steps"].merged) == (9, False)
    assert root.entries[0].node.merged


def test_several_merges_and_documents() -> None:
    text = "a: &a {x: 1}\nb: &b {x: 2, y: 3}\nc: {<<: [*a, *b]}\n---\nd: 4\n"
    roots = read_document(Text("run.yaml", text)).roots
    assert plain(roots[0])["c"] == {"x": 1, "y": 3} == yaml.safe_load(text.split("---")[0])["c"]
    assert plain(roots[1]) == {"d": 4}


def test_a_repeated_key_is_seen_and_the_last_one_counts() -> None:
    root = read("lr: 1\nx: 2\nlr: 3\n")
    assert [entry.repeats for entry in root.entries] == [False, False, True]
    assert root.get("lr") is root.entries[2].node


def test_a_tag_is_never_constructed() -> None:
    root = read("a: !!python/object/apply:os.system ['touch x']\nb: !Own {k: 1}\nc: !x text\n")
    assert plain(root) == {"a": ["touch x"], "b": {"k": 1}, "c": "text"}


def test_a_value_that_contains_itself_is_one_node() -> None:
    root = read("a: &a\n  again: *a\n  list: &l [*l]\n")
    inner = root.entries[0].node
    assert inner.get("again") is inner


def test_a_text_that_multiplies_itself_stays_small() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    root = read("\n".join(lines) + "\n")
    # Written out, these would be 9**12 values: to come back at all is the proof.
    assert len(root.entries) == 12


@pytest.mark.parametrize(
    ("content", "what", "line"),
    [
        ("lr: 1\nx: [1, 2\n", "not YAML", 3),
        ("a: 1\nb: c: d\n", "not YAML", 2),
        ("a: *nobody\n", "nothing is named 'nobody'", 1),
        ("[" * 5000, "100 levels", 1),
        ("- " * 5000 + "x", "100 levels", 1),
        ("a: \x00\n", "not YAML", 1),
        ("a: \ud800\n", "not YAML", 1),
    ],
)
def test_a_broken_file_is_an_error_with_its_line(content: str, what: str, line: int) -> None:
    with pytest.raises(SourceError) as caught:
        read_document(Text("conf/run.yaml", content))
    assert what in caught.value.what
    assert caught.value.where == f"conf/run.yaml:{line}"
    assert caught.value.do


def test_a_huge_file_is_refused() -> None:
    with pytest.raises(SourceError, match="3000000 characters"):
        read_document(Text("run.yaml", "a" * 3_000_000))
    with pytest.raises(SourceError, match="more than 200000 values"):
        read_document(Text("run.yaml", "x: [" + "1," * 300_000 + "]"))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("lr: 0.1\nsteps: {{ steps }}\n", "a mapping stands where a key has to be"),
        ("? [a, b]\n: 1\n", "a sequence stands where a key has to be"),
        ("a: &x {b: 1}\n*x : 2\n", "a mapping stands where a key has to be"),
        ("a: &x 1\nb: &x 2\n", "'x' names two values"),
        ("trainer:\n  <<: lightning.Trainer\n", "what is merged with << is no mapping"),
        ("a: &x {b: 1}\nc:\n  <<: [*x, 3]\n", "what is merged with << is no mapping"),
        ("lr: !!float 1rho\n", "'1rho' cannot be read as float"),
        ("seed: " + "1" * 5000 + "\n", "cannot be read as int"),
        ("day: 2024-13-40\n", "'2024-13-40' cannot be read as timestamp"),
    ],
)
def test_what_no_loader_makes_values_of_is_refused(content: str, says: str) -> None:
    with pytest.raises((yaml.YAMLError, ValueError)):
        yaml.safe_load(content)
    with pytest.raises(SourceError, match=says):
        read(content)


def test_keys_with_tags_are_for_the_loader_that_knows_them() -> None:
    assert [entry.key for entry in read("? !!python/tuple [a, b]\n: 1\n").entries] == ["(sequence)"]
