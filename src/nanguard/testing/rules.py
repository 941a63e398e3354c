"""The examples of a rule as its test."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from nanguard.check.fixing import Repairing
from nanguard.check.rule import Fails, Passes, Rule
from nanguard.check.scan import Scan
from nanguard.source.text import Text

if TYPE_CHECKING:
    from nanguard.findings import Finding

_NAMES = {
    "code": "example.py",
    "config": "example.yaml",
    "data": "example.jsonl",
    "checkpoint": "example.pt",
    "log": "train.log",
}


def check_rule(rule: Rule[Any] | type[Rule[Any]]) -> None:
    """Checks a rule against its own examples.

    Every text of a ``Passes`` has to stay without a finding; every text of a ``Fails`` has to have
    one, on the line it names, and has to become its ``fixed`` once the rule's fixes are applied.

    Args:
        rule: The rule, or its class.

    Raises:
        AssertionError: An example does not hold, or one of both kinds is missing.
    """
    one = rule() if isinstance(rule, type) else rule
    for kind in (Passes, Fails):
        if not any(isinstance(example, kind) for example in one.examples):
            raise AssertionError(f"{one.name} has no example of {kind.__name__}")
    for example in one.examples:
        check_example(one, example)


def check_example(rule: Rule[Any], example: Passes | Fails) -> None:
    """Checks a rule against one example.

    Args:
        rule: The rule.
        example: The example.

    Raises:
        AssertionError: It does not hold.
    """
    name = example.file or _NAMES[rule.reads]
    if rule.reads in ("data", "checkpoint", "log"):
        lines = [finding.line for finding in _scanned(rule, name, example)]
    else:
        lines = [finding.line for finding in _findings(rule, name, example.text)]
    if isinstance(example, Passes):
        if lines:
            raise AssertionError(_told(rule, f"speaks about line {lines[0]} of", example.text))
        return
    if not lines:
        raise AssertionError(_told(rule, "is silent about", example.text))
    if example.line is not None and example.line not in lines:
        said = f"speaks about line {lines[0]}, not {example.line}, of"
        raise AssertionError(_told(rule, said, example.text))
    if example.fixed is not None:
        fixed = _fixed(rule, name, example.text)
        if fixed != example.fixed:
            raise AssertionError(_told(rule, "makes something else of the text:", fixed))


def _findings(rule: Rule[Any], name: str, content: str) -> list[Finding]:
    text = Text(name, content)
    if rule.reads == "code":
        from nanguard.check.code.code import Code

        return list(rule.check(Code.parse(text)))
    from nanguard.check.config.document import read_document
    from nanguard.check.config.run_config import read_project

    return [f for run in read_project([read_document(text)]) for f in rule.check(run)]


def _scanned(rule: Rule[Any], name: str, example: Passes | Fails) -> list[Finding]:
    """Returns what a rule says about an example that has to lie in a folder to be read."""
    reading = import_module(f"nanguard.check.{rule.reads}.{rule.reads}_reader")
    with TemporaryDirectory() as place:
        # Configurations are looked for around data: not among whatever else is temporary.
        folder = Path(place, "project", "data")
        folder.mkdir(parents=True)
        for other, text in example.beside.items():
            (folder / other).write_text(text, encoding="utf-8", newline="")
        if example.made is not None:
            example.made(folder)
        else:
            (folder / name).write_text(example.text, encoding="utf-8", newline="")
        found = [path for path in sorted(folder.iterdir()) if path.name not in example.beside]
        if example.made is None:
            found = [folder / name]
        sources = list(reading.open_sources(found, Scan()))
        return [finding for source in sources for finding in rule.check(source)]


def _fixed(rule: Rule[Any], name: str, content: str) -> str:
    work = Repairing(
        lambda text: _findings(rule, name, text),
        lambda finding: next((fix for fix in finding.fixes if fix.edits), None),
    )
    return work.run(content)


def _told(rule: Rule[Any], what: str, text: str) -> str:
    return f"{rule.name} {what}\n{text}"
