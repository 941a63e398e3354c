"""Fixes as changes of a text: which go together, what comes out, and the diff of it.

In Python they are found in the syntax tree and made in the text.
"""

from __future__ import annotations

import ast
import io
import os
import re
import tokenize
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from nanguard.findings import Edit, Fix
    from nanguard.source.text import Text

_LINES_AROUND = 3
_HUNK = re.compile(r"^@@ -(\d+)(,\d+)? \+(\d+)(,\d+)? @@")
_NO_END = "\n\\ No newline at end of file\n"
# What computes something: ``x /= n`` does, too.
Expression: TypeAlias = ast.expr | ast.AugAssign
_Node = TypeVar("_Node", bound=ast.AST)
_SOURCE_BYTES = 4 << 20
# Lines as Python counts them: a form feed, U+2028 and the like end none.
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_DIVIDING = ("div", "div_", "divide", "divide_", "true_divide", "true_divide_")
_BYTE_ORDER_MARK = "\ufeff"
# Lines above and below a change in the diff of an incident.
_DIFF_LINES = 2

# A parenthesis that groups, and does not call.
_GROUP = re.compile(rb"(?:^|[-=+*/%@,(\[{:<>&|^~]|\breturn|\byield|\bin|\bnot|\band|\bor)\s*\($")


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


class Spot(Protocol):
    """A place in a file: a line, and where in it something stands, if that is known."""

    @property
    def line(self) -> int:
        """The line, counted from 1."""

    @property
    def span(self) -> tuple[int, int, int, int] | None:
        """As ``span_of`` says it."""


def _decoded(data: bytes) -> tuple[str, str]:
    """Returns a file's byte order mark, if it has one, and its text, as Python reads it."""
    encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    text = data.decode(encoding)
    return (_BYTE_ORDER_MARK if encoding == "utf-8-sig" else ""), text


class SourceFile:
    """A file of the user's, parsed."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._mark, self.text = _decoded(Path(path).read_bytes())
        self.tree = ast.parse(self.text)
        self._lines = _LINE.findall(self.text.encode())
        self._newline = "\r\n" if "\r\n" in self.text else "\n"

    @classmethod
    def open(cls, path: str) -> SourceFile | None:
        """Returns a file; None if it cannot be read as Python."""
        try:
            if Path(path).stat().st_size > _SOURCE_BYTES:
                return None
            return cls(path)
        except (OSError, ValueError, SyntaxError, RecursionError):
            return None

    def text_of(self, node: ast.AST) -> str:
        """Returns the text of a node."""
        return ast.get_source_segment(self.text, node) or ""

    def node_at(self, site: Spot, accept: Callable[[ast.AST], bool]) -> Expression | None:
        """Returns the expression at a place: exactly there, or else the first on that line."""
        found: list[Expression] = []
        for node in ast.walk(self.tree):
            if not isinstance(node, (ast.expr, ast.AugAssign)) or not accept(node):
                continue
            if site.span is not None and span_of(node) == site.span:
                return node
            if node.lineno <= site.line <= (node.end_lineno or node.lineno):
                found.append(node)
        if site.span is not None:
            inside = [node for node in found if _within(span_of(node), site.span)]
            found = inside or found
        return min(found, key=_length) if found else None

    def scope_of(self, line: int) -> ast.AST:
        """Returns the innermost function around a line, or the whole file."""
        around = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            and node.lineno <= line <= (node.end_lineno or 0)
        ]
        return max(around, key=lambda node: node.lineno, default=self.tree)

    def nodes_on(self, line: int, kind: type[_Node]) -> list[_Node]:
        """Returns the nodes of a kind that begin on a line."""
        return [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, kind) and getattr(node, "lineno", None) == line
        ]

    def replaced(self, changes: list[tuple[ast.AST, str]]) -> str:
        """Returns the text with some nodes replaced."""
        lines = list(self._lines)
        for node, new in sorted(changes, key=lambda change: _start(change[0]), reverse=True):
            line, end_line, column, end_column = span_of(node)
            before = lines[line - 1][:column]
            after = lines[end_line - 1][end_column:]
            if _GROUP.search(before) and after.startswith(b").") and is_chain(new):
                before, after = (
                    before[:-1],
                    after[1:],
                )  # (a + b).sum(): what is put there needs none
            lines[line - 1 : end_line] = [before + new.encode() + after]
        return b"".join(lines).decode()

    def inserted_after(self, line: int, new: str, called: str = "") -> str:
        """Returns the text with a line added after the statement on a line, indented like it.

        Args:
            line: The line.
            new: The statement to add.
            called: What the statement calls, where several stand on one line.
        """
        statement = self._statement_on(line, called)
        lines, newline = list(self._lines), self._newline.encode()
        if statement is None:
            start, end, column = line, line, len(lines[line - 1])
        else:
            start, end, _, column = span_of(statement)
        indent = re.match(rb"\s*", lines[start - 1])
        margin = indent.group() if indent else b""
        before, after = lines[end - 1][:column], lines[end - 1][column:]
        following = re.match(rb"\s*;\s*(?=[^\s#])", after)
        if self._shares_line_with_header(start):
            lines[end - 1] = before + b"; " + new.encode() + after
        elif following is None:
            if not lines[end - 1].endswith((b"\n", b"\r")):
                lines[end - 1] += newline
            lines.insert(end, margin + new.encode() + newline)
        else:
            rest = after[following.end() :]
            lines[end - 1] = before + newline + margin + new.encode() + newline + margin + rest
        return b"".join(lines).decode()

    def _statement_on(self, line: int, called: str) -> ast.stmt | None:
        """Returns the statement on a line that calls something, or else the first one there."""
        found = [
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.stmt)
            and node.lineno <= line <= (node.end_lineno or 0)
            and not hasattr(node, "body")
        ]
        calling = [n for n in found if any(called_name(inner) == called for inner in ast.walk(n))]
        return next(iter(calling if called and calling else found), None)

    def _shares_line_with_header(self, line: int) -> bool:
        """Returns whether a statement stands on the line of its ``if`` or ``for``."""
        for node in ast.walk(self.tree):
            blocks = [getattr(node, name, None) for name in ("body", "orelse", "finalbody")]
            for block in blocks:
                if not isinstance(block, list) or not block or block[0].lineno != line:
                    continue
                if self._lines[line - 1][: block[0].col_offset].strip():
                    return True
        return False

    def diff(self, new: str) -> str:
        """Returns the change as a unified diff, which ``git apply`` takes.

        The file is named by its path; ``addressed`` names it as a reader would.
        """
        names = f"a/{self.path}", f"b/{self.path}"
        return whole_diff(*names, self._mark + self.text, self._mark + new, around=_DIFF_LINES)


def addressed(diff: str, folder: str) -> str:
    """Returns a diff that names its file as seen from a folder, if it lies there.

    Args:
        diff: A diff whose file is named by its path.
        folder: The folder that the command ran in.
    """
    old, new, rest = diff.split("\n", 2)
    named = [f"{line[:6]}{name_from(line[6:], folder)}" for line in (old, new)]
    return "\n".join([*named, rest])


def changed_file(diff: str) -> str:
    """Returns the path of the file that a diff changes, as ``SourceFile.diff`` has named it."""
    return diff.split("\n", 1)[0].removeprefix("--- a/")


def name_from(path: str, folder: str) -> str:
    """Returns a file's path from a folder; all of it, if the file lies elsewhere."""
    real, base = os.path.realpath(Path(folder, path)), os.path.realpath(folder)
    inside = real.startswith(base.rstrip(os.sep) + os.sep)
    name = os.path.relpath(real, base) if inside else str(Path(path).absolute()).lstrip(os.sep)
    return name.replace(os.sep, "/")


