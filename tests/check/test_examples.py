"""Every rule there is, against its own examples; a new rule needs no new test."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from nanguard.check.rule import KINDS, Fails, Passes, Rule, all_rules, broken, rules_for
from nanguard.cli.rulepages import index, markdown, pages
from nanguard.findings import Severity
from nanguard.testing import check_rule
from nanguard.testing.rules import check_example

RULES = all_rules()
PREFIXES = {"code": "SRC", "config": "CFG", "data": "DAT", "checkpoint": "CKP", "log": "LOG"}
DOCS = Path(__file__).parents[2] / "docs" / "rules"
EXAMPLES = [
    pytest.param(rule, example, id=f"{rule.name}-{number}")
    for rule in RULES
    for number, example in enumerate(rule.examples)
]


@pytest.mark.parametrize(("rule", "example"), EXAMPLES)
def test_the_example_holds(rule: Rule, example: Passes | Fails):
    check_example(rule, example)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_is_complete(rule: Rule):
    prefix = PREFIXES[rule.reads]
    assert re.fullmatch(rf"{prefix}\d{{3}}", rule.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", rule.name)
    assert isinstance(rule.severity, Severity)
    assert rule.seen_in.startswith("https://")
    assert any(isinstance(example, Passes) for example in rule.examples)
    assert any(isinstance(example, Fails) for example in rule.examples)
    assert "Why it breaks a run" in inspect.cleandoc(rule.__doc__ or "")
    assert type(rule).__name__.lower() == rule.name.replace("-", "")


def test_every_file_could_be_read_and_names_are_used_once():
    assert broken() == {}
    assert len(RULES) > 20
    assert {rule.reads for rule in RULES} == set(KINDS)
    for field in ("code", "name"):
        values = [getattr(rule, field) for rule in RULES]
        assert len(values) == len(set(values))
    codes = [rule.code for rule in rules_for("code")]
    assert codes == sorted(codes)


def test_the_pages_are_up_to_date():
    wanted = {f"{name}.md": markdown(rule) for name, rule in pages().items()}
    wanted["index.md"] = index()
    there = {file.name: file.read_text(encoding="utf-8") for file in DOCS.glob("*.md")}
    stale = [name for name in {*wanted, *there} if wanted.get(name) != there.get(name)]
    assert not stale, f"run make docs-rules: {sorted(stale)}"


class Silent(Rule):
    """Finds nothing."""

    code, name, severity, reads = "SRC999", "silent-rule", Severity.INFO, "code"
    seen_in = "https://example.org"
    examples = (Passes("x = 1\n"), Fails("y = 1\n"))

    def check(self, source):
        return iter(())


class Loud(Silent):
    """Speaks about every first line."""

    examples = (Fails("y = 1\n", line=2), Passes("\n"))

    def check(self, source):
        if source.text.content.strip():
            yield self.finding("here", path=source.text.path, line=1)


class Wrong(Loud):
    """Promises a repair that it does not make."""

    examples = (Passes("\n"), Fails("y = 1\n", line=1, fixed="y = 2\n"))


class OneSided(Loud):
    """Has no near miss."""

    examples = (Fails("y = 1\n"),)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (Silent, "silent-rule is silent about\ny = 1"),
        (Loud(), "speaks about line 1, not 2, of"),
        (Wrong, "makes something else of the text"),
        (OneSided, "has no example of Passes"),
    ],
)
def test_check_rule_notices(rule: type[Rule] | Rule, says: str):
    with pytest.raises(AssertionError, match=says):
        check_rule(rule)
