"""What the code of a project does with values of its configurations: who loads and needs them.

A number that YAML 1.1 takes for text is a fault only where PyYAML reads it and something wants a
number; a value out of range only where an optimizer gets it. Both are looked for in the code: calls
of PyYAML's loaders and the files they open, and expressions that read a key and compute with it.
Readers that make numbers of such text, and code that converts it, speak against it. What was not
seen is not assumed. Classes that declare fields as numbers convert what they are given.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING

from nanguard.check.config.keys import normal, words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# Readers for which ``1e-5`` is a number, or that convert text by the type that is declared.
_CONVERTERS = {
    "OmegaConf": re.compile(r"\bOmegaConf\.(?:load|create|merge|structured)\b|\bomegaconf\b"),
    "Hydra": re.compile(r"\bhydra\.(?:main|compose|initialize)"),
    "yacs": re.compile(r"\byacs\b|\bCfgNode\b|\bmerge_from_file\("),
    "ruamel.yaml": re.compile(r"\bruamel\b"),
    "hyperpyyaml": re.compile(r"\bhyperpyyaml\b"),
    "jsonargparse": re.compile(r"\bjsonargparse\b|\bLightningCLI\("),
    "ConfigArgParse": re.compile(r"\bconfigargparse\b"),
    "pyrallis": re.compile(r"\b(?:pyrallis|draccus|simple_parsing|tyro|dynaconf|fastargs)\b"),
}
# Code that teaches PyYAML the number, or converts every text that looks like one.
_TEACHES = re.compile(
    r"add_implicit_resolver\(|\bliteral_eval\(|\byaml_float\b|\bstrictyaml\b"
    r"|\bfloat\(\s*(?:v|val|value|x|item|obj|node|s|text|d\[\w+\]|\w+\[(?:k|key)\])\s*\)"
    r"|(?<![\w.])eval\("
)
_READS = re.compile(r"\byaml\b")
_LOADERS = frozenset({"load", "safe_load", "full_load", "unsafe_load", "load_all", "safe_load_all"})
_TAKES_NUMBERS = re.compile(
    r"(?:SGD|Adam\w*|[RN]Adam|RMS[Pp]rop|Adagrad|Adadelta|Adafactor|Lion|LAMB|LARS|\w*LR)"
    r"|(?:Feature|Alpha)?Dropout\d?d?|CrossEntropyLoss|clip_grad_norm_"
)
_HANDS = re.compile(rf"\b(?:{_TAKES_NUMBERS.pattern})\s*\(")
# Mappings that have keys of the same names, and are no configurations.
_OTHERS = re.compile(r"\w*(group|state|defaults|batch|ckpt|checkpoint|sample|row)s?\d*")
_COMPUTES = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.Mod, ast.FloorDiv)
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_MOST_BYTES = 400_000  # of a file that is parsed for its use of keys
_MOST_FILES = 1_000  # that are parsed


@dataclass(slots=True)
class ValueUses:
    """What the code of a project does with values of its configurations.

    Attributes:
        paths: The files of code.
        read: Returns what one of them holds.
        converters: The readers in the code that make a number of ``1e-5``.
        taught: Whether the code converts text itself, or teaches PyYAML to.
        loads: Where PyYAML loads something: the place, and the file it opens if that is written.
    """

    paths: Sequence[str]
    read: Callable[[str], str]
    converters: set[str] = field(default_factory=set)
    taught: bool = False
    loads: list[tuple[str, str]] = field(default_factory=list)
    _places: dict[tuple[str, bool], str] = field(default_factory=dict)
    _files: dict[str, list[_Scope]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in self.paths:
            content = self.read(path)
            self.converters |= {n for n, reader in _CONVERTERS.items() if reader.search(content)}
            if not _READS.search(content):
                continue
            self.taught = self.taught or _TEACHES.search(content) is not None
            tree = _parsed(content)
            for call in _yaml_loads(tree) if tree is not None else ():
                self.loads.append((f"{path}:{call.lineno}", _file_named(tree, call)))

    def loader_of(self, path: str) -> str:
        """Returns where PyYAML is seen to load a file, and nothing converts; empty if nowhere."""
        if self.converters or self.taught:
            return ""
        name = PurePath(path).name
        return next((place for place, file in self.loads if file in ("", name)), "")

    def needs_number(self, keys: Sequence[str]) -> str:
        """Returns where the code computes with what it reads under a key; empty if nowhere.

        Args:
            keys: The keys of the file that lead to the value, outermost first.
        """
        return self._place(keys, handed=False)

    def handed_on(self, keys: Sequence[str]) -> str:
        """Returns where the code gives an optimizer or a layer what it reads under a key."""
        return self._place(keys, handed=True)

    def _place(self, keys: Sequence[str], *, handed: bool) -> str:
        names = tuple(key for key in keys if not key.startswith("["))
        if not names:
            return ""
        wanted = ("\0".join(names[-2:]), handed)
        if wanted not in self._places:
            self._places[wanted] = self._search(names, handed=handed)
        return self._places[wanted]

    def _search(self, names: tuple[str, ...], *, handed: bool) -> str:
        reads = _read_as(names[-2:])
        for path in self.paths:
            content = self.read(path)
            if len(content) > _MOST_BYTES or not reads.search(content):
                continue
            if handed and not _HANDS.search(content):
                continue
            line = _line_of_use(self._scopes_of(path, content), names, handed=handed)
            if line:
                return f"{path}:{line}"
        return ""

    def _scopes_of(self, path: str, content: str) -> list[_Scope]:
        """Returns what a file computes with; nothing of files beyond those that are parsed."""
        if path not in self._files:
            tree = _parsed(content) if len(self._files) < _MOST_FILES else None
            self._files[path] = _scopes(tree) if tree is not None else []
        return self._files[path]


def _read_as(names: tuple[str, ...]) -> re.Pattern[str]:
    """Returns what describes an expression that reads one of some keys."""
    keys = "|".join(map(re.escape, names))
    return re.compile(rf"\.\s*(?:{keys})\b|['\"](?:{keys})['\"]")


def _parsed(content: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _yaml_loads(tree: ast.Module) -> Iterator[ast.Call]:
    """Yields the calls of PyYAML's loaders, under whatever name they were imported."""
    modules, functions = {"yaml"}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname for a in node.names if a.name == "yaml" and a.asname}
        elif isinstance(node, ast.ImportFrom) and node.module == "yaml":
            functions |= {a.asname or a.name for a in node.names if a.name in _LOADERS}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        func = node.func
        if isinstance(func, ast.Attribute) and func.attr in _LOADERS:
            if isinstance(func.value, ast.Name) and func.value.id in modules:
                yield node
        elif isinstance(func, ast.Name) and func.id in functions:
            yield node


