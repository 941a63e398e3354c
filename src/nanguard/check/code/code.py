"""A Python file as rules read it: what its values are, and in which order things happen."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING, Any

from nanguard.check.code.flow import Flow, join
from nanguard.check.code.scopes import Class, Function, FunctionNode, ImportedNames
from nanguard.check.code.values import Value
from nanguard.errors import SourceError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.project import Project
    from nanguard.source.text import Text

# What training code imports; a file without any of it has nothing to judge.
PACKAGES = (
    "torch", "lightning", "pytorch_lightning", "accelerate", "deepspeed", "transformers", "pickle",
    "torch_xla", "fairscale", "dill", "joblib", "cloudpickle",
)  # fmt: skip

# Methods that give an object its attributes.
_FIRST = ("__init__", "__post_init__", "setup", "build")
# What people call the model of a script.
_MODEL_NAMES = frozenset({"model", "net", "network", "module", "policy"})

# Expressions without parts, and what stands for an operator or for a way of use.
_LEAVES = (ast.Name, ast.Constant)
_SIGNS = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)


class Code:
    """A Python file, read once.

    Attributes:
        text: What it holds.
        project: The files beside it; None if it is read alone.
        tree: Its syntax.
        names: What its imports stand for.
        functions: Its functions, methods and lambdas, and its own code first.
        classes: Its classes, by name.
        values: What is known about each expression.
        operations: The values that each operation made, by the operation.
        calls: Calls of functions of the file, and those functions.
        relevant: Whether it has anything to do with training.
        facts: What several rules ask about the file, once it has been worked out.
    """

    def __init__(
        self, text: Text, tree: ast.Module, project: Project | None = None, *, outline: bool = False
    ) -> None:
        self.text = text
        self.project = project
        self.tree = tree
        self.names = ImportedNames(())
        self.relevant = False
        self.values: dict[ast.AST, Value] = {}
        self.operations: dict[str, list[Value]] = {}
        self.calls: list[tuple[Value, Function]] = []
        self.globals: dict[str, Value] = {}
        self.classes: dict[str, Class] = {}
        self.module = Function("", tree)
        self.functions: list[Function] = [self.module]
        self._functions: dict[ast.AST, Function] = {}
        self.parents: dict[ast.AST, ast.AST] = {}
        self.facts: dict[type, Any] = {}
        self._modules: list[Class] | None = None
        self._mentions: set[str] = set()
        if outline or any(package in text.content for package in PACKAGES):
            self._imports: list[ast.stmt] = []
            self._collect(tree, None, None)
            self.names = ImportedNames(self._imports)
            self.relevant = self.names.imported(*PACKAGES)
        if self.relevant or outline:
            self._descend()
            if self._is_optimizer_code():
                for function in self.functions:
                    function.grad = False
            self._read_outline()
        if self.relevant and not outline:
            self._read_functions()

    @classmethod
    def parse(cls, text: Text, project: Project | None = None, *, outline: bool = False) -> Code:
        """Reads a file.

        Args:
            text: What it holds.
            project: The files beside it, into which its imports are followed.
            outline: Whether functions are read only when somebody asks what they return.

        Raises:
            SourceError: It is not Python, or too deep to be followed.
        """
        try:
            return cls(text, ast.parse(text.content), project, outline=outline)
        except SyntaxError as error:
            raise SourceError(
                f"is not valid Python: {error.msg}",
                where=f"{text.path}:{error.lineno or 1}",
                do="Fix the syntax, or exclude the file.",
            ) from error
        except (RecursionError, MemoryError, ValueError) as error:
            raise SourceError(
                f"cannot be followed: {type(error).__name__}",
                where=text.path,
                do="Split its expressions, or exclude the file.",
            ) from error

    @property
    def length(self) -> int:
        """How many lines it has."""
        return len(self.text.starts)

    def of(self, *operations: str) -> Iterator[Value]:
        """Yields the values that these operations made, in the order of their lines."""
        found = [value for op in operations for value in self.operations.get(op, ())]
        seen: set[int] = set()
        for value in sorted(found, key=lambda value: value.line):
            if id(value.node) not in seen:
                seen.add(id(value.node))
                yield value

    def segment(self, node: ast.AST) -> str:
        """Returns an expression as it is written."""
        start, end = self.span(node)
        return self.text.content[start:end]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Returns where an expression begins and ends, as offsets in the text."""
        return (
            self._offset(node.lineno, node.col_offset),  # type: ignore[attr-defined]
            self._offset(node.end_lineno, node.end_col_offset),  # type: ignore[attr-defined]
        )

    def _offset(self, line: int, column: int) -> int:
        row = self.text.line(line)
        if not row.isascii():
            column = len(row.encode()[:column].decode(errors="replace"))
        return self.text.offset(line, column)

    def function_of(self, node: ast.AST) -> Function | None:
        """Returns the function that a definition defines."""
        return self._functions.get(node)

    def result_of(self, function: Function) -> Value:
        """Returns what a function of the project gives back, as far as it can be known."""
        if function.home is not None and function.home is not self:
            if self.project is None or function.state == "read":
                return function.home.result_of(function)
            return self.project.result_of(function) or Value(node=function.node)
        if function.state == "new":
            self._read_function(function)
        if function.state != "read" or not function.returns:
            return Value(node=function.node)
        result = function.returns[0]
        for other in function.returns[1:4]:
            items = result.items
            result = join(result, other)
            result.items = items if items is not None else other.items
        return result

    def found(self, node: ast.expr) -> Function | Class | Value | None:
        """Returns what an imported name stands for in another file of the project."""
        if self.project is None:
            return None
        origin = self.names.origin(node)
        if origin is not None:
            return self.project.find(self.text.path, *origin)
        if not self.names.stars or not isinstance(node, ast.Name):
            return None
        starred = (
            self.project.find(self.text.path, up, (*module, node.id))
            for up, module in self.names.stars
        )
        return next((found for found in starred if found is not None), None)

    def ready(self, cls: Class) -> None:
        """Sees to it that the attributes of a class are known."""
        for ancestor in cls.line_of_descent():
            home = ancestor.home or self
            for first in _FIRST:
                if first in ancestor.methods and ancestor.methods[first].state == "new":
                    home._read_function(ancestor.methods[first])

    def read_mentions(self, name: str) -> None:
        """Reads the functions that write a name, of a file of which only the outline was read."""
        if name in self._mentions:
            return
        self._mentions.add(name)
        for function in self.functions:
            node = function.node
            if function.state == "new" and isinstance(node, FunctionNode):
                begin = self.text.starts[node.lineno - 1]
                end = self.text.offset(node.end_lineno or 1, 0) + len(name) + 400
                if self.text.content.find(name, begin, end) >= 0:
                    self._read_function(function)

    def class_meant(self, name: str, arguments: int) -> Class | None:
        """Returns the module of the file that a variable of this name is an instance of.

        That is guessed: from the name of the class, or from there being only one whole model.
        """
        if self._modules is None:
            self._modules = [
                cls
                for cls in self.classes.values()
                if cls.is_module() and cls.method("forward") is not None
            ]
        fitting = [cls for cls in self._modules if _accepts(cls.method("forward"), arguments)]
        word = name.lower().replace("_", "")
        called = [cls for cls in fitting if len(word) > 2 and word in cls.name.lower()]
        if len(called) == 1:
            return called[0]
        if word not in _MODEL_NAMES or len(self._modules) != 1:
            return None
        return fitting[0] if fitting else None

    def statement_of(self, node: ast.AST) -> ast.stmt | None:
        """Returns the statement an expression stands in."""
        current: ast.AST | None = node
        while current is not None and not isinstance(current, ast.stmt):
            current = self.parents.get(current)
        return current

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yields what a node stands in, nearest first."""
        current = self.parents.get(node)
        while current is not None:
            yield current
            current = self.parents.get(current)

    def events(self, function: Function, depth: int = 3) -> Iterator[Value]:
        """Yields the operations of a function in order, with those of functions of this file."""
        called = {id(value): callee for value, callee in self.calls if callee.home is self}
        yield from self._events(function, depth, called, frozenset())

    def _events(
        self, function: Function, depth: int, called: dict[int, Function], within: frozenset[int]
    ) -> Iterator[Value]:
        for value in function.events:
            callee = called.get(id(value))
            if callee is not None and depth and id(callee) not in within:
                yield from self._events(callee, depth - 1, called, within | {id(function)})
            yield value

    def _collect(self, node: ast.AST, cls: Class | None, function: Function | None) -> None:
        parents = self.parents
        for name in node._fields:
            held = getattr(node, name, None)
            for child in held if isinstance(held, list) else (held,):
                if isinstance(child, _LEAVES):
                    parents[child] = node
                elif isinstance(child, ast.ClassDef):
                    parents[child] = node
                    inner = Class(child.name, child, home=self)
                    self.classes.setdefault(child.name, inner)
                    self._collect(child, inner, function)
                elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                    parents[child] = node
                    owner = cls if node is (cls and cls.node) else None
                    self._collect_function(child, owner, function)
                elif isinstance(child, (ast.Import, ast.ImportFrom)):
                    parents[child] = node
                    self._imports.append(child)
                elif isinstance(child, ast.AST) and not isinstance(child, _SIGNS):
                    parents[child] = node
                    self._collect(child, cls, function)

    def _collect_function(
        self, node: FunctionNode | ast.Lambda, cls: Class | None, parent: Function | None
    ) -> None:
        name = "" if isinstance(node, ast.Lambda) else node.name
        owner = parent.cls if cls is None and parent is not None else cls
        made = Function(name, node, owner, parent, home=self)
        if not isinstance(node, ast.Lambda):
            made.grad = not any(self._stops_gradients(d) for d in node.decorator_list)
            if cls is not None:
                cls.methods[name] = made
        self._functions[node] = made
        self.functions.append(made)
        self._collect(node, None, made)

    def _is_optimizer_code(self) -> bool:
        """Returns whether the file implements an optimizer, whose steps record no gradients."""
        bases = [base.rpartition(".")[2] for cls in self.classes.values() for base in cls.bases]
        return "Optimizer" in bases and "Module" not in bases

    def _stops_gradients(self, decorator: ast.expr) -> bool:
        node = decorator.func if isinstance(decorator, ast.Call) else decorator
        last = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
        return last in ("no_grad", "inference_mode")

    def _base(self, node: ast.expr) -> str:
        if isinstance(node, ast.Subscript):
            node = node.value
        return self.names.path(node) or (node.id if isinstance(node, ast.Name) else "")

    def _descend(self) -> None:
        for cls in self.classes.values():
            cls.bases = [self._base(base) for base in cls.node.bases]
        for cls in self.classes.values():
            cls.parents = [
                self.classes[base]
                for base in cls.bases
                if base in self.classes and self.classes[base] is not cls
            ]
            if self.project is not None:
                cls.parents += [
                    found
                    for base in cls.node.bases
                    if isinstance(found := self.found(base), Class) and found not in cls.parents
                ]

    def _read_outline(self) -> None:
        """Reads the file's own code and the bodies of its classes, but no function."""
        for function in self.functions:
            if function.name and function.parent is None and function.cls is None:
                self.globals[function.name] = Value(
                    node=function.node, function=function, name=function.name
                )
        flow = Flow(self, self.module, self.globals)
        self.module.state = "reading"
        for cls in self.classes.values():
            self._class_body(flow, cls)
        flow.body(self.tree.body)
        self.globals = flow.env  # branches make new ones
        self.module.state = "read"

    def _read_functions(self) -> None:
        for first in _FIRST:
            for cls in self.classes.values():
                if first in cls.methods:
                    self._read_function(cls.methods[first])
        for function in self.functions:
            self._read_function(function)
        for function in self.functions:
            if function.state == "new" and isinstance(function.node, ast.Lambda):
                scope = function.parent or self.module
                Flow(self, scope, dict(function.outer)).read_lambda(function, ())

    def _class_body(self, flow: Flow, cls: Class) -> None:
        for statement in cls.node.body:
            if isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value is not None:
                value = flow.value(statement.value)
                targets = (
                    statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                )
                for target in targets:
                    if isinstance(target, ast.Name):
                        named = flow.renamed(value, target.id)
                        cls.attributes.setdefault(target.id, []).append(named)

    def _read_function(self, function: Function) -> None:
        if function.state != "new" or isinstance(function.node, (ast.Module, ast.Lambda)):
            return
        if function.parent is not None and function.parent.state == "new":
            self._read_function(function.parent)
            if function.state != "new":
                return
        if function.cls is not None and function.name != "__init__":
            for cls in function.cls.line_of_descent():
                if "__init__" in cls.methods and cls.home is self:
                    self._read_function(cls.methods["__init__"])
        function.state = "reading"
        flow = Flow(self, function, {})
        self._parameters(function, flow)
        flow.body(function.node.body)
        function.state = "read"

    def _given(self, function: Function, place: int, name: str, value: Value) -> None:
        """Takes over a truth value that everybody who makes such an object writes down."""
        if self.project is None or function.cls is None or function.name != "__init__":
            return
        defaults = function.node.args.defaults  # type: ignore[union-attr]
        if not any(isinstance(d, ast.Constant) and isinstance(d.value, bool) for d in defaults):
            return
        calls = self.project.calls_of(function.cls.name)
        flags = {_flag(call, place, name) for call in calls or ()}
        if len(flags) == 1 and flags != {None}:
            value.const = flags.pop()

    def _parameters(self, function: Function, flow: Flow) -> None:
        arguments = function.node.args  # type: ignore[union-attr]
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults: dict[str, ast.expr] = {
            argument.arg: default
            for argument, default in zip(
                reversed(positional), reversed(arguments.defaults), strict=False
            )
        }
        for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
            if default is not None:
                defaults[argument.arg] = default
        for place, argument in enumerate((*positional, *arguments.kwonlyargs)):
            value = flow.annotated(argument.arg, argument.annotation)
            if place == 0 and function.cls is not None and argument.arg in ("self", "cls"):
                value = Value(name=argument.arg, cls=function.cls, op="self")
            elif argument.arg in defaults:
                default = flow.value(defaults[argument.arg])
                value = _by_default(value, default)
            self._given(function, place - 1, argument.arg, value)
            value.node = value.node or argument
            value.scope = value.scope or (None if value.op else function)
            flow.env[argument.arg] = value
            function.parameters[argument.arg] = value
        for extra in (arguments.vararg, arguments.kwarg):
            if extra is not None:
                flow.env[extra.arg] = Value(kinds=frozenset(), node=extra, name=extra.arg)


def _by_default(value: Value, default: Value) -> Value:
    """Returns a parameter with what its default says."""
    if default.op == "new" or default.path or default.cls is not None:
        return default
    if default.number() is not None:
        value.const = default.const
        value.lo, value.hi = default.lo, default.hi
        value.kinds |= {"default"}
    return value


def _flag(call: ast.Call, place: int, name: str) -> bool | None:
    """Returns the truth value that a call gives a parameter; None if it is not written there."""
    if any(isinstance(given, ast.Starred) for given in call.args):
        return None
    written = [k.value for k in call.keywords if k.arg == name] or call.args[place : place + 1]
    given = written[0] if written else None
    constant = isinstance(given, ast.Constant) and isinstance(given.value, bool)
    return given.value if constant else None  # type: ignore[union-attr]


def _accepts(function: Function | None, arguments: int) -> bool:
    """Returns whether a method can be called with so many arguments."""
    if function is None or isinstance(function.node, ast.Module):
        return False
    given = function.node.args
    most = len(given.posonlyargs) + len(given.args) - 1 + len(given.kwonlyargs)
    least = len(given.posonlyargs) + len(given.args) - 1 - len(given.defaults)
    return least <= arguments and (arguments <= most or given.vararg is not None)
