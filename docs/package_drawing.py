"""Draws the packages from their imports, into ``architecture.md``.

python docs/package_drawing.py
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "nanguard"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- packages -->\n", "<!-- end of packages -->"
# Packages that are drawn by their parts.
_PARTED = ("view",)


def package_of(module: str) -> str | None:
    """Returns the package that a module is drawn in; None for the package itself."""
    parts = module.split(".")[1:]
    if not parts:
        return None
    return ".".join(parts[:2]) if parts[0] in _PARTED and len(parts) > 1 else parts[0]


def imports_in(path: Path) -> set[str]:
    """Returns the modules of nanguard that a file imports when it runs, early or late."""
    found: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        waiting += ast.iter_child_nodes(node)
    return {name for name in found if name.startswith("nanguard.")}


def graph() -> tuple[dict[str, int], dict[str, set[str]]]:
    """Returns how many modules each package has, and which packages it imports."""
    modules: dict[str, int] = defaultdict(int)
    uses: dict[str, set[str]] = defaultdict(set)
    for path in sorted(SOURCE.rglob("*.py")):
        inner = path.relative_to(SOURCE.parent).with_suffix("")
        parts = [part for part in inner.parts if part != "__init__"]
        own = package_of(".".join(parts))
        if own is None:
            continue
        modules[own] += path.stem != "__init__"
        uses[own] |= {name for module in imports_in(path) if (name := package_of(module))} - {own}
    known = set(modules)
    return dict(modules), {name: uses[name] & known for name in modules}


def _reached(start: str, uses: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for name in uses[waiting.pop()] - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def drawing() -> str:
    """Returns the packages from the top down, each with what it imports."""
    modules, uses = graph()
    below = {name: _reached(name, uses) for name in uses}
    lines = []
    for name in sorted(uses, key=lambda one: (-len(below[one]), one)):
        if not modules[name]:
            continue
        # What is imported by something that is imported goes without saying.
        implied = {far for near in uses[name] for far in below[near]}
        direct = sorted(uses[name] - implied, key=lambda one: (-len(below[one]), one))
        arrow = f"──► {', '.join(direct)}" if direct else ""
        lines.append(f"{name:14}{modules[name]:4}  {arrow}".rstrip())
    return "\n".join(lines)


def page() -> str:
    """Returns the page with the drawing in its place."""
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{BEGIN}\n```text\n{drawing()}\n```\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
