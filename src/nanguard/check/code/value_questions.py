"""Questions that several rules ask about a value: its bounds, its place, what becomes of it."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from nanguard.check.code.branches import is_branch_of_use
from nanguard.check.code.training import Training
from nanguard.check.code.values import INF, Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.scopes import Class, Function

# What an expression may be made of and still be a table: numbers known before training.
_TABLE = frozenset(
    {
        "linspace", "arange", "cumprod", "cumsum", "ones", "zeros", "logspace", "flip", "tensor",
        "as_tensor", "full", "neg", "add", "sub", "mul", "div", "pow", "sqrt", "log", "exp", "cos",
        "clamp", "named", "getitem", "cat", "float", "double", "to", "stack", "view", "eye",
        "type_as", "norm", "sum", "mean", "sin", "setitem", "unsqueeze", "reshape", "std", "var",
        "max", "min", "abs", "meshgrid", "expand", "repeat", "floor", "join", "squeeze",
        "math.log", "math.sqrt", "math.exp", "math.cos", "math.sin", "outer", "floordiv", "mod",
    }
)  # fmt: skip
_PICKS = frozenset({"getitem", "setitem"})
# What people call sizes and other whole numbers that a table is made from.
_SIZES = re.compile(
    r"(d|n|q|t|h|w|num|dim|len|max|min|in|out|embed\w*|hidden|head|base|theta|steps?|size|length)"
    r"(_\w+)?|\w+_(dim|len|size|length|steps|model|channels|features)|temperature|exponential"
)
_MADE = frozenset(
    {"tensor", "randint", "rand", "randn", "ones", "zeros", "full", "arange", "linspace", "eye"}
)
_TRUTH = re.compile(r"(^|_)(gt|truth|target|label|true|ref)(s|_|$)|groundtruth")
_SHOW = re.compile(
    r"metrics|eval|visual|plot|draw|accuracy|psnr|nmse|distortion_ratio|confusion|meter$|evaluator"
    r"|_(mae|rmse|fid|ssim|iou|auc)$"
)
_SAFE_LEAVES = frozenset({"linspace", "arange", "ones", "zeros", "logspace", "full", "eye"})


def can_be_zero(value: Value) -> bool:
    """Returns whether nothing keeps a value away from zero."""
    if value.lo > 0 or value.hi < 0 or value.has("padded", "chosen", "bounded-below"):
        return False
    return not (is_guarded(value) or is_table(value) or is_made_here(value))


def is_guarded(value: Value) -> bool:
    """Returns whether a condition around a place has looked at a value."""
    guards = value.guards
    return bool(guards) and any(name in guards for name in names_of(value))


def guarded_by(value: Value, guards: frozenset[str]) -> bool:
    """Returns whether one of these conditions has looked at a value."""
    return bool(guards) and any(name in guards for name in names_of(value))


def names_of(value: Value, limit: int = 12) -> Iterator[str]:
    """Yields the names a value has, and those of what it was made from directly."""
    for step, part in enumerate(value.upstream(limit)):
        if part.name and (
            part.op in ("named", "", "attribute", "field", "join", "getitem") or step == 0
        ):
            yield part.name


def is_table(value: Value) -> bool:
    """Returns whether a value is computed from constants alone, such as a noise schedule."""
    leaves = 0
    seen: set[int] = set()
    queue = [value]
    while queue and len(seen) < 60:
        part = queue.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        if part.op in _SAFE_LEAVES:
            leaves += 1  # how many there are is no matter
        elif part.inputs:
            if part.op not in _TABLE:
                return False
            # What picks elements has no part in their numbers.
            queue += [part.inputs[0], *part.inputs[2:]] if part.op in _PICKS else part.inputs
        elif part.number() is None and not _SIZES.fullmatch(part.name.lower()):
            return False
    return leaves > 0


def is_made_here(value: Value) -> bool:
    """Returns whether a value is made from literals and random numbers alone, as tests do it."""
    leaves = 0
    for part in value.upstream(40):
        if part.op in _MADE:
            leaves += 1
        elif not part.inputs and part.number() is None and not (part.path or part.items):
            return False
    return leaves > 0


def is_bounded(value: Value) -> bool:
    """Returns whether a value has an upper bound."""
    return value.hi < INF or value.has("shifted", "bounded-above")


def is_minus_inf(value: Value | None) -> bool:
    """Returns whether a value is minus infinity."""
    return value is not None and value.number() == -INF


def is_number(value: Value) -> bool:
    """Returns whether a value is a Python number, through which no gradient flows."""
    return any(part.op in ("item", "tolist", "numpy", "total") for part in value.upstream(16))


def is_given(value: Value) -> bool:
    """Returns whether a value is made from ground truth alone, which needs no gradient."""
    leaves = [part for part in value.upstream(24) if not part.inputs and part.number() is None]
    return bool(leaves) and all(_TRUTH.search(part.name.lower()) for part in leaves)


def is_for_show(value: Value) -> bool:
    """Returns whether a place is about measuring or showing, going by names around it."""
    scope = value.scope
    if scope is None:
        return False
    around = scope.name + (f" {scope.cls.name}" if scope.cls is not None else "")
    return bool(_SHOW.search(around.lower()))


def is_about_training(code: Code) -> bool:
    """Returns whether gradients flow in a file, as far as it says: a module, a loss, a step."""
    return "backward" in code.operations or any(
        "loss" in function.name.lower() or (function.cls is not None and function.cls.is_module())
        for function in code.functions
    )


def ends_as_number(code: Code, node: ast.AST | None) -> bool:
    """Returns whether an expression is turned into a Python number where it stands."""
    for parent in code.ancestors(node) if node is not None else ():
        if isinstance(parent, ast.stmt):
            return False
        if isinstance(parent, ast.Attribute) and parent.attr in ("item", "tolist"):
            return True
        if isinstance(parent, ast.Call) and getattr(parent.func, "id", "") in ("float", "int"):
            return True
    return False


# The largest number that is added to keep away from zero, and not for its own sake.
LARGEST_EPS = 1e-3


def is_eps(value: Value) -> bool:
    """Returns whether a value is a small number that is added for safety."""
    number = value.number()
    if number is not None:
        return 0 < number <= LARGEST_EPS
    return value.has("eps")


def has_eps_outside(code: Code, quotient: Value) -> bool:
    """Returns whether an eps is added to a quotient, where it protects nothing."""
    node = quotient.node
    for parent in code.ancestors(node) if node is not None else ():
        if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.Add):
            other = parent.right if parent.left is node else parent.left
            value = code.values.get(other)
            return value is not None and is_eps(value)
        if not isinstance(parent, ast.BinOp):
            return False
        node = parent
    return False


def some_module_returns(code: Code, kind: str) -> bool:
    """Returns whether the forward of a module of the file gives back a value of a kind."""
    for cls in code.classes.values():
        forward = cls.methods.get("forward")
        if forward is None or not cls.is_module():
            continue
        for result in forward.returns:
            if any(part.has(kind) for part in (result, *(result.items or ()))):
                return True
    return False


def is_module_output(value: Value, use: Value) -> bool:
    """Returns whether a value was made in the forward of another module than where it is used."""
    scope, here = value.scope, use.scope
    if scope is None or scope is here or scope.name != "forward" or scope.cls is None:
        return False
    return here is None or here.cls is not scope.cls


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
_VENDORED = re.compile(r"(^|/)(third_?party|3rd_?party|vendor(ed)?|externals?|submodules)/")
_SNR = re.compile(r"(log_?)?snr\w*")
_NO_GRADIENT = frozenset(
    {"compare", "rand", "rand_like", "randint", "randn", "randn_like", "arange", "linspace",
     "detach", "data", "item", "bernoulli", "one_hot", "argmax", "bincount", "size", "shape",
     "numel", "ones", "zeros", "ones_like", "zeros_like", "full", "eye", "histc", "tensor",
     "buffer"}
)  # fmt: skip
_INERT = (
    ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Assign,
    ast.AnnAssign,
)  # fmt: skip
_CLIPS = frozenset({"clip", "clamp", "clip_", "clamp_", "clamp_min", "clamp_min_", "nan_to_num"})


def is_evaluation(code: Code) -> bool:
    """Returns whether a file measures or uses a model, by its name and by what it does not do."""
    return _is_named_for_evaluation(code.text.path) and not Training.of(code).backwards


def is_vendored(code: Code) -> bool:
    """Returns whether a file is a copy of somebody else's, by the folder it lies in."""
    return _VENDORED.search(code.text.path.replace("\\", "/").lower()) is not None


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
    if _only_uses_weights(code) or _is_left_over(code):
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
    return bool(files) and all(_is_named_for_evaluation(path) for path in files)


