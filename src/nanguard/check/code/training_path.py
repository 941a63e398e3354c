"""Whether training reaches a place in the code, and what a finding there may be: a warning or not.

A rule claims one of two things. That the *code* does something wrong, whatever its numbers are: it
skips on one rank, it clips before it unscales. Or that a *value* can become something: 0, Inf, a
number out of range. What a value can become is hardly ever to be seen in the text, so such a
finding is a remark unless three things are shown: the rule saw what brings the value there, the
training of the project reaches the place, and a gradient can come back to it. ``may_warn`` decides,
for every rule.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Literal

from nanguard.check.code.gradient_fate import is_only_read
from nanguard.check.code.origins import calls_of
from nanguard.check.code.reach import BETWEEN
from nanguard.check.code.training import Training, is_backward, is_test

if TYPE_CHECKING:
    from nanguard.check.code.code import Code
    from nanguard.check.code.project import Project
    from nanguard.check.code.scopes import Class, Function
    from nanguard.check.code.values import Value

_LOSS = re.compile(
    r"loss|criterion|objective|elbo|training_step|get_batch_\w*metrics|(^|_)kld?($|_)"
)
# What trainers call a step that gives back its loss beside what is logged.
_STEP = re.compile(r"get_batch_\w*metrics|train\w*_metrics")
# What a rule says: what the code does; where a derivative is infinite; where a number is bad.
Claim = Literal["code", "value", "number"]

_SHOW = re.compile(
    r"metrics|eval|visual|plot|draw|accuracy|psnr|nmse|distortion_ratio|confusion|meter$|evaluator"
    r"|_(mae|rmse|fid|ssim|iou|auc)$"
)
# Words in the names of files and folders that measure, show or use a model and do not train it.
_EVALUATES = re.compile(
    r"(^|_)(eval(s|uat\w*)?|metrics|accurac\w+|miners?|bench(mark\w*)?|visuali[sz]\w*|plot\w*|demos?|infer\w*"
    r"|predict(or|ing)?|sampl(e|es|ing)|generate|export\w*|analy\w+|compare?|comparison|verif\w+"
    r"|preprocess\w*|prepare|compute|convert\w*)($|_)"
)
_METRICS = re.compile(r"(^|[/_])metrics?\.py$")
_USES = re.compile(
    r"_?(on_(val|validation|test|predict|sanity)\w*|eval\w*|validat\w*|test\w*|sample_\w+|\w+_samples?|visuali[sz]e\w*|plot\w*|generate\w*|reverse|inverse"
    r"|infer\w*|predict\w*|interpolat\w*|slerp|compute_metrics?|score(_(?!fn|model|net|func|match|loss)\w+)?"
    r"|calc(ulate)?_(metric|acc|score|psnr|ssim|iou|map|fid|stat|auc|recall|dice)\w*)"
)
_DRAWS = re.compile(r"_?(sample_\w+|\w+_samples?|inverse|reverse|predict\w*|infer\w*)")
_TRAINED = re.compile(r"^forward$|loss|training_step|encode")
# Functions in which a module or a table is set up, before anything is trained.
_SETUP = re.compile(
    r"__init__|__post_init__|setup|build\w*|_?(re)?init\w*|register_schedule|reset_\w+"
)
# Methods that a framework calls by their names.
_HOOKS = re.compile(
    r"forward|backward|\w+_step|on_\w+|configure_\w+|compute_loss|\w+_dataloader|main|run|train\w*"
    r"|fit|step|collate\w*|loss"
)
_DATASETS = ("Dataset", "IterableDataset", "DataModule", "LightningDataModule", "Sampler")
_DATA_METHODS = re.compile(
    r"__getitem__|__iter__|_?collate\w*|_?load_\w+|_?read_\w+|_?preprocess\w*"
)
_VENDORED = re.compile(r"(^|/)(third_?party|3rd_?party|vendor(ed)?|externals?|submodules)/")
_INERT = (
    ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Assign,
    ast.AnnAssign,
)  # fmt: skip
# Flags of a model that is used, and of one that is trained.
_USE = re.compile(
    r"reverse|gen|generate|generation|infer|inference|inferring|sampl(e|ing)|is_sampling|eval"
    r"|evaluate|is_eval|do_eval|evaluation|is_test|test|testing|validation|is_inference|do_sample"
)
_TRAINING = re.compile(r"(is_)?train(ing)?|is_train|do_train|training_mode|train_mode")
# The same as words that a mode or direction is compared with.
_USE_WORD = re.compile(r"inverse|reverse|backward|sample|generate|infer(ence)?|eval|test|predict")
_TRAINING_WORD = re.compile(r"direct|forward|train(ing)?")


def may_warn(code: Code, node: ast.AST | None, claim: Claim, *, shown: bool) -> bool:
    """Returns whether a finding may be more than a remark.

    Args:
        code: The file.
        node: What the finding is about.
        claim: Whether the rule says what the code does, or what a value can become.
        shown: Whether the rule saw what brings the value there.
    """
    if is_test(code) or is_evaluation(code) or is_vendored(code) or is_aside(code, node):
        return False
    if is_never_chosen(code, node):
        return False
    reached = _is_reached(code, node)
    if claim == "code":
        return reached is not False
    if not shown or reached is not True or is_branch_of_use(code, node):
        return False
    function = Training.of(code).owner(node) if node is not None else code.module
    if not _is_differentiated(code, function):
        return False
    if is_only_read(code, node, numbers=claim == "number"):
        return False
    return not (_is_called_in_vain(code, function) or _is_called_to_use_only(code, function))


def _is_differentiated(code: Code, function: Function, depth: int = 2) -> bool:
    """Returns whether gradients pass a function: of a module or a loss, or called from one."""
    if function.cls is not None and function.cls.is_module():
        return True
    training = Training.of(code)
    if _LOSS.search(function.name.lower()) or any(map(is_backward, function.events)):
        return True
    callers = [call.scope for call in training.callers(function) if call.scope is not None]
    if depth <= 0:
        return False
    if any(_is_differentiated(code, caller, depth - 1) for caller in callers):
        return True
    return any(
        _is_differentiated(home, call.scope, depth - 1)
        for home, call in calls_of(code, function)
        if home is not code and call.scope is not None and call.grad
    )


def _is_reached(code: Code, node: ast.AST | None) -> bool | None:
    """Returns whether the training of a project reaches a place; None where it cannot be said."""
    if code.project is None or node is None or not code.text.path.endswith(".py"):
        return bool(Training.of(code).backwards) or None
    name = BETWEEN
    for outer in (node, *code.ancestors(node)):
        if code.parents.get(outer) is code.tree:
            if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = outer.name
            break
    return code.project.reaches(code.text.path, name)


def is_never_chosen(code: Code, node: ast.AST | None) -> bool:
    """Returns whether a place lies under an option that is off and that no call gives."""
    for outer in code.ancestors(node) if node is not None else ():
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return False
        if isinstance(outer, (ast.If, ast.IfExp)) and node is not outer.test:
            body = outer.body if isinstance(outer, ast.If) else [outer.body]
            taken = any(node is inner for inner in body)
            if _is_left_at(code, outer, outer.test, value=not taken):
                return True
        node = outer
    return False


def _is_called_in_vain(code: Code, function: Function) -> bool:
    """Returns whether every call of a function lies where no option leads."""
    if not function.name or _HOOKS.fullmatch(function.name) or function.name.startswith("__"):
        return False
    calls = [*calls_of(code, function)]
    return bool(calls) and all(_never_runs(home, call.node) for home, call in calls)


def _is_called_to_use_only(code: Code, function: Function) -> bool:
    """Returns whether every call of a module lies in a branch that only uses the model."""
    if function.cls is None or not function.cls.is_module() or function.name != "forward":
        return False
    calls = [*calls_of(code, function)]
    return bool(calls) and all(is_branch_of_use(home, call.node) for home, call in calls)


def _never_runs(code: Code, node: ast.AST | None) -> bool:
    """Returns whether a place, or whatever names the function it is in, is never chosen."""
    if is_never_chosen(code, node):
        return True
    outer = Training.of(code).owner(node) if node is not None else code.module
    if not outer.name or (outer.cls is not None and outer.parent is None):
        return False
    named = [
        name
        for name in ast.walk(code.tree)
        if isinstance(name, ast.Name) and name.id == outer.name and isinstance(name.ctx, ast.Load)
    ]
    project = code.project
    elsewhere = project is not None and any(
        p != code.text.path for p in project.callers(outer.name)
    )
    return bool(named) and not elsewhere and all(is_never_chosen(code, name) for name in named)


def _is_left_at(code: Code, node: ast.AST, test: ast.expr, *, value: bool) -> bool:
    """Returns whether an option has a truth value by default that no call changes.

    Args:
        code: The file.
        node: Where it is asked.
        test: What is asked: a parameter, or an attribute that is one of the constructor's.
        value: The truth value.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, value = test.operand, not value
    outer = next(
        (n for n in code.ancestors(node) if isinstance(n, (ast.FunctionDef, ast.Lambda))), None
    )
    if code.project is None or not isinstance(outer, ast.FunctionDef):
        return False
    if isinstance(test, ast.Name):
        return _keeps_default(code.project, outer, outer.name, test.id, value=value)
    if isinstance(test, ast.Attribute) and getattr(test.value, "id", "") == "self":
        cls = next((n for n in code.ancestors(outer) if isinstance(n, ast.ClassDef)), None)
        made = _made_with(cls, test.attr) if cls is not None else None
        if cls is None or made is None or _is_changed(code.project, cls.name, test.attr):
            return False
        return _keeps_default(code.project, made[0], cls.name, made[1], value=value)
    return False


