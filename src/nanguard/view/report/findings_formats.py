"""Findings in every format: text for people; JSON, SARIF 2.1.0 and annotations for programs.

Written without rich, which takes longer to import than a small file takes to check.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from nanguard import __version__
from nanguard.findings import Severity
from nanguard.view.report.words import literal, place_in_words, source

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.outcome import FileRepair, NotChecked, Outcome, Seen
    from nanguard.findings import Finding, Fix

_STYLES = {
    "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34",
    "cyan": "36", "title": "1;4", "error": "1;31", "warning": "1;33", "info": "1;34",
}  # fmt: skip
_DIFF = {"+": "green", "-": "red", "@": "cyan"}
# Lines of a diff that are shown; the rest is counted.
_DIFF_LINES = 40
# Files with the same reason that are listed one by one; more of them become one line.
_MOST_ALIKE = 4
_SETTINGS = ("setting", "where", "value", "verdict")
# Rows of the table of settings; beyond that only conflicts are shown.
_MOST_ROWS = 24
# What makes bad numbers, and what only shows them, in this order.
_CAUSES = ("SRC", "CFG", "DAT", "CKP", "LOG")


@dataclass(slots=True)
class Page:
    """The report of a check, as text.

    Attributes:
        outcome: What came of the check.
        colour: Whether to use colour.
        width: How wide the terminal is.
        verbose: Whether to list files that no rule reads as well.
        full: Whether to show fixes and their diffs; else a finding is a line and its place.
    """

    outcome: Outcome
    colour: bool = False
    width: int = 100
    verbose: bool = False
    full: bool = False
    _lines: list[str] = field(default_factory=list)

    def render(self) -> str:
        """Returns the whole report."""
        copies = copies_of(self.outcome)
        hidden = {path for others in copies.values() for path in others}
        found = [s for s in worst_first(self.outcome) if (s.finding.path or "") not in hidden]
        self._lines += self._likely()
        for path, group in groupby(found, key=lambda seen: seen.finding.path or ""):
            also = copies.get(path, ())
            words = f" (and {_many(len(also), 'copy', 'copies')} of it)" if also else ""
            self._lines.append(self._styled(f"{literal(path, 1000)}{words}", "title"))
            for seen in group:
                self._lines += self._finding(seen) if self.full else self._line(seen)
            if not self.full:
                self._lines.append("")
        self._lines += self._alignment()
        for repair in self.outcome.repairs:
            self._lines += self._repair(repair)
        self._lines += self._not_checked()
        self._lines += [f"stale in the baseline: {literal(e, 300)}" for e in self.outcome.stale]
        if self.outcome.stale:
            self._lines.append("")
        self._lines.append(self._styled(summary(self.outcome, verbose=self.verbose), "bold"))
        self._lines += self._hint()
        return "\n".join(self._lines) + "\n"

    def _likely(self) -> Iterator[str]:
        """Yields what is most likely to break the run, where several kinds of files say something.

        Among many findings in code, settings, data, checkpoints and logs that is where to begin.
        """
        first = most_likely(self.outcome)
        if first is None:
            return
        place = f"{literal(first.path or '', 1000)}:{first.line}" if first.line else first.path
        words = f"most likely to break this run: {place}: {literal(first.message, 1000)}"
        yield from (self._styled(line, "bold") for line in self._wrapped(words, 0))
        yield ""

    def _line(self, seen: Seen) -> Iterator[str]:
        """Yields a finding as one line, with its place in the source below."""
        finding = seen.finding
        place = ":".join(str(n) for n in (finding.line, finding.column) if n is not None)
        head = self._styled(finding.severity.value, finding.severity.value)
        name = self._styled(literal(finding.name), "bold")
        words = place_in_words(finding)
        where = f" ({literal(words)})" if words and (finding.step is not None or not place) else ""
        message = literal(finding.message, 1000)
        yield f"  {place + '  ' if place else ''}{head}  {name}: {message}{where}"
        if seen.text.strip() and finding.line is not None:
            yield from self._source(seen)

    def _finding(self, seen: Seen) -> Iterator[str]:
        finding = seen.finding
        place = ":".join(str(n) for n in (finding.line, finding.column) if n is not None)
        head = self._styled(finding.severity.value, finding.severity.value)
        name = self._styled(f"{literal(finding.name)} [{literal(finding.code)}]", "bold")
        where = f"  ({literal(place_in_words(finding))})" if place_in_words(finding) else ""
        yield f"  {place + '  ' if place else ''}{head}  {name}{self._styled(where, 'dim')}"
        yield from self._wrapped(literal(finding.message, 1000), 4)
        if seen.text.strip() and finding.line is not None:
            yield from self._source(seen)
        for number, fix in enumerate(finding.fixes):
            diff = seen.diffs[number] if number < len(seen.diffs) else ""
            yield from self._fix(fix, diff if number == 0 else "")
        yield ""

    def _source(self, seen: Seen) -> Iterator[str]:
        """Yields the line of source with a mark below the column."""
        finding, text = seen.finding, seen.text
        indent = len(text) - len(text.lstrip())
        number = f"{finding.line}"
        room = max(30, self.width - len(number) - 9)
        column = finding.column
        at = None if column is None else len(source(f"{text[indent : column - 1]}.")) - 1
        shown = source(text[indent:])
        cut = 0 if at is None or at < room else at - room // 2
        line = ("..." if cut else "") + shown[cut : cut + room]
        yield f"    {self._styled(f'{number} |', 'dim')} {line}"
        if at is not None:
            blank = " " * (at - cut + (3 if cut else 0))
            bar = self._styled(" " * len(number) + " |", "dim")
            yield f"    {bar} {blank}{self._styled('^', finding.severity.value)}"

    def _fix(self, fix: Fix, diff: str) -> Iterator[str]:
        kind = "safe fix" if fix.safe else "fix"
        first, *more = self._wrapped(f"{kind}: {literal(fix.title, 500)}", 4)
        yield self._styled(first, "green" if fix.safe else "cyan")
        yield from more
        for step, words in enumerate(fix.plan, start=1):
            yield from self._wrapped(f"{step}. {literal(words, 500)}", 6)
        yield from self._diff(diff, 6)

    def _diff(self, diff: str, indent: int) -> Iterator[str]:
        lines = [line for line in diff.split("\n") if line][2:]
        for line in lines[:_DIFF_LINES]:
            yield f"{' ' * indent}{self._styled(source(line), _DIFF.get(line[:1], ''))}"
        if len(lines) > _DIFF_LINES:
            yield f"{' ' * indent}... and {len(lines) - _DIFF_LINES} more lines"

    def _repair(self, repair: FileRepair) -> Iterator[str]:
        done = "repaired" if repair.written else "would be repaired"
        same = repair.path == repair.target
        into = "" if same else f" -> {literal(repair.target, 1000)}"
        yield self._styled(f"{literal(repair.path, 1000)}{into} ({done})", "title")
        for change in repair.changes:
            line = f"{change.finding.line}: " if change.finding.line else ""
            why = f"{line}{change.finding.name}: {literal(change.finding.message, 500)}"
            yield from self._wrapped(why, 2)
            yield from self._wrapped(f"-> {literal(change.fix.title, 500)}", 4)
            for step, words in enumerate(change.fix.plan, start=1):
                yield from self._wrapped(f"{step}. {literal(words, 500)}", 7)
        yield from (self._styled(source(line), _DIFF.get(line[:1], "")) for line in _body(repair))
        if repair.loaded_with:
            yield f"loaded with {repair.loaded_with}: nothing else differs from the original"
        if repair.unverified:
            yield from self._wrapped(f"not verified: {literal(repair.unverified, 500)}", 0)
        yield ""

    def _alignment(self) -> Iterator[str]:
        """Yields the table of settings that have to agree; of many, those that do not."""
        shown = self._to_compare()
        if not shown:
            return
        left = len(shown) - _MOST_ROWS
        if left > 0 and not self.verbose:
            shown = [row for row in shown if row.get("verdict") == "conflicts"][:_MOST_ROWS]
            left = len(self.outcome.alignment) - len(shown)
            if not shown:
                yield f"alignment of settings: {left} places, no conflict\n"
                return
        rows = [[literal(str(row.get(key) or "")) for key in _SETTINGS] for row in shown]
        table = [[*_SETTINGS], *rows]
        widths = [max(len(row[column]) for row in table) for column in range(len(_SETTINGS))]
        yield self._styled("alignment of settings", "title")
        for row in table:
            line = "  ".join(cell.ljust(wide) for cell, wide in zip(row, widths, strict=True))
            style = "red" if row[-1] == "conflicts" else "dim" if row is table[0] else ""
            yield f"  {self._styled(line.rstrip(), style)}"
        if left > 0 and not self.verbose:
            yield f"  ... and {left} more places (-v lists them)"
        yield ""

    def _to_compare(self) -> list[dict[str, Any]]:
        """Returns the rows of the alignment, if there is anything to compare in them.

        After a repair they would be those of the files before it.
        """
        rows = [] if self.outcome.repairs else self.outcome.alignment
        alone = all(row.get("verdict") == "set once" for row in rows)
        return rows if self.verbose or not alone else []

    def _not_checked(self) -> Iterator[str]:
        """Yields what was not checked; many files with one reason share a line."""
        entries = [e for e in self.outcome.not_checked if self.verbose or not e.expected]
        if not entries:
            return
        counts = Counter(entry.reason for entry in entries)
        reasons: set[str] = set()
        yield self._styled("not checked", "title")
        for entry in entries:
            if counts[entry.reason] <= _MOST_ALIKE:
                yield from self._wrapped(_one(entry), 2)
            elif entry.reason not in reasons:
                reasons.add(entry.reason)
                yield from self._wrapped(f"{counts[entry.reason]} files: {entry.reason}", 2)
        yield ""

    def _hint(self) -> Iterator[str]:
        if self.outcome.repairs:
            return
        fixable = [seen.finding for seen in self.outcome.seen if any(seen.diffs)]
        safe = [f for f in fixable if _is_applied(f)]
        if safe:
            yield f"{len(safe)} can be repaired: nanguard check --fix (--diff shows it first)."
        if len(safe) < len(fixable):
            count = len(fixable) - len(safe)
            yield f"{count} can be repaired with --fix --unsafe, which changes what code computes."
        if not self.full and any(seen.finding.fixes for seen in self.outcome.seen):
            yield "--format full shows fixes and diffs; nanguard explain NAME says why."

    def _wrapped(self, text: str, indent: int) -> list[str]:
        pad = " " * indent
        width = max(40, min(self.width, 120))
        return textwrap.wrap(
            text, width, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False
        ) or [pad]

    def _styled(self, text: str, style: str) -> str:
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self.colour and style and text else text


def brief(outcome: Outcome) -> str:
    """Returns one line for each finding, and nothing else."""
    lines = []
    for seen in worst_first(outcome):
        f = seen.finding
        place = ":".join(str(part) for part in (f.path, f.line, f.column) if part is not None)
        words = place_in_words(f)
        where = f" ({literal(words)})" if words else ""
        message = f"{f.severity.value}: {literal(f.message, 1000)}{where} [{f.name}]"
        lines.append(f"{literal(place, 1000)}: {message}\n")
    return "".join(lines)


def worst_first(outcome: Outcome) -> list[Seen]:
    """Returns what was found, errors first, and as it stands in the files among equals."""
    return sorted(outcome.seen, key=lambda seen: -seen.finding.severity.rank)


def copies_of(outcome: Outcome) -> dict[str, list[str]]:
    """Returns, for each file with copies, the copies: same name, same findings, same lines."""
    found: dict[str, list[tuple[Any, ...]]] = {}
    for seen in outcome.seen:
        f = seen.finding
        about = (f.name, f.line, f.column, f.message, seen.text)
        found.setdefault(f.path or "", []).append(about)
    alike: dict[tuple[Any, ...], list[str]] = {}
    for path, said in found.items():
        alike.setdefault((path.rpartition("/")[2], *said), []).append(path)
    groups = (sorted(paths, key=lambda path: (len(path), path)) for paths in alike.values())
    return {first: others for first, *others in groups if others and first}


def most_likely(outcome: Outcome) -> Finding | None:
    """Returns what a user should look at first; None unless several kinds of files were judged.

    That is what makes bad numbers, not what shows them: code and settings before data, data
    before checkpoints and logs.
    """
    bad = [s.finding for s in outcome.seen if s.finding.severity is not Severity.INFO]
    if len({finding.code[:3] for finding in bad} & set(_CAUSES)) < 2:
        return None
    causes = [finding for finding in bad if finding.code[:3] in _CAUSES]
    return min(causes, key=lambda f: (-f.severity.rank, _CAUSES.index(f.code[:3])))


def statistics(outcome: Outcome) -> str:
    """Returns how often each rule has spoken, the worst and most frequent first."""
    counts = Counter((s.finding.severity, s.finding.code, s.finding.name) for s in outcome.seen)
    ordered = sorted(counts.items(), key=lambda item: (-item[0][0].rank, -item[1], item[0][1]))
    lines = [
        f"{count:>6}  {severity.value:<7}  {code}  {literal(name)}\n"
        for (severity, code, name), count in ordered
    ]
    return "".join(lines) + summary(outcome) + "\n"


def summary(outcome: Outcome, *, verbose: bool = False) -> str:
    """Returns the line that ends a report.

    Args:
        outcome: What came of the check.
        verbose: Whether files of kinds without rules are worth a word.
    """
    counts = Counter(seen.finding.severity for seen in outcome.seen)
    kinds = [_many(counts[s], s.value) for s in reversed(list(Severity)) if counts[s]]
    kinds.sort(key=lambda words: ("error" not in words, "warning" not in words))
    found = ", ".join(kinds).replace("infos", "remarks").replace("info", "remark")
    checked = _many(len(outcome.checked), "file")
    parts = [f"{found or 'no findings'} in {checked}"]
    missed = [entry for entry in outcome.not_checked if verbose or not entry.expected]
    if missed:
        parts.append(f"{_many(len(missed), 'entry', 'entries')} not checked")
    if outcome.suppressed:
        parts.append(f"{outcome.suppressed} allowed by comments")
    if outcome.known:
        parts.append(f"{outcome.known} known from the baseline")
    return f"{'; '.join(parts)} ({outcome.seconds:.1f} s)"


def _is_applied(finding: Finding) -> bool:
    """Returns whether ``--fix`` alone repairs a finding: values of configurations, in a copy."""
    python = (finding.path or "").endswith((".py", ".ipynb"))
    if python:
        return any(fix.safe for fix in finding.fixes)
    return any(not fix.keys for fix in finding.fixes)


def _many(count: int, word: str, words: str | None = None) -> str:
    return f"{count} {word if count == 1 else words or word + 's'}"


def _one(entry: NotChecked) -> str:
    return f"{literal(entry.path, 1000)}: {literal(entry.reason, 500)}"


def _body(repair: FileRepair) -> list[str]:
    return repair.diff.rstrip("\n").split("\n")


SCHEMA = "nanguard.report/1"
SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_SARIF_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}
_GITHUB_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "notice"}


def as_json(outcome: Outcome) -> str:
    """Returns an outcome as JSON; fields are added over time, never renamed."""
    # Whatever a file holds, a reader gets ASCII: lone surrogates cannot be printed otherwise.
    return json.dumps(_fields(outcome), indent=1) + "\n"


def as_line(outcome: Outcome) -> str:
    """Returns the same in one line, without its end."""
    return json.dumps(_fields(outcome))


def _fields(outcome: Outcome) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "schema": SCHEMA,
        "findings": [seen.to_json() for seen in outcome.seen],
        "checked": outcome.checked,
        "not_checked": [entry.to_json() for entry in outcome.not_checked],
        "alignment": outcome.alignment,
        "suppressed": outcome.suppressed,
    }
    if outcome.repairs:
        fields["repairs"] = [repair.to_json() for repair in outcome.repairs]
    if outcome.known or outcome.stale:
        fields["baseline"] = {"known": outcome.known, "stale": outcome.stale}
    return fields


def as_sarif(outcome: Outcome, pages: dict[str, str]) -> str:
    """Returns an outcome as a SARIF log.

    Args:
        outcome: What came of the check.
        pages: For the code of a rule, what it stands for, in a sentence.
    """
    findings = [seen.finding for seen in outcome.seen]
    rules = {finding.code: finding for finding in findings}
    order = {code: index for index, code in enumerate(sorted(rules))}
    run = {
        "tool": {
            "driver": {
                "name": "nanguard",
                "semanticVersion": __version__,
                "rules": [_rule(rules[code], pages.get(code, "")) for code in sorted(rules)],
            }
        },
        "columnKind": "unicodeCodePoints",
        "results": [_result(seen, order) for seen in outcome.seen],
        "invocations": [
            {
                "executionSuccessful": True,
                "toolExecutionNotifications": [
                    _notification(entry.path, entry.reason) for entry in outcome.not_checked
                ],
            }
        ],
    }
    log = {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=1) + "\n"


def _rule(finding: Finding, about: str) -> dict[str, Any]:
    text = about or finding.name.replace("-", " ")
    return {
        "id": finding.code,
        "name": finding.name,
        "shortDescription": {"text": text},
        "help": {"text": f"nanguard explain {finding.name}"},
        "defaultConfiguration": {"level": _SARIF_LEVELS[finding.severity]},
    }


def _result(seen: Seen, order: dict[str, int]) -> dict[str, Any]:
    finding = seen.finding
    result: dict[str, Any] = {
        "ruleId": finding.code,
        "ruleIndex": order[finding.code],
        "level": _SARIF_LEVELS[finding.severity],
        "message": {"text": _message(finding)},
        "locations": _locations(seen),
    }
    if finding.path:
        about = " ".join((seen.text or finding.where or "").split())[:200]
        stable = f"{finding.name}:{finding.path}:{about}"
        result["partialFingerprints"] = {"nanguard/v1": stable}
    if finding.step is not None:
        result["properties"] = {"step": finding.step}
    return result


def _message(finding: Finding) -> str:
    words = place_in_words(finding)
    where = f" [{words}]" if words else ""
    fixes = "".join(f"\nFix: {fix.title}" for fix in finding.fixes[:3])
    return f"{finding.message}{where}{fixes}"


def _locations(seen: Seen) -> list[dict[str, Any]]:
    finding = seen.finding
    if not finding.path:
        return []
    place: dict[str, Any] = {"artifactLocation": {"uri": _uri(finding.path)}}
    if finding.line is not None:
        region: dict[str, Any] = {"startLine": max(1, finding.line)}
        if finding.column is not None:
            region["startColumn"] = max(1, finding.column)
        if seen.text:
            region["snippet"] = {"text": seen.text}
        place["region"] = region
    location: dict[str, Any] = {"physicalLocation": place}
    if finding.where and finding.line is None:
        location["logicalLocations"] = [{"fullyQualifiedName": finding.where}]
    return [location]


def _notification(path: str, reason: str) -> dict[str, Any]:
    place = {"physicalLocation": {"artifactLocation": {"uri": _uri(path)}}}
    return {
        "level": "note",
        "message": {"text": f"not checked: {path}: {reason}"},
        "locations": [place],
    }


def _uri(path: str) -> str:
    """Returns a path as SARIF wants it: relative where it is, and escaped."""
    if "://" in path:
        scheme, _, rest = path.partition("://")
        return f"{scheme}://{quote(rest)}"
    slashed = path.replace(os.sep, "/")
    escaped = quote(slashed.encode("utf-8", "surrogateescape"))
    return f"file://{escaped}" if slashed.startswith("/") else escaped


def as_github(outcome: Outcome) -> str:
    """Returns the annotations, and a notice for each file that was not checked."""
    lines = []
    for seen in outcome.seen:
        finding = seen.finding
        place = {
            "file": finding.path,
            "line": finding.line,
            "col": finding.column,
            "title": f"{finding.name} ({finding.code})",
        }
        where = place_in_words(finding)
        message = f"{finding.message} ({where})" if where else finding.message
        if finding.fixes:
            message += f"\nFix: {finding.fixes[0].title}"
        lines.append(_command(_GITHUB_LEVELS[finding.severity], place, message))
    for entry in outcome.not_checked:
        place = {"file": entry.path, "line": None, "title": "not checked"}
        lines.append(_command("notice", place, entry.reason))
    return "".join(f"{line}\n" for line in lines)


def _command(level: str, place: dict[str, str | int | None], message: str) -> str:
    properties = ",".join(
        f"{key}={_value(value)}" for key, value in place.items() if value is not None
    )
    lines = [_text(literal(line, 1000)) for line in message.split("\n")]
    return f"::{level} {properties}::{'%0A'.join(lines)}"


def _text(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _value(value: str | int) -> str:
    shown = literal(str(value), 1000)
    return _text(shown).replace(":", "%3A").replace(",", "%2C")