def _is_never_made(code: Code, cls: Class) -> bool:
    """Returns whether nobody in a project that trains makes, names or inherits from a class."""
    project = code.project
    if project is None or not project.trains or not project.is_closed or cls.node.decorator_list:
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
    return any(not _is_named_for_evaluation(path) for path in files if path != code.text.path)


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


# Methods that give a Python number or an array, through which no gradient flows.
_LEAVES = frozenset({"item", "tolist", "numpy", "cpu", "detach", "round", "long", "int"})
# What keeps a value as it is on its way there.
_KEEPS = frozenset(
    {"float", "mean", "sum", "squeeze", "view", "reshape", "double", "to", "max", "min", "clone"}
)
_SHOWS = re.compile(
    r"print|log|log_dict|log_metrics|logger|info|debug|warning|write|add_scalars?|add_histogram"
    r"|add_image|set_postfix(_str)?|set_description|report|display|imshow|plot|record|format|tqdm"
    r"|save_image|imsave|imwrite|update_meter|str"
)
_MEASURES = re.compile(
    r"(.*_)?(acc|accuracy|accs|epe|prec|precision|recall|f1|iou|miou|dice_?score|psnr|ssim|mae|rmse|metrics?"
    r"|top\d|ppl|perplexity|correct|wer|cer|auc|ndcg|mrr)(_.*|\d*)|m?ap"
)
_SHOWN_KEY = re.compile(r"(print|logs?|debug|stats?|metrics?|vis|monitor)[/_.]")
_NAN_EXPECTED = frozenset({"nan_to_num", "nan_to_num_", "nanmean", "nansum", "nanmedian"})
_STOPS_GRADIENT = frozenset({"round", "floor", "ceil", "trunc", "argmax", "argmin", "int", "long"})