def _keeps_default(
    project: Project, function: ast.FunctionDef, called: str, name: str, *, value: bool
) -> bool:
    """Returns whether a parameter has a truth value by default, and no call gives it another."""
    positional = [*function.args.posonlyargs, *function.args.args]
    names = [argument.arg for argument in positional]
    defaults = dict(zip(reversed(names), reversed(function.args.defaults), strict=False))
    default = defaults.get(name)
    if not isinstance(default, ast.Constant) or bool(default.value) is not value:
        return False
    if any(getattr(n, "id", "") == name and _is_stored(n) for n in ast.walk(function)):
        return False
    place = names.index(name) - (names[0] in ("self", "cls"))
    calls = project.calls_of(called)
    if not calls and (calls is None or called != function.name):
        return False  # nobody knows what an object is made with
    return not any(_may_give(call, place, name, value=value) for call in calls)


def _may_give(call: ast.Call, place: int, name: str, *, value: bool) -> bool:
    """Returns whether a call may give a parameter something else than a truth value."""
    if any(isinstance(given, ast.Starred) for given in call.args):
        return True
    given = [k.value for k in call.keywords if k.arg == name] + call.args[place : place + 1]
    return any(k.arg is None for k in call.keywords) or any(
        not isinstance(node, ast.Constant) or bool(node.value) is not value for node in given
    )