def _file_named(tree: ast.Module | None, load: ast.Call) -> str:
    """Returns the name of the file that a call loads; empty if it is not written there."""
    if not load.args or tree is None:
        return ""
    source = load.args[0]
    if isinstance(source, ast.Name):
        for block in ast.walk(tree):
            if isinstance(block, ast.With) and _holds(block, load):
                opened = _opened(block, source.id)
                if opened is not None:
                    source = opened
                    break
    texts = [n.value for n in ast.walk(source) if isinstance(n, ast.Constant)]
    files = [t for t in texts if isinstance(t, str) and t.endswith((".yaml", ".yml"))]
    return PurePath(files[-1]).name if files else ""


def _opened(block: ast.With, name: str) -> ast.expr | None:
    """Returns what a ``with`` gives a name to."""
    for item in block.items:
        if isinstance(item.optional_vars, ast.Name) and item.optional_vars.id == name:
            return item.context_expr
    return None


def _holds(outer: ast.stmt, inner: ast.expr) -> bool:
    return outer.lineno <= inner.lineno <= (outer.end_lineno or outer.lineno)


@dataclass(slots=True)
class _Scope:
    """What a function, or a file between its functions, computes with.

    Attributes:
        assigned: The names that are given something, and what.
        computed: What is computed with, and in which line.
        given: What an optimizer, a schedule or a layer is given, and in which line.
        unpacked: What such a one is given as a whole mapping, and in which line.
    """

    assigned: list[tuple[str, ast.expr]] = field(default_factory=list)
    computed: list[tuple[int, list[ast.expr]]] = field(default_factory=list)
    given: list[tuple[int, list[ast.expr]]] = field(default_factory=list)
    unpacked: list[tuple[int, list[ast.expr]]] = field(default_factory=list)


