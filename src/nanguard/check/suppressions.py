"""Comments that allow a finding: ``# nanguard: ignore[name] reason``.

A comment counts for the statement it stands in, or, on a line of its own, for the statement below.
``# nanguard: ignore-file[name] reason`` counts for the whole file.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.check.rule import Fails, Passes
from nanguard.check.selection import UNUSED_IGNORE, Selection, stands_for
from nanguard.findings import Finding, Severity

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nanguard.source.text import Text

_MARK = "nanguard:"


class UnusedIgnore:
    """A comment allows a finding that is not there.

    Why it breaks a run: it does not, yet. A comment that allows nothing today hides the fault that
    somebody writes into that line tomorrow. The same holds for a comment whose rule is misspelt.

    Remove the comment, or the name that is not needed any more.
    """

    code, name = UNUSED_IGNORE
    severity = Severity.INFO
    reads = "code"
    seen_in = ""
    examples = (
        Fails("loss = total / 8  # nanguard: ignore[unguarded-log] at least one sample\n"),
        Passes("loss = total / 8  # at least one sample\n"),
    )


_COMMENT = re.compile(r"#\s*nanguard:\s*(ignore-file|ignore)\b\s*(?:\[([^\]]*)\])?")
_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'")
_BLOCK = re.compile(r"(?:^|[\s:-])[|>][+-]?\d?[+-]?\s*(?:#.*)?$")
_EVERYWHERE = (1, 1 << 60)


@dataclass(slots=True)
class Ignore:
    """One comment.

    Attributes:
        line: Where it stands, counted from 1.
        column: The column it begins at, counted from 1.
        words: What it names.
        first: The first line it counts for.
        last: The last line it counts for.
        used: The words that allowed something.
    """

    line: int
    column: int
    words: tuple[str, ...]
    first: int
    last: int
    used: set[str] = field(default_factory=set)

    def allows(self, finding: Finding) -> bool:
        """Returns whether it allows a finding; remembers it if so."""
        if (self.first, self.last) != _EVERYWHERE and (
            finding.line is None or not self.first <= finding.line <= self.last
        ):
            return False
        words = [w for w in self.words if stands_for(w, finding.code, finding.name)]
        self.used.update(words)
        return bool(words)


def ignores_in(text: Text, *, python: bool) -> list[Ignore]:
    """Returns the comments of a text that allow something.

    Args:
        text: The text.
        python: Whether it is Python; YAML and TOML otherwise.
    """
    if _MARK not in text.content:
        return []
    return list(_python(text) if python else _config(text))


def suppress(findings: Iterable[Finding], ignores: list[Ignore]) -> tuple[list[Finding], int]:
    """Returns the findings that nothing allows, and how many are allowed."""
    kept, allowed = [], 0
    for finding in findings:
        # Every comment is asked, so that none of two counts as unused.
        asked = [ignore.allows(finding) for ignore in ignores]
        if any(asked):
            allowed += 1
        else:
            kept.append(finding)
    return kept, allowed


def unused(
    path: str, ignores: list[Ignore], known: dict[str, str], ran: set[str], selection: Selection
) -> Iterator[Finding]:
    """Yields a finding for every comment that allows nothing.

    Args:
        path: The file.
        ignores: Its comments, after its findings have been compared with them.
        known: The code of every rule there is, by name.
        ran: The names of the rules that looked at the file.
        selection: The rules of the check.
    """
    code, name = UNUSED_IGNORE
    if not selection.wants(code, name) or not selection.applies(code, name, path):
        return
    for ignore in ignores:
        for message in _complaints(ignore, known, ran):
            yield Finding(code, name, Severity.INFO, message, path, ignore.line, ignore.column)


def _complaints(ignore: Ignore, known: dict[str, str], ran: set[str]) -> Iterator[str]:
    if not ignore.words:
        yield "the comment names no rule, so it allows nothing; write # nanguard: ignore[name]"
    for word in ignore.words:
        named = {name for name, code in known.items() if stands_for(word, code, name)}
        if not named:
            yield f"{word!r} is no rule, so the comment allows nothing"
        elif word not in ignore.used and named <= ran:
            yield f"{word} finds nothing here any more; remove it from the comment"


def _ignore(found: re.Match[str], line: int, column: int, first: int, last: int) -> Ignore:
    words = tuple(word.strip() for word in (found.group(2) or "").split(",") if word.strip())
    if found.group(1) == "ignore-file":
        first, last = _EVERYWHERE
    return Ignore(line, column, words, first, last)


def _python(text: Text) -> Iterator[Ignore]:
    """Yields the comments of Python code; each counts for its logical line."""
    import tokenize

    waiting: list[tuple[re.Match[str], int, int]] = []
    first = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(text.content).readline):
            if token.type == tokenize.COMMENT:
                found = _COMMENT.search(token.string)
                if found:
                    waiting.append((found, token.start[0], token.start[1] + 1))
            elif token.type == tokenize.NEWLINE:
                for found, line, column in waiting:
                    yield _ignore(found, line, column, min(first, line), token.end[0])
                waiting, first = [], 0
            elif token.type not in (tokenize.NL, tokenize.INDENT, tokenize.DEDENT) and not first:
                first = token.start[0]
    except (tokenize.TokenError, SyntaxError):  # what was read until here still counts
        pass
    for found, line, column in waiting:
        yield _ignore(found, line, column, line, line)


def _config(text: Text) -> Iterator[Ignore]:
    """Yields the comments of YAML or TOML; each counts for its line, or the next one."""
    waiting: list[tuple[re.Match[str], int, int]] = []
    deeper: int | None = None
    for number in range(1, len(text.starts) + 1):
        line = text.line(number)
        indent = len(line) - len(line.lstrip())
        if deeper is not None and (not line.strip() or indent > deeper):
            continue
        deeper = indent if _BLOCK.search(line) and not line.lstrip().startswith("#") else None
        blanked = _QUOTED.sub(lambda m: "x" * len(m.group()), line)
        found = _COMMENT.search(blanked)
        if found and (found.start() == 0 or blanked[found.start() - 1].isspace()):
            waiting.append((found, number, found.start() + 1))
        if line.strip() and not line.lstrip().startswith("#"):
            for match, at, column in waiting:
                yield _ignore(match, at, column, at, number)
            waiting = []
    for match, at, column in waiting:
        yield _ignore(match, at, column, at, at)