def _made_with(cls: ast.ClassDef, attribute: str) -> tuple[ast.FunctionDef, str] | None:
    """Returns the constructor and the parameter of it that an attribute is, and stays."""
    found = [
        (method, node)
        for method in cls.body
        if isinstance(method, ast.FunctionDef)
        for node in ast.walk(method)
        if getattr(node, "attr", "") == attribute and _is_stored(node)
    ]
    if len(found) != 1 or found[0][0].name != "__init__":
        return None
    method, target = found[0]
    for node in method.body:
        if isinstance(node, ast.Assign) and node.targets == [target]:
            return (method, node.value.id) if isinstance(node.value, ast.Name) else None
    return None


def _is_stored(node: ast.AST) -> bool:
    """Returns whether a name or an attribute is written here."""
    return isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store)


def _is_changed(project: Project, cls: str, attribute: str) -> bool:
    """Returns whether heirs of a class or others may give an attribute another value."""
    base = re.compile(rb"^[ \t]*class[ \t]+\w+[ \t]*\([^)]*\b%s\b" % cls.encode(), re.MULTILINE)
    written = re.compile(rb"(?<!\bself)\.%s[ \t]*=(?!=)" % attribute.encode())
    return project.some_file_has(written) or any(
        project.holds(path, base) for path in project.users(cls)
    )


def is_for_show(value: Value) -> bool:
    """Returns whether a place is about measuring or showing, going by names around it."""
    scope = value.scope
    if scope is None:
        return False
    if _STEP.fullmatch(scope.name.lower()):
        return False
    names = [scope.name] if scope.cls is None else [scope.name, scope.cls.name]
    return any(_SHOW.search(name.lower()) for name in names)


