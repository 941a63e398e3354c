"""Fixes as changes of a text: which go together, what comes out, and the diff of it."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from nanguard.findings import Edit, Fix
    from nanguard.source.text import Text

_LINES_AROUND = 3
_HUNK = re.compile(r"^@@ -(\d+)(,\d+)? \+(\d+)(,\d+)? @@")
_NO_END = "\n\\ No newline at end of file\n"


def apply(content: str, edits: Iterable[Edit]) -> str:
    """Returns a text with edits applied, of which no two overlap.

    Lines that are added end as the other lines of the text do.
    """
    windows = "\r\n" in content
    out, at = [], 0
    for edit in sorted(set(edits), key=lambda e: (e.start, e.end)):
        text = re.sub("\r?\n", "\r\n", edit.text) if windows else edit.text
        out += [content[at : edit.start], text]
        at = edit.end
    return "".join(out) + content[at:]


def fits(edits: Sequence[Edit], content: str) -> bool:
    """Returns whether edits lie within a text and apart from each other."""
    if not edits or not all(0 <= e.start <= e.end <= len(content) for e in edits):
        return False
    ordered = sorted(set(edits), key=lambda e: (e.start, e.end))
    return not any(_clash(a, b) for a, b in pairwise(ordered))


def together(fixes: Iterable[Fix], content: str) -> list[Fix]:
    """Returns those fixes that can be applied at once; the first of two that clash wins."""
    taken: set[Edit] = set()
    chosen = []
    for fix in fixes:
        if not fits(fix.edits, content):
            continue
        if any(_clash(new, old) for new in fix.edits for old in taken if new != old):
            continue
        taken.update(fix.edits)
        chosen.append(fix)
    return chosen


def diff_of(label: str, text: Text, edits: Sequence[Edit]) -> str:
    """Returns what edits change as a unified diff; empty if they do not fit the text.

    Only the surroundings of the edits are compared, so that a long file costs no more.
    """
    if not fits(edits, text.content):
        return ""
    out, moved = [], 0
    for first, last, group in _windows(text, edits):
        start = text.starts[first - 1]
        end = text.starts[last] if last < len(text.starts) else len(text.content)
        old = text.content[start:end]
        shifted = [type(e)(e.start - start, e.end - start, e.text) for e in group]
        new = apply(old, shifted)
        out += _hunks(old, new, first - 1, moved)
        moved += new.count("\n") - old.count("\n")
    return f"--- {label}\n+++ {label}\n{''.join(out)}" if out else ""


def whole_diff(before: str, after: str, old: str, new: str, *, around: int = _LINES_AROUND) -> str:
    """Returns the unified diff of two texts.

    Args:
        before: The name of the first.
        after: The name of the second.
        old: The first text.
        new: The second text.
        around: How many lines are shown above and below a change.
    """
    hunks = "".join(_hunks(old, new, 0, 0, around))
    return f"--- {before}\n+++ {after}\n{hunks}" if hunks else ""


def _clash(a: Edit, b: Edit) -> bool:
    if a.start == b.start:
        return True
    return a.start < b.end and b.start < a.end


def _windows(text: Text, edits: Sequence[Edit]) -> list[tuple[int, int, list[Edit]]]:
    windows: list[tuple[int, int, list[Edit]]] = []
    for edit in sorted(set(edits), key=lambda e: (e.start, e.end)):
        first = max(1, text.position(edit.start)[0] - _LINES_AROUND)
        last = min(len(text.starts), text.position(edit.end)[0] + _LINES_AROUND)
        if windows and first <= windows[-1][1]:
            before = windows.pop()
            windows.append((before[0], max(last, before[1]), [*before[2], edit]))
        else:
            windows.append((first, last, [edit]))
    return windows


def _hunks(old: str, new: str, above: int, moved: int, around: int = _LINES_AROUND) -> list[str]:
    """Returns the hunks of a diff, with line numbers of the whole file.

    Args:
        old: Part of the file before.
        new: The same part after.
        above: How many lines of the file before lie above it.
        moved: How many lines the changes above have added.
        around: How many lines are shown above and below a change.
    """
    import difflib

    lines = difflib.unified_diff(_lines(old), _lines(new), n=around)
    out = []
    for line in list(lines)[2:]:
        head = _HUNK.match(line)
        if head:
            a, b = int(head.group(1)) + above, int(head.group(3)) + above + moved
            line = f"@@ -{a}{head.group(2) or ''} +{b}{head.group(4) or ''} @@\n"
        out.append(line if line.endswith("\n") else line + _NO_END)
    return out


def _lines(content: str) -> list[str]:
    parts = content.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])
