"""Questions that several rules ask about a value: its bounds, what it is made of, its fate."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from nanguard.check.code.calls import last_layer
from nanguard.check.code.origins import origins
from nanguard.check.code.values import INF, Value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.project import Project

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
        if part.op == "parameter":
            return False  # an optimizer moves it
        if part.op == "tensor" and part.inputs and not _is_literal(part.inputs[0]):
            return False  # what the program has collected
        if part.op in _MADE:
            leaves += 1
        elif not part.inputs and part.number() is None and not (part.path or part.items):
            return False
    return leaves > 0


def _is_literal(value: Value) -> bool:
    """Returns whether a value is a number that is written down, or a list of such."""
    if value.items is not None:
        return all(map(_is_literal, value.items))
    return value.number() is not None or isinstance(value.const, bool)


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


_LINEAR = frozenset({"matmul", "einsum", "add", "sub", "spmm"})
_BOUNDING = frozenset({"clamp", "clip", "clamp_max", "minimum", "min", "log", "where"})
_UNBOUNDED = re.compile(r"torch\.nn\.(Linear|Conv\w+|Bilinear|LazyLinear)$")

# What a diffusion model is told about the step: numbers from a sampler or a schedule.
_TIME = re.compile(
    r"(t|ts|t1m|tt|time|times|time_?steps?|t_\w+|sigmas?(_\w+)?|snr|log_?snr|alphas?(_\w+)?"
    r"|betas?(_\w+)?|gammas?(_\w+)?)"
)
_SNR = re.compile(r"(log_?)?snr\w*")
_NO_GRADIENT = frozenset(
    {"compare", "rand", "rand_like", "randint", "randn", "randn_like", "arange", "linspace",
     "detach", "data", "item", "bernoulli", "one_hot", "argmax", "bincount", "size", "shape",
     "numel", "ones", "zeros", "ones_like", "zeros_like", "full", "eye", "histc", "tensor",
     "buffer"}
)  # fmt: skip
_CLIPS = frozenset({"clip", "clamp", "clip_", "clamp_", "clamp_min", "clamp_min_", "nan_to_num"})


def is_of_time(value: Value) -> bool:
    """Returns whether a value is made from a step's time alone, which its sampler bounds."""
    if any(_SNR.fullmatch(name.lower()) for name in names_of(value, 6)):
        return True
    leaves = [*_leaves(value)]
    times = [leaf for leaf in leaves if _is_time(leaf)]
    return bool(times) and all(_is_time(leaf) or not may_learn(leaf) for leaf in leaves)


def may_learn(value: Value) -> bool:
    """Returns whether a gradient may flow back into a value that nothing is known to make."""
    if value.op in _NO_GRADIENT or value.has("size") or value.name == "None" or not value.grad:
        return False
    return value.const is None


def carries_gradient(value: Value) -> bool:
    """Returns whether anything that a value is made from may want a gradient."""
    return any(may_learn(leaf) for leaf in _leaves(value))


def is_made_by_network(code: Code, value: Value) -> bool:
    """Returns whether a layer is seen to make a value, here or where its function is called."""
    if _is_of_network(value):
        return True
    leaves = [part for part in value.upstream(16) if is_open(part)]
    return any(
        _is_unbounded(code, maker)
        for leaf in leaves
        if not origins(code, leaf).activated
        for maker in origins(code, leaf).makers
    )


def is_made_by_layers(code: Code, value: Value) -> bool:
    """Returns whether everything that makes a value is seen, and each is a layer of its own."""
    makers = origins(code, value).makers
    return bool(makers) and all(map(is_layer, makers))


def is_learned(code: Code, value: Value, most: int = 80) -> bool:
    """Returns whether a model or a parameter has a part in a value, through all operations."""
    queue = [value]
    seen: set[int] = set()
    while queue and len(seen) < most:
        part = queue.pop(0)
        if id(part) in seen or part.op in _NO_GRADIENT or not part.grad:
            continue
        seen.add(id(part))
        if part.op == "parameter" or is_layer(part) or (part.op == "call" and part.has("network")):
            return True
        if is_open(part):
            found = origins(code, part)
            if (found.network and not found.detached) or _is_fed_by_models(part):
                return True
            queue += found.makers
        queue += part.inputs[:1] if part.op in ("getitem", "gather") else part.inputs
    return False


