"""Where a plain number came from: the line of a schedule, and not the one that uses it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.replay.tracer.sites import Site, is_installed, is_users
from nanguard.source.edits import SourceFile, called_name, span_of

if TYPE_CHECKING:
    from collections.abc import Sequence

# Names and calls that a number is followed through.
_DEPTH = 8
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def made_at(node: ast.expr, site: Site, callers: Sequence[Site]) -> Site | None:
    """Returns the line of the user's that computed a number; None if that cannot be seen.

    Args:
        node: The expression that stands for the number.
        site: Where it is used.
        callers: Where the function around it was called from, and so on, the nearest first.
    """
    file = SourceFile.open(site.file)
    found = None if file is None else _follow(file, node, site, list(callers), _DEPTH)
    return None if found is None or (found.file, found.line) == (site.file, site.line) else found


def _follow(
    file: SourceFile, node: ast.expr, site: Site, callers: list[Site], depth: int
) -> Site | None:
    if depth == 0:
        return None
    if isinstance(node, ast.Call):
        return _returned(file, node)
    if not isinstance(node, ast.Name):
        return None
    scope = file.scope_of(site.line)
    value = assigned(scope, node.id, site.line)
    if value is not None:
        at = _at(site.file, value, site.function)
        return _follow(file, value, at, callers, depth - 1) or at
    given = _argument_of(scope, node.id, callers)
    if given is None:
        return None
    caller, inner = given
    at = _at(callers[0].file, inner, callers[0].function)
    return _follow(caller, inner, callers[0], callers[1:], depth - 1) or at


def _at(path: str, node: ast.expr, function: str) -> Site:
    """Returns the place of an expression."""
    return Site(path, node.lineno, function, span_of(node))


def assigned(scope: ast.AST, name: str, line: int) -> ast.expr | None:
    """Returns what a name was last set to before a line, in one plain assignment."""
    found = [
        node.value
        for node in ast.walk(scope)
        if isinstance(node, ast.Assign)
        and node.lineno < line
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    ]
    return max(found, key=lambda value: value.lineno, default=None)


def _argument_of(
    scope: ast.AST, name: str, callers: list[Site]
) -> tuple[SourceFile, ast.expr] | None:
    """Returns what a function was given for one of its parameters, and the file of its caller."""
    if not isinstance(scope, _Function) or not callers:
        return None
    names = [argument.arg for argument in (*scope.args.posonlyargs, *scope.args.args)]
    if name not in [*names, *(argument.arg for argument in scope.args.kwonlyargs)]:
        return None
    file = SourceFile.open(callers[0].file)
    call = None if file is None else file.node_at(callers[0], lambda n: isinstance(n, ast.Call))
    if file is None or not isinstance(call, ast.Call):
        return None
    for keyword in call.keywords:
        if keyword.arg == name:
            return file, keyword.value
    bound = names[1:] if names[:1] == ["self"] else names
    place = bound.index(name) if name in bound else len(call.args)
    plain = not any(isinstance(argument, ast.Starred) for argument in call.args)
    return (file, call.args[place]) if plain and place < len(call.args) else None


def _returned(file: SourceFile, call: ast.Call) -> Site | None:
    """Returns the line on which a function of the user's returns what a call gives."""
    name = called_name(call)
    for path in (file.path, *_imported(file, name)):
        other = SourceFile.open(path)
        found = None if other is None else last_return(other, name)
        if found is not None:
            return found
    return None


def last_return(file: SourceFile, name: str, line: int | None = None) -> Site | None:
    """Returns the last line on which a function returns something.

    Args:
        file: The file.
        name: The function's name.
        line: The line it begins on, if that is known.
    """
    if not is_users(file.path) or is_installed(file.path):
        return None
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Lambda) and name == "<lambda>" and node.lineno == line:
            return _at(file.path, node.body, name)
        if not isinstance(node, _Function) or node.name != name:
            continue
        if line is not None and line not in (node.lineno, *(d.lineno for d in node.decorator_list)):
            continue
        returns = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value]
        if returns:
            return _at(file.path, max(returns, key=lambda value: value.lineno), name)
    return None


def _imported(file: SourceFile, name: str) -> list[str]:
    """Returns the files that a name may have been imported from, beside the one that does."""
    folder = Path(file.path).parent
    found = []
    for node in ast.walk(file.tree):
        if isinstance(node, ast.ImportFrom) and any(
            (alias.asname or alias.name) == name for alias in node.names
        ):
            base = folder.joinpath(*[".."] * max(node.level - 1, 0))
            parts = (node.module or "").split(".")
            places = (base, folder) if node.level else (folder, folder.parent)
            found += [str(place.joinpath(*parts).with_suffix(".py")) for place in places]
    return [path for path in dict.fromkeys(found) if Path(path).is_file()]


def sets_rate_at(file: SourceFile) -> Site | None:
    """Returns the line on which a file sets a learning rate by hand."""
    lines = [
        node.lineno
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Assign) and any(_is_rate(target) for target in node.targets)
    ]
    return Site(file.path, max(lines), "") if lines else None


def _is_rate(target: ast.expr) -> bool:
    key = target.slice if isinstance(target, ast.Subscript) else None
    return isinstance(key, ast.Constant) and key.value == "lr"