def is_only_shown(code: Code, value: Value) -> bool:
    """Returns whether a value goes nowhere but to a log, a screen or a measure of quality."""
    if value.node is None:
        return False
    end = _end(code, value.node)
    if end == "shown":
        return True
    name = _given_name(code, value.node)
    if name is None or value.scope is None:
        return False
    if _MEASURES.fullmatch(name.lower()) or _SHOWN_KEY.match(name.lower()):
        return True
    uses = [*_uses(code, value, name)]
    return bool(uses) and all(_end(code, use) == "shown" for use in uses)


def is_repaired_at_once(code: Code, node: ast.AST | None) -> bool:
    """Returns whether NaN in what an expression gives is replaced where it stands."""
    for parent in code.ancestors(node) if node is not None else ():
        if isinstance(parent, ast.stmt):
            return False
        called = _called(parent)
        if called in _NAN_EXPECTED:
            return True
        if isinstance(parent, ast.Attribute) and parent.attr in _NAN_EXPECTED:
            return True
    return False


def is_repaired_below(code: Code, node: ast.AST | None) -> bool:
    """Returns whether the next statement replaces NaN in what the one of an expression assigns."""
    statement = code.statement_of(node) if node is not None else None
    if statement is None:
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    body = getattr(code.parents.get(statement), "body", None)
    below = body[body.index(statement) + 1 :][:1] if isinstance(body, list) and names else []
    return any(
        _called(node) in (*_NAN_EXPECTED, "isnan")
        and any(getattr(a, "id", "") in names for a in node.args)
        for after in below
        if not isinstance(after, ast.If)
        for node in ast.walk(after)
        if isinstance(node, ast.Call)
    )


def is_rounded(code: Code, node: ast.AST | None) -> bool:
    """Returns whether what an expression gives is rounded, which stops its gradient."""
    for parent in code.ancestors(node) if node is not None else ():
        if isinstance(parent, ast.stmt):
            return False
        if _called(parent) in _STOPS_GRADIENT or (
            isinstance(parent, ast.Attribute) and parent.attr in _STOPS_GRADIENT
        ):
            return True
    return False


def _end(code: Code, node: ast.AST) -> str:
    """Returns ``shown`` if an expression ends in something that is only looked at."""
    for parent in code.ancestors(node):
        if isinstance(parent, (ast.FormattedValue, ast.JoinedStr)):
            return "shown"
        if isinstance(parent, ast.Attribute) and parent.attr == "data":
            return "shown"
        if isinstance(parent, ast.Call):
            called = _called(parent)
            if called in _LEAVES or _SHOWS.fullmatch(called):
                return "shown"
            if called in ("int", "len", "isinstance"):
                return "shown"
            if node is not parent.func and called not in _KEEPS and called != "float":
                return "used"
        elif isinstance(parent, ast.stmt):
            return "used"
        node = parent
    return "used"


def _given_name(code: Code, node: ast.AST) -> str | None:
    """Returns the name that a statement gives what an expression is the whole value of."""
    statement = code.statement_of(node)
    if isinstance(statement, ast.AugAssign):
        target: ast.expr | None = statement.target
    elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    else:
        return None
    if isinstance(target, ast.Subscript):
        return _beginning(target.slice)
    return target.id if isinstance(target, ast.Name) else None


def _beginning(key: ast.expr) -> str | None:
    """Returns a key, or the text that one begins with which is put together."""
    if isinstance(key, ast.BinOp):
        return _beginning(key.left)
    if isinstance(key, ast.JoinedStr):
        return _beginning(key.values[0]) if key.values else None
    return str(key.value) if isinstance(key, ast.Constant) else None


def _uses(code: Code, value: Value, name: str) -> Iterator[ast.Name]:
    """Yields where a name is read after a value was given to it, in the same function."""
    scope = value.scope.node if value.scope is not None else None
    if scope is None:
        return
    for node in ast.walk(scope):
        if (
            isinstance(node, ast.Name)
            and node.id == name
            and isinstance(node.ctx, ast.Load)
            and node.lineno > value.line
        ):
            yield node


def _called(node: ast.AST) -> str:
    if not isinstance(node, ast.Call):
        return ""
    return str(getattr(node.func, "attr", getattr(node.func, "id", "")))