def is_about_training(code: Code) -> bool:
    """Returns whether gradients flow in a file, as far as it says: a module, a loss, a step."""
    return "backward" in code.operations or any(
        "loss" in function.name.lower() or (function.cls is not None and function.cls.is_module())
        for function in code.functions
    )


def is_evaluation(code: Code) -> bool:
    """Returns whether a file measures or uses a model, by its name and by what it does not do."""
    if not is_named_for_evaluation(code.text.path) or Training.of(code).backwards:
        return False
    # Losses stand among measures in many a file of metrics.
    if _holds_losses(code):
        return False
    # What holds parameters is trained, whatever its file is called.
    return "parameter" not in code.operations


def _holds_losses(code: Code) -> bool:
    """Returns whether a file of metrics defines losses that the training of its project reaches."""
    if code.project is None or not _METRICS.search(code.text.path.lower()):
        return False
    losses = [f.name for f in code.functions if f.cls is None and "loss" in f.name.lower()]
    return any(code.project.reaches(code.text.path, name) for name in losses)


def is_vendored(code: Code) -> bool:
    """Returns whether a file is a copy of somebody else's, by the folder it lies in."""
    return _VENDORED.search(code.text.path.replace("\\", "/").lower()) is not None


def is_named_for_evaluation(path: str) -> bool:
    """Returns whether a file is called as one that measures, shows or uses a model."""
    *folders, name = path.replace("\\", "/").lower().split("/")
    # Only the folder it lies in: what is further up may be the name of the whole project.
    stem = name.rpartition(".")[0] or name
    words = [word.replace("-", "_") for word in (stem, *folders[-1:])]
    return stem.startswith("test") or any(_EVALUATES.search(word) for word in words)


def is_aside(code: Code, node: ast.AST | None) -> bool:
    """Returns whether a place is tried out in a notebook, or nobody trains with its function."""
    if node is None:
        return False
    function: ast.AST | None = None
    looped = False
    for outer in code.ancestors(node):
        looped = looped or isinstance(outer, (ast.For, ast.While, ast.ClassDef))
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = outer
            break
    if function is None:
        return code.text.path.endswith(".ipynb") and not looped
    if _is_left_over(code) or (_only_uses_weights(code) and _is_reached(code, node) is not True):
        return True
    found = code.function_of(function)
    return found is not None and code.project is not None and _is_idle(code, found)


def _only_uses_weights(code: Code) -> bool:
    """Returns whether a script loads weights into models of its own and never trains them."""
    training = Training.of(code)
    if (
        code.project is None
        or training.backwards
        or not any(training.called("load_state_dict", "load"))
    ):
        return False
    if not code.project.trains or any(f.name == "training_step" for f in code.functions):
        return False
    return not code.project.is_imported(code.text.path)


def _is_left_over(code: Code) -> bool:
    """Returns whether no file of a project that trains imports this one, and it is no script."""
    project, path = code.project, code.text.path
    if project is None or not project.trains or not path.endswith(".py"):
        return False
    if path.endswith("__init__.py") or not project.is_left_over(path):
        return False
    if Training.of(code).backwards or any(f.name == "training_step" for f in code.functions):
        return False
    # A script does something where it stands.
    return all(isinstance(node, _INERT) or is_text(node) for node in code.tree.body)