def called_name(node: ast.AST) -> str:
    """Returns the last part of what is called: ``log`` for ``torch.log(x)`` and ``x.log()``."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def divides(node: ast.AST) -> bool:
    """Returns whether something is divided: ``a / b``, ``a /= b``, ``a.div(b)``."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return isinstance(node.op, ast.Div)
    return called_name(node) in _DIVIDING


def is_quotient(node: ast.AST) -> bool:
    """Returns whether something is divided, or raised to a power that may be negative."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        return isinstance(node.right, ast.UnaryOp)
    if isinstance(node, ast.Call) and called_name(node) == "pow":
        return not (node.args and isinstance(node.args[-1], ast.Constant))
    return divides(node) or called_name(node) in ("reciprocal", "rsqrt")


def divisor_of(node: ast.AST | None) -> ast.expr | None:
    """Returns what is divided by; of a power or a function, its base."""
    if isinstance(node, ast.AugAssign):
        return node.value
    if isinstance(node, ast.BinOp):
        return node.right if isinstance(node.op, ast.Div) else node.left
    if isinstance(node, ast.Call):
        if called_name(node) in _DIVIDING:
            rest = node.args[-1:] or [k.value for k in node.keywords if k.arg == "other"]
            return rest[0] if rest else None
        return argument(node)
    return None


def is_power(node: ast.AST) -> bool:
    """Returns whether something is raised to a power: ``a ** b``, ``a.pow(b)``."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Pow)
    return called_name(node) in ("pow", "pow_")


def is_function_of(module: ast.AST) -> bool:
    """Returns whether an expression names a module such as ``torch`` or ``F``."""
    known = {"torch", "F", "np", "math", "nn", "functional", "special", "linalg"}
    return (isinstance(module, ast.Name) and module.id in known) or (
        isinstance(module, ast.Attribute) and module.attr in known
    )


def argument(call: ast.Call) -> ast.expr | None:
    """Returns the tensor a call is about: its receiver or its first argument."""
    if isinstance(call.func, ast.Attribute) and not is_function_of(call.func.value):
        return call.func.value
    return call.args[0] if call.args else None


def span_of(node: ast.AST) -> tuple[int, int, int, int]:
    """Returns where a node lies, as (line, end line, column, end column)."""
    return (
        getattr(node, "lineno", 0),
        getattr(node, "end_lineno", 0) or 0,
        getattr(node, "col_offset", 0),
        getattr(node, "end_col_offset", 0) or 0,
    )


def is_chain(text: str) -> bool:
    """Returns whether attributes can be taken of an expression as it is written."""
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError):
        return False
    return isinstance(node, (ast.Call, ast.Attribute, ast.Name, ast.Subscript))


def _start(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def _within(inner: tuple[int, int, int, int], outer: tuple[int, int, int, int]) -> bool:
    return (outer[0], outer[2]) <= (inner[0], inner[2]) and (inner[1], inner[3]) <= (
        outer[1],
        outer[3],
    )


def _length(node: ast.AST) -> int:
    line, end_line, column, end_column = span_of(node)
    return (end_line - line) * 1000 + end_column - column
