"""Fields that a project's code declares as numbers, in classes that convert what they are given."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanguard.check.config.keys import normal, words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CLASS = re.compile(r"^[ \t]*class[ \t]+(\w+)[ \t]*(?:\(([^)]{0,400})\))?[ \t]*:", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z_]\w*")
_ROOTS = ("BaseModel", "BaseSettings", "RootModel", "GenericModel")
_IMPORTED = re.compile(r"^[ \t]*(?:from|import)[ \t]+pydantic", re.MULTILINE)
_DATACLASSES = re.compile(r"pydantic\.dataclasses|from\s+pydantic\s+import[^\n]*\bdataclasses\b")
_ADAPTED = re.compile(r"\bTypeAdapter\(([^)]{0,400})\)")
# Readers that fill classes of any kind, and make of a text what its field is declared as.
_FILLED = re.compile(
    r"\b(?:pyrallis|draccus)\.(?:wrap|parse|load|decode)\b|\bcattrs?\.structure\b|\bconverter\.structure\("
    r"|\bOmegaConf\.structured\b|\bsimple_parsing\b"
)
_NUMBERS = words(
    "float PositiveFloat NonNegativeFloat NegativeFloat NonPositiveFloat FiniteFloat confloat "
    "Decimal Real Number"
)
# A text is one of these already, and stays what it is.
_TEXTS = frozenset(("str", "Any", "object", "StrictFloat", "StrictStr"))
_MAPPINGS = frozenset(
    ("dict", "Dict", "Mapping", "MutableMapping", "OrderedDict", "defaultdict", "DefaultDict")
)


@dataclass(slots=True)
class TypedFields:
    """The classes of a project, and which of their fields make a number of a text.

    A plain dataclass keeps the text it is given. A model of pydantic does not, nor does a class
    that such a model holds, or one that a reader fills by the types of its fields.

    Attributes:
        read: Returns what a file of code holds.
    """

    read: Callable[[str], str]
    _bases: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _places: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    _roots: set[str] = field(default_factory=set)
    _maybe: set[str] = field(default_factory=set)
    _modelled: bool = False
    _filled: bool = False

    def look(self, path: str, content: str) -> None:
        """Takes note of the classes of a file."""
        imported = _IMPORTED.search(content) is not None
        self._modelled |= imported
        self._filled |= _FILLED.search(content) is not None
        if imported:
            self._roots |= {
                name for text in _ADAPTED.findall(content) for name in _NAME.findall(text)
            }
        whole = imported and _DATACLASSES.search(content) is not None
        for name, bases in _CLASS.findall(content):
            named = set(_NAME.findall(bases))
            self._places[name].add(path)
            self._bases[name] |= named
            if any(base.endswith(_ROOTS) for base in named):
                (self._roots if imported else self._maybe).add(name)
            if whole and re.search(
                rf"dataclass[^\n]*\n(?:[ \t]*@[^\n]*\n)*[ \t]*class {name}\b", content
            ):
                self._roots.add(name)

    def numbers(self) -> frozenset[str]:
        """Returns the names of the fields that make a number of a text, in normal form."""
        found: set[str] = set()
        parsed: dict[str, dict[str, list[ast.ClassDef]]] = {}
        waiting, done = self._converting(), set[str]()
        while waiting:
            name = waiting.pop()
            done.add(name)
            for path in self._places.get(name, ()):
                if path not in parsed:
                    parsed[path] = _classes(self.read(path))
                for node in parsed[path].get(name, ()):
                    numbers, held = _fields(node)
                    found |= numbers
                    waiting |= (held & self._places.keys()) - done
        return frozenset(found)

    def _converting(self) -> set[str]:
        """Returns the classes that convert what they are given, as far as their headers show."""
        if self._filled:
            return set(self._places)
        if not self._modelled:
            return set()
        # A class of the project's own may be called like the one of pydantic: a network, usually.
        found = {
            name
            for name in self._maybe
            if any(base.endswith(_ROOTS) for base in self._bases[name] - self._places.keys())
        }
        found |= self._roots & self._places.keys()
        below: dict[str, set[str]] = defaultdict(set)
        for name, bases in self._bases.items():
            for base in bases:
                below[base].add(name)
        waiting = set(found)
        while waiting:
            more = below[waiting.pop()] - found
            found |= more
            waiting |= more
        return found


def _classes(content: str) -> dict[str, list[ast.ClassDef]]:
    found: dict[str, list[ast.ClassDef]] = defaultdict(list)
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return found
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            found[node.name].append(node)
    return found


def _fields(node: ast.ClassDef) -> tuple[set[str], set[str]]:
    """Returns the fields of a class that make numbers, and the names that its types mention."""
    numbers: set[str] = set()
    held: set[str] = set()
    if _is_strict(node):
        return numbers, held
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        types = set(_types(statement.annotation))
        held |= types
        if types & _NUMBERS and not types & _TEXTS:
            numbers |= {normal(name) for name in (statement.target.id, *_aliases(statement))}
    return numbers, held


def _is_strict(node: ast.ClassDef) -> bool:
    """Returns whether a class refuses a text where a number is declared."""
    settings = [
        statement.value
        for statement in node.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
    ]
    return any(
        word.arg == "strict" and isinstance(word.value, ast.Constant) and word.value.value is True
        for call in settings
        for word in (*call.keywords, *node.keywords)
    )


def _types(annotation: ast.expr) -> Iterator[str]:
    """Yields the names of the types that a value of a field can have, without those of keys."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        try:
            annotation = ast.parse(annotation.value, mode="eval").body
        except (SyntaxError, ValueError):
            return
    if isinstance(annotation, ast.Name):
        yield annotation.id
    elif isinstance(annotation, ast.Attribute):
        yield annotation.attr
    elif isinstance(annotation, ast.BinOp):
        yield from _types(annotation.left)
        yield from _types(annotation.right)
    elif isinstance(annotation, ast.Call):  # confloat(gt=0)
        yield from _types(annotation.func)
    elif isinstance(annotation, ast.Subscript):
        for part in _arguments(annotation):
            yield from _types(part)


def _arguments(annotation: ast.Subscript) -> list[ast.expr]:
    """Returns what a type is made of, as far as values are converted to it."""
    outer = next(iter(_types(annotation.value)), "")
    inner = annotation.slice
    parts = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if outer == "Literal":
        return []
    if outer == "Annotated":
        return parts[:1]
    return parts[1:] if outer in _MAPPINGS else parts


def _aliases(statement: ast.AnnAssign) -> Iterator[str]:
    """Yields the other names that a field has in a file."""
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    for word in (word for call in calls for word in call.keywords):
        if word.arg in ("alias", "validation_alias"):
            for node in ast.walk(word.value):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value