def is_text(node: ast.stmt) -> bool:
    """Returns whether a statement is a text and nothing else."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_idle(code: Code, function: Function) -> bool:
    """Returns whether a project that trains calls a function only to evaluate, or never."""
    project, node = code.project, function.node
    if project is None or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    if function.cls is not None and _is_never_made(code, function.cls):
        return True
    if node.decorator_list or function.name.startswith("__") or _HOOKS.fullmatch(function.name):
        return False
    if function.parent is not None or (function.cls and function.cls.inherits_elsewhere()):
        return False
    if not project.trains:
        return False
    if project.mentions(function.name) <= 1:
        return True
    files = project.callers(function.name)
    return bool(files) and all(is_named_for_evaluation(path) for path in files)


def _is_never_made(code: Code, cls: Class) -> bool:
    """Returns whether nobody in a project that trains makes, names or inherits from a class."""
    project = code.project
    if project is None or not project.trains or project.makes_by_path or cls.node.decorator_list:
        return False
    own = code.text.content.count(f"super({cls.name}")
    return project.mentions(cls.name) - own <= 1


def is_beside_training(code: Code, value: Value) -> bool:
    """Returns whether no gradient of a training step is likely to pass a place."""
    if not value.grad or is_evaluation(code):
        return True
    if not is_about_training(code) and not is_called_to_train(code, value):
        return True
    if is_used_only(value) or is_set_up(value) or is_about_data(value):
        return True
    if is_branch_of_use(code, value.node):
        return True
    return value.scope is not None and is_called_without_gradient(code, value.scope)


def is_called_to_train(code: Code, value: Value) -> bool:
    """Returns whether another file of a project that trains calls the function of a place."""
    project, scope = code.project, value.scope
    if project is None or scope is None or not project.trains:
        return False
    files = project.callers(scope.name)
    return any(not is_named_for_evaluation(path) for path in files if path != code.text.path)


def is_called_without_gradient(code: Code, function: Function) -> bool:
    """Returns whether every call of a function in its file is made where none is recorded."""
    calls = Training.of(code).callers(function)
    return bool(calls) and not any(
        call.grad and not is_set_up(call) and not is_branch_of_use(code, call.node)
        for call in calls
    )


def is_called_to_use(code: Code, function: Function) -> bool:
    """Returns whether every call of a function in its file samples or evaluates."""
    calls = Training.of(code).callers(function)
    return bool(calls) and all(
        is_used_only(call) or is_branch_of_use(code, call.node) for call in calls
    )


def is_used_only(value: Value) -> bool:
    """Returns whether a place measures, shows or samples, by the names of functions around it."""
    if is_for_show(value):
        return True
    scope = value.scope
    while scope is not None:
        if _USES.fullmatch(scope.name.lower()) and not _is_part_of_forward(scope):
            return True
        if scope.name == "backward" and scope.cls is not None and scope.cls.is_module():
            return True  # the way back through a flow, by which it is sampled from
        scope = scope.parent
    return False


def _is_part_of_forward(function: Function) -> bool:
    """Returns whether a function that draws samples is called where a model is trained."""
    if function.home is None or not _DRAWS.fullmatch(function.name.lower()):
        return False
    scopes = [call.scope for call in Training.of(function.home).callers(function)]
    return any(scope is not None and _TRAINED.search(scope.name.lower()) for scope in scopes)


def is_set_up(value: Value) -> bool:
    """Returns whether a place is run once, where a module or a table is made."""
    return value.scope is not None and _SETUP.fullmatch(value.scope.name) is not None


def is_about_data(value: Value) -> bool:
    """Returns whether a place reads data, through which no gradient flows."""
    scope = value.scope
    if scope is None:
        return False
    if _DATA_METHODS.fullmatch(scope.name):
        return True
    bases = [base for cls in scope.cls.line_of_descent() for base in cls.bases] if scope.cls else []
    return any(base.rpartition(".")[2].endswith(_DATASETS) for base in bases)


def is_branch_of_use(code: Code, node: ast.AST | None) -> bool:
    """Returns whether a place lies in a branch for sampling or evaluation, as ``if reverse:``."""
    for parent in code.ancestors(node) if node is not None else ():
        if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            return False
        if isinstance(parent, (ast.If, ast.IfExp)) and node is not parent.test:
            taken = node in parent.body if isinstance(parent, ast.If) else node is parent.body
            if _is_asked_to_use(parent.test, holds=taken):
                return True
        node = parent
    return False


def _is_asked_to_use(test: ast.expr, *, holds: bool) -> bool:
    """Returns whether a condition that holds, or does not, says that nobody trains."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _is_asked_to_use(test.operand, holds=not holds)
    if isinstance(test, ast.BoolOp):
        every = isinstance(test.op, ast.And)
        return every is holds and any(_is_asked_to_use(part, holds=holds) for part in test.values)
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        word = test.comparators[0]
        if not isinstance(word, ast.Constant) or not isinstance(word.value, str):
            return False
        same = isinstance(test.ops[0], ast.Eq)
        if not same and not isinstance(test.ops[0], ast.NotEq):
            return False
        known = _USE_WORD if same is holds else _TRAINING_WORD
        return known.fullmatch(word.value.lower()) is not None
    name = getattr(test, "attr", getattr(test, "id", "")).lower()
    flag = _USE if holds else _TRAINING
    return bool(name) and flag.fullmatch(name) is not None