def _scopes(tree: ast.Module) -> list[_Scope]:
    """Returns what is computed with in a file, whatever key is asked for."""
    functions = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Lambda))]
    found = []
    for outer in (tree, *functions):
        scope = _Scope()
        for node in _own(outer):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Name):
                    scope.assigned.append((target.id, node.value))
                continue
            for parts, into in (
                (_operands(node), scope.computed),
                (_given(node), scope.given),
                (_unpacked(node), scope.unpacked),
            ):
                if parts:
                    into.append((int(getattr(node, "lineno", 0)), parts))
        if scope.computed or scope.given or scope.unpacked:
            found.append(scope)
    return found


def _own(scope: ast.AST) -> Iterable[ast.AST]:
    """Yields the nodes of a function, without those of functions within it."""
    queue = [*ast.iter_child_nodes(scope)]
    while queue:
        node = queue.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            queue += ast.iter_child_nodes(node)


def _line_of_use(scopes: list[_Scope], names: tuple[str, ...], *, handed: bool) -> int:
    """Returns the line that computes with a value read under a key; 0 if none does."""
    key, section = names[-1], names[-2] if len(names) > 1 else ""
    for scope in scopes:
        held = _names_given(scope, key)
        for line, used in scope.given if handed else [*scope.computed, *scope.given]:
            if any(_is_read(part, key) or _is_held(part, held) for part in used):
                return line
        for line, used in scope.unpacked if section else ():
            if any(_is_read(part, section) for part in used):
                return line
    return 0


def _names_given(scope: _Scope, key: str) -> set[str]:
    """Returns the names that hold what was read under a key, and nothing else."""
    given: dict[str, bool] = {}
    for name, value in scope.assigned:
        given[name] = given.get(name, True) and _is_read(value, key)
    return {name for name, reads in given.items() if reads}


def _is_held(node: ast.expr, held: set[str]) -> bool:
    return isinstance(node, ast.Name) and node.id in held


def _is_read(node: ast.expr, key: str) -> bool:
    """Returns whether an expression is what a mapping or an object holds under a key."""
    if isinstance(node, (ast.Subscript, ast.Attribute)):
        holder = getattr(node.value, "attr", getattr(node.value, "id", ""))
        if _OTHERS.fullmatch(holder) or holder == "self":
            return False
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == key
    if isinstance(node, ast.Attribute):
        return node.attr == key and not isinstance(node.ctx, ast.Store)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        first = node.args[0]
        return node.func.attr == "get" and isinstance(first, ast.Constant) and first.value == key
    return False


def _operands(node: ast.AST) -> list[ast.expr]:
    """Returns the parts of an expression that have to be numbers."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, _COMPUTES):
        texts = (ast.Constant, ast.JoinedStr)
        if isinstance(node.op, (ast.Add, ast.Mod)) and any(
            isinstance(side, texts) and not _is_number(side) for side in (node.left, node.right)
        ):
            return []  # text that is put together
        return [node.left, node.right]
    if isinstance(node, ast.Compare) and all(isinstance(op, _ORDERS) for op in node.ops):
        return [node.left, *node.comparators]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return [node.operand]
    return []


def _given(node: ast.AST) -> list[ast.expr]:
    """Returns what an optimizer, a schedule or a layer is given, with the items of tuples."""
    if not isinstance(node, ast.Call) or not _TAKES_NUMBERS.fullmatch(_called(node)):
        return []
    written = [*node.args, *(k.value for k in node.keywords if k.arg)]
    return [*written, *(i for w in written if isinstance(w, (ast.Tuple, ast.List)) for i in w.elts)]


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float))


def _unpacked(node: ast.AST) -> list[ast.expr]:
    """Returns the sections that are handed to an optimizer or a schedule as they are."""
    if not isinstance(node, ast.Call) or not _TAKES_NUMBERS.fullmatch(_called(node)):
        return []
    return [k.value for k in node.keywords if k.arg is None]


def _called(node: ast.Call) -> str:
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))


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