def _is_fed_by_models(given: Value) -> bool:
    """Returns whether it is what a module is given that has nothing to learn, such as a loss."""
    scope = given.scope
    cls = scope.cls if scope is not None and scope.name == "forward" else None
    if cls is None or not cls.is_module() or given.op or given.has("labels", "mask"):
        return False
    return not any(
        held.cls is not None or held.core.op in ("parameter", "new", "appended", "buffer")
        for values in cls.attributes.values()
        for held in values
    )


def is_log_scale_of_network(code: Code, value: Value) -> bool:
    """Returns whether it is called a log-scale, and comes out of a model that does not bound it."""
    if not value.has("logscale") or not is_open(value.core):
        return False
    found = origins(code, value)
    return found.network and not found.activated and not any(map(is_kept_in_range, found.makers))


def is_kept_in_range(maker: Value) -> bool:
    """Returns whether an operation bounds what it makes, as a normalisation does."""
    if maker.hi < INF or maker.op in _BOUNDING:
        return True
    called = maker.inputs[0].core.path if maker.op == "call" and maker.inputs else maker.path
    return "Norm" in called


def _is_unbounded(code: Code, maker: Value, depth: int = 2) -> bool:
    """Returns whether a layer makes a value, or what such values are added and multiplied to."""
    if is_layer(maker):
        return True
    if depth <= 0 or maker.op not in _LINEAR or maker.hi < INF:
        return False
    return any(
        _is_unbounded(code, before, depth - 1)
        for part in maker.inputs
        for before in origins(code, part).makers
        if before is not maker
    )


def returned_as(project: Project, name: str) -> Iterator[Value]:
    """Yields what the modules of a project give back under a name, as one part of several."""
    for path, written in project.paths.items():
        if not project.holds(written, name) or not project.holds(written, "def forward"):
            continue
        code = project.outline(path)
        for cls in code.classes.values() if code is not None else ():
            forward = cls.methods.get("forward")
            if code is not None and forward is not None and cls.is_module():
                items = code.result_of(forward).items or ()
                yield from (item for item in items if item.name == name)


def is_open(value: Value) -> bool:
    """Returns whether a value comes from elsewhere: a caller, or a model that is called."""
    if value.op == "":
        return value.scope is not None and value.const is None
    return value.op in ("call", "part", "field", "element")


def is_layer(value: Value) -> bool:
    """Returns whether a layer makes a value whose output has no bounds."""
    path = value.path
    if value.op == "call" and value.inputs:
        called = value.inputs[0].core
        final = last_layer(called) if called.op in ("new", "appended") else None
        path = final.path if final is not None else called.path
    return value.op in ("call", "layer") and _UNBOUNDED.search(path) is not None


def _is_of_network(value: Value) -> bool:
    """Returns whether a layer of the module itself has made a value, and not a model handed in."""
    return any(part.has("network") and _is_of_self(part.node) for part in value.upstream(24))


def _is_of_self(node: ast.AST | None) -> bool:
    while isinstance(node, (ast.Call, ast.Attribute, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id == "self"


def unscaled(value: Value) -> Value:
    """Returns what a value is a multiple of, without its sign and factors that are numbers."""
    for _ in range(6):
        core = value.core
        if core.op == "neg" and core.inputs:
            value = core.inputs[0]
            continue
        if core.op not in ("mul", "div", "add") or len(core.inputs) < 2:
            break
        first, second = core.inputs[:2]
        if core.op == "add":
            if not (is_eps(second) or second.number() is not None):
                break
            value = first
            continue
        if second.number() is not None or second.has("size"):
            value = first
        elif core.op == "mul" and (first.number() is not None or first.has("size")):
            value = second
        else:
            break
    return value


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
        ends = ends or not part.grad  # made where none is recorded
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
    # `log_p` is a logarithm where it is a name, and something for the log where it is a key.
    is_key = not name.isidentifier() or _is_key(code, value.node)
    if _MEASURES.fullmatch(name.lower()) or (is_key and _SHOWN_KEY.match(name.lower())):
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
            if called == "log" and (code.names.path(parent.func) or node is parent.func):
                return "used"  # a logarithm of torch, and nobody's log
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


def _is_key(code: Code, node: ast.AST) -> bool:
    """Returns whether a statement gives what an expression is to a key of a mapping."""
    statement = code.statement_of(node)
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return any(isinstance(target, ast.Subscript) for target in targets)


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
