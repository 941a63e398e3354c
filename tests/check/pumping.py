"""Feeds compiled patterns text that takes a backtracking engine long to refuse.

Run as a program, with the longest text to feed and the seconds of processor time that one search
may cost; it names each pattern before it is tried, and the operating system ends it at one that is
not linear.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import nanguard

try:
    from re import _constants as opcodes  # type: ignore[attr-defined]
    from re import _parser as parser  # type: ignore[attr-defined]
except ImportError:  # Python 3.10
    import sre_constants as opcodes
    import sre_parse as parser

if TYPE_CHECKING:
    from collections.abc import Iterator

# What reads files of others, or says something about them.
PACKAGES = ("source", "check", "advice", "view")
WAYS = ("search", "match", "fullmatch", "findall", "finditer", "sub", "split")
_LETTERS = "a0_ -.,\"'\n\t:=/[]{}()#\\|<>+@\x1b\0Ae%$&*!~bcdfgxyz123;^`?É"


def patterns() -> dict[str, re.Pattern[Any]]:
    """Returns every pattern that a module holds, by its full name."""
    found: dict[str, re.Pattern[Any]] = {}
    for package in PACKAGES:
        top = importlib.import_module(f"nanguard.{package}")
        for info in pkgutil.walk_packages(top.__path__, f"{top.__name__}."):
            try:
                module = importlib.import_module(info.name)
            except ModuleNotFoundError:  # an extra that is not installed
                continue
            for name, value in vars(module).items():
                for number, one in enumerate(_inside(value)):
                    found.setdefault(f"{info.name}.{name}{f'[{number}]' * bool(number)}", one)
    return found


def _inside(value: object) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset)):
        for one in value:
            yield from _inside(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _inside(one)


def ways() -> dict[str, set[str]]:
    """Returns in which ways patterns are used: those of a module by their full names, and all."""
    used: dict[str, set[str]] = {}
    root = Path(nanguard.__file__).parent
    for file in root.rglob("*.py"):
        module = ".".join(file.relative_to(root.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in WAYS:
                name = getattr(node.value, "attr", None) or getattr(node.value, "id", "")
                for full in (f"{module}.{name}", name):
                    used.setdefault(full, set()).add(node.attr)
    return used


def texts(pattern: re.Pattern[Any], size: int) -> Iterator[Any]:
    """Yields texts in which one repeated part of a pattern fits again and again, to no end."""
    is_bytes = isinstance(pattern.pattern, bytes)
    written = pattern.pattern.decode("latin-1") if is_bytes else pattern.pattern
    flags = pattern.flags & ~re.UNICODE if is_bytes else pattern.flags
    repeated: list[tuple[str, str]] = []
    whole = _sample(parser.parse(written, flags), repeated, "")
    made = {letter * size for letter in "0a _.\"'-\t\n"}
    made |= {"epoch" + "0" * size, "1e5-" * (size // 4), "a." * (size // 2), "0_" * (size // 2)}
    for before, unit in {*repeated, ("", whole)}:
        if unit:
            made.add(before + unit * (size // len(unit)))
            made.add((before + unit) * (size // len(before + unit)))
    for text in sorted(made):
        for end in ("", "\x01"):
            yield (text + end).encode("latin-1", "replace") if is_bytes else text + end


def _sample(tree: Any, repeated: list[tuple[str, str]], text: str) -> str:
    """Returns a text that fits a part of a pattern, behind another; notes what may be repeated."""
    for op, value in tree:
        name = str(op)
        if name.endswith("REPEAT"):
            low, high, part = value
            inner: list[tuple[str, str]] = []
            unit = _sample(part, inner, "")
            repeated += [(text + before, one) for before, one in inner]
            if high > 20:
                repeated.append((text, unit))
            text += unit * max(low, 1)
        elif name in ("SUBPATTERN", "ATOMIC_GROUP"):
            text = _sample(value[-1] if name == "SUBPATTERN" else value, repeated, text)
        elif name == "BRANCH":
            text, *_ = [_sample(part, repeated, text) for part in value[1]]
        elif name in ("LITERAL", "NOT_LITERAL", "IN", "ANY"):
            text += _letter(name, value)
    return text


def _letter(name: str, value: Any) -> str:
    if name == "LITERAL":
        return chr(value)
    fits = [(opcodes.NEGATE, None), (opcodes.LITERAL, value)] if name == "NOT_LITERAL" else value
    if name == "ANY":
        return "a"
    wanted = str(fits[0][0]) != "NEGATE"
    return next((c for c in _LETTERS if any(_fits(c, *one) for one in fits) == wanted), "a")


def _fits(letter: str, op: Any, value: Any) -> bool:
    name = str(op)
    if name == "LITERAL":
        return ord(letter) == value
    if name == "RANGE":
        return bool(value[0] <= ord(letter) <= value[1])
    if name != "CATEGORY":
        return False
    kind = str(value)
    known = {"DIGIT": letter.isdigit(), "SPACE": letter.isspace()}
    is_it = known.get(kind.rpartition("_")[2], letter.isalnum() or letter == "_")
    return is_it != ("NOT" in kind)


def use(pattern: re.Pattern[Any], way: str, text: Any) -> None:
    """Uses a pattern as the code does."""
    if way == "sub":
        pattern.sub(b"" if isinstance(text, bytes) else "", text)
    elif way == "finditer":
        for _ in pattern.finditer(text):
            pass
    else:
        getattr(pattern, way)(text)


# Patterns that are given a short text only, and how long that is at most.
SHORT = {"nanguard.check.log.grammar._LINKS": 80}
# Patterns that are handed on to what uses them, and how that does.
HANDED_ON = {
    "nanguard.check.config.toml_reader._SPACE": {"match"},
    "nanguard.check.config.toml_reader._BLANK": {"match"},
    "nanguard.check.code.values._HINTS": {"fullmatch"},
}


def main(size: int, seconds: int) -> None:
    """Tries every pattern; the process ends at one that takes too long."""
    used = ways()
    for name, pattern in sorted(patterns().items()):
        full = name.partition("[")[0]
        bare = full.rpartition(".")[2]
        ran = used.get(full if bare.startswith("_") else bare) or HANDED_ON.get(full)
        for text in texts(pattern, min(size, SHORT.get(full, size))):
            for way in sorted(ran or {"search", "fullmatch"}):
                print(name, way, ascii(text[:40]), flush=True)
                spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
                resource.setrlimit(
                    resource.RLIMIT_CPU, (int(spent) + seconds, resource.RLIM_INFINITY)
                )
                use(pattern, way, text)
    print("all are linear", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
