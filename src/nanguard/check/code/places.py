"""Questions about a place in code: whether it trains, and whether gradients flow through it."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from nanguard.check.code.numbers import is_about_training, is_for_show, names_of
from nanguard.check.code.training import Training

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Function
    from nanguard.check.code.values import Value

# Words in the names of files and folders that measure, show or use a model and do not train it.
_EVALUATES = re.compile(
    r"(^|_)(eval(s|uat\w*)?|metrics|accurac\w+|miners?|bench(mark\w*)?|visuali[sz]\w*|plot\w*|demos?|infer\w*"
    r"|predict(or|ing)?|sampl(e|es|ing)|generate|export\w*|analy\w+|compare?|comparison|verif\w+"
    r"|preprocess\w*|prepare|compute|convert\w*)($|_)"
)
_USES = re.compile(
    r"_?(on_(val|validation|test|predict|sanity)\w*|eval\w*|validat\w*|test\w*|sample_\w+|\w+_samples?|visuali[sz]e\w*|plot\w*|generate\w*|reverse"
    r"|infer\w*|predict\w*|interpolat\w*|slerp|compute_metrics?"
    r"|calc(ulate)?_(metric|acc|score|psnr|ssim|iou|map|fid|stat|auc|recall|dice)\w*)"
)
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
# What a diffusion model is told about the step: numbers from a sampler or a schedule.
_TIME = re.compile(
    r"(t|ts|t1m|tt|time|times|time_?steps?|t_\w+|sigmas?(_\w+)?|snr|log_?snr|alphas?(_\w+)?"
    r"|betas?(_\w+)?|gammas?(_\w+)?)"
)
_SNR = re.compile(r"(log_?)?snr\w*")
_NO_GRADIENT = frozenset(
    {"compare", "rand", "rand_like", "randint", "randn", "randn_like", "arange", "linspace",
     "detach", "item", "bernoulli", "one_hot", "argmax", "bincount", "size", "shape", "numel",
     "ones", "zeros", "ones_like", "zeros_like", "full", "eye", "histc", "tensor", "buffer"}
)  # fmt: skip
_CLIPS = frozenset({"clip", "clamp", "clip_", "clamp_", "clamp_min", "clamp_min_", "nan_to_num"})


def is_evaluation(code: Code) -> bool:
    """Returns whether a file measures or uses a model, by its name and by what it does not do."""
    return _is_named_for_evaluation(code.text.path) and not Training.of(code).backwards


def _is_named_for_evaluation(path: str) -> bool:
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
    if _only_uses_weights(code):
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


def _is_idle(code: Code, function: Function) -> bool:
    """Returns whether a project that trains calls a function only to evaluate, or never."""
    project, node = code.project, function.node
    if project is None or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    if node.decorator_list or function.name.startswith("__") or _HOOKS.fullmatch(function.name):
        return False
    if function.parent is not None or (function.cls and function.cls.inherits_elsewhere()):
        return False
    if not project.trains:
        return False
    if project.mentions(function.name) <= 1:
        return True
    files = project.callers(function.name)
    return bool(files) and all(_is_named_for_evaluation(path) for path in files)


def is_beside_training(code: Code, value: Value) -> bool:
    """Returns whether no gradient of a training step is likely to pass a place."""
    if not value.grad or is_evaluation(code):
        return True
    if not is_about_training(code) and not is_called_to_train(code, value):
        return True
    if is_used_only(value) or is_set_up(value) or is_about_data(value):
        return True
    return value.scope is not None and is_called_without_gradient(code, value.scope)


def is_called_to_train(code: Code, value: Value) -> bool:
    """Returns whether another file of a project that trains calls the function of a place."""
    project, scope = code.project, value.scope
    if project is None or scope is None or not project.trains:
        return False
    files = project.callers(scope.name)
    return any(not _is_named_for_evaluation(path) for path in files if path != code.text.path)


def is_called_without_gradient(code: Code, function: Function) -> bool:
    """Returns whether every call of a function in its file is made where none is recorded."""
    calls = Training.of(code).callers(function)
    return bool(calls) and not any(call.grad and not is_set_up(call) for call in calls)


def is_used_only(value: Value) -> bool:
    """Returns whether a place measures, shows or samples, by the names of functions around it."""
    if is_for_show(value):
        return True
    scope = value.scope
    while scope is not None:
        if _USES.fullmatch(scope.name.lower()):
            return True
        scope = scope.parent
    return False


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


def is_of_time(value: Value) -> bool:
    """Returns whether a value is made from a step's time alone, which its sampler bounds."""
    if any(_SNR.fullmatch(name.lower()) for name in names_of(value, 6)):
        return True
    leaves = [*_leaves(value)]
    times = [leaf for leaf in leaves if _is_time(leaf)]
    return bool(times) and all(_is_time(leaf) or not may_learn(leaf) for leaf in leaves)


def may_learn(value: Value) -> bool:
    """Returns whether a gradient may flow back into a value that nothing is known to make."""
    if value.op in _NO_GRADIENT or value.has("size") or value.name == "None":
        return False
    return value.const is None


def carries_gradient(value: Value) -> bool:
    """Returns whether anything that a value is made from may want a gradient."""
    return any(may_learn(leaf) for leaf in _leaves(value))


def is_clipped(code: Code, node: ast.AST | None) -> bool:
    """Returns whether what an expression gives is clipped at once."""
    for parent in code.ancestors(node) if node is not None else ():
        if isinstance(parent, ast.Attribute):
            if parent.attr in _CLIPS:
                return True
        elif isinstance(parent, ast.Call):
            called = getattr(parent.func, "attr", getattr(parent.func, "id", ""))
            if called in _CLIPS and node in parent.args[:1]:
                return True
            if not isinstance(parent.func, ast.Attribute) or node is not parent.func:
                return False
        else:
            return False
        node = parent
    return False


def _is_time(leaf: Value) -> bool:
    return leaf.op in ("", "attribute") and _TIME.fullmatch(leaf.name.lower()) is not None


def _leaves(value: Value, limit: int = 60) -> Iterator[Value]:
    """Yields what a value is made from that is not made from anything else."""
    seen: set[int] = set()
    queue = [value]
    while queue and len(seen) < limit:
        part = queue.pop(0)
        if id(part) in seen or part.op == "self":
            continue
        seen.add(id(part))
        ends = not part.inputs or part.op in _NO_GRADIENT or part.op == "attribute"
        if ends or part.op in ("call", "field", "parameter"):
            yield part
        else:
            # What picks elements has no part in their numbers.
            queue += part.inputs[:1] if part.op in ("getitem", "gather") else part.inputs
