"""The evidence about one bad step, and what a cause makes of it: suspicion, proof, repair.

Where a plain number came from is a part of the evidence: the line of a schedule, and not the one
that uses it.
"""

from __future__ import annotations

import ast
import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanguard.findings import name_of
from nanguard.replay.live_names import own_nodes
from nanguard.replay.tracer.sites import Site, is_installed, is_users
from nanguard.source.edits import SourceFile, called_name, span_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nanguard.diagnose.lab import Lab, Trial
    from nanguard.diagnose.repairs import Repair
    from nanguard.guard.verdicts import Symptom
    from nanguard.replay.task import Curve, Facts, Loaded, ReplayOutcome
    from nanguard.replay.tracer.op_records import Stats
    from nanguard.replay.tracer.origin import Ancestor, Origin

# The largest number of each 16-bit type.
LARGEST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38}
CASTS = ("_to_copy", "copy")
# Operations that are not defined everywhere, and the argument that this is about.
LOGS = ("log", "log2", "log10", "log1p", "xlogy", "xlog1py", "logit", "lgamma", "digamma")
ROOTS = ("sqrt", "pow", "rsqrt", "float_power")
ARCS = ("acos", "asin", "atanh", "acosh", "erfinv")
SOFTMAX = (
    "_softmax", "_log_softmax", "softmax", "log_softmax", "logsumexp", "_safe_softmax",
    "_masked_softmax",
)  # fmt: skip
STATISTICS = (
    "std", "var", "std_mean", "var_mean", "std_correction", "native_batch_norm",
    "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm", "miopen_batch_norm",
    "batch_norm_stats",
)  # fmt: skip
DIVISIONS = ("div", "reciprocal", "true_divide", "floor_divide", "addcdiv", "rsqrt")
_LOGARITHMS = {
    "log", "log2", "log10", "log1p", "_log_softmax", "log_softmax", "log_sigmoid_forward",
}  # fmt: skip
_PROBABILITIES = {"sigmoid", "_softmax", "softmax", "_safe_softmax"}
# Operations within which a probability is still one: 1 - p, p[rows, y].
_NEAR = 6
EXPONENTIALS = ("exp", "expm1", "exp2", "sinh", "cosh")


class Case:
    """One bad step: what was seen, and the place to try things.

    Attributes:
        outcome: What the traced replay showed.
        origin: Where the first bad value came from.
        lab: Where things are tried.
    """

    def __init__(self, outcome: ReplayOutcome, origin: Origin, lab: Lab) -> None:
        self.outcome = outcome
        self.origin = origin
        self.lab = lab

    @property
    def facts(self) -> Facts:
        """What else the traced replay found out."""
        return self.outcome.facts

    @property
    def symptom(self) -> Symptom:
        """What is wrong with the step."""
        assert self.outcome.symptom is not None  # noqa: S101 - cases are about bad steps
        return self.outcome.symptom

    @property
    def phase(self) -> str:
        """Where in the step it began."""
        return self.origin.phase

    @property
    def op(self) -> str:
        """The operation without its namespace: ``log`` for ``aten.log_``."""
        return bare(self.origin.op)

    @property
    def kernel(self) -> str:
        """The operation that really ran, without its namespace."""
        return bare(self.origin.kernel)

    @property
    def inputs(self) -> list[Stats]:
        """The tensors that went into it."""
        return self.origin.detail.inputs if self.origin.detail else []

    @property
    def is_half(self) -> bool:
        """Whether a 16-bit type was involved at the origin."""
        detail = self.origin.detail
        if detail is None:
            return False
        return detail.output.is_half or any(stats.is_half for stats in detail.inputs)

    @property
    def precision(self) -> str:
        """The narrowest type at the origin."""
        detail = self.origin.detail
        types = [] if detail is None else [detail.output.dtype, *(s.dtype for s in detail.inputs)]
        return next((t for t in types if t in LARGEST), types[0] if types else "float32")

    @property
    def loaded(self) -> Loaded | None:
        """How the tensor at the origin was loaded, if it was bad by then."""
        name = self.origin.parameter
        if name is None or self.origin.op not in ("parameter", "buffer"):
            return None
        found = self.facts.loaded_bad
        return next((found[key] for key in found if name == key or name.endswith(f".{key}")), None)

    def input(self, name: str) -> Stats | None:
        """Returns an input by the name the operation has for it."""
        return next((stats for stats in self.inputs if stats.name == name), None)

    def largest_input(self) -> float:
        """Returns the largest absolute value that went in."""
        values = [abs(v) for s in self.inputs for v in (s.low, s.high) if not math.isnan(v)]
        return max(values, default=0.0)

    @property
    def from_parameters(self) -> bool:
        """Whether a parameter had a part in what went in."""
        return any("parameter" in kinds for kinds in self.origin.sources.values())

    def divisor(self) -> Stats | None:
        """Returns the tensor that is divided by, if it holds a zero."""
        detail = self.origin.detail
        if detail is None:
            return None
        name = {"div": "other", "true_divide": "other", "floor_divide": "other"}.get(
            self.op, "self"
        )
        if self.op == "addcdiv":
            name = "tensor2"
        exponent = detail.scalars.get("exponent")
        negative = isinstance(exponent, (int, float)) and exponent < 0
        if self.op not in DIVISIONS and not (self.op == "pow" and negative):
            return None
        stats = self.input(name)
        return stats if stats is not None and stats.zeros else None

    @property
    def in_hook(self) -> bool:
        """Whether it is code that the script hangs on a gradient: it takes no derivative."""
        site = self.origin.site
        return self.origin.hand_written and site is not None and site.function != "backward"

    @property
    def is_power_of_negative(self) -> bool:
        """Whether a negative number is taken to a power that is no whole one: that is NaN."""
        detail, base = self.origin.detail, self.input("self")
        exponent = None if detail is None else detail.scalars.get("exponent")
        if self.op not in ("pow", "float_power") or base is None or self.origin.hand_written:
            return False
        whole = isinstance(exponent, (int, float)) and float(exponent).is_integer()
        return not whole and min(base.at_fault, default=0.0) < 0

    def by_number_zero(self) -> bool:
        """Returns whether a tensor is divided by a plain number that is 0."""
        detail = self.origin.detail
        number = None if detail is None else detail.scalars.get("other")
        divides = self.op in ("div", "true_divide", "floor_divide")
        return divides and isinstance(number, (int, float)) and number == 0

    def ancestors(self, name: str, within: int = 24) -> list[Ancestor]:
        """Returns the operations an input came from, the nearest first."""
        return [a for a in self.origin.ancestors.get(name, []) if a.distance <= within]

    def ancestor_ops(self, name: str, within: int = 24) -> set[str]:
        """Returns the names of the operations an input came from."""
        return {bare(ancestor.op) for ancestor in self.ancestors(name, within)}

    def made_of(self) -> str:
        """Returns what is known about whole numbers that wrapped around on the way; else ""."""
        wrapped = self.origin.wrapped
        if wrapped is None:
            return ""
        if wrapped.site is None:
            return "; it is made of whole numbers that seem to have gone over the end of their type"
        where = f"{Path(wrapped.site.file).name}:{wrapped.site.line}"
        return f"; it is made of whole numbers that went over the end of their type in {where}"

    def saturates(self, name: str) -> bool:
        """Returns whether an input is a probability that a model put out, so that it may be 0."""
        return bool(self.ancestor_ops(name, _NEAR) & _PROBABILITIES)

    @property
    def is_zero_log_zero(self) -> bool:
        """Whether a probability of 0 was multiplied with its own logarithm, which is -inf."""
        infinite = [s for s in self.inputs if s.neg_infs]
        logs = any(self.ancestor_ops(s.name, 2) & _LOGARITHMS for s in infinite)
        return self.op == "mul" and logs and any(s.zeros for s in self.inputs)

    def in_float32(self) -> Trial:
        """Tries the step without 16-bit types."""
        return self.lab.try_out("everything in float32, without autocast", precision="float32")

    def without_samples(self) -> Trial | None:
        """Tries the step without the samples that are at fault."""
        if not self.facts.samples:
            return None
        listed = ", ".join(map(str, self.facts.samples[:8]))
        return self.lab.try_out(
            f"sample {listed} of the batch replaced by a good one",
            without=tuple(self.facts.samples),
        )

    def without_targets(self) -> Trial | None:
        """Tries the step with other targets for the samples that are at fault."""
        if not self.facts.samples:
            return None
        listed = ", ".join(map(str, self.facts.samples[:8]))
        return self.lab.try_out(
            f"only the target of sample {listed} replaced by that of a good one",
            without=tuple(self.facts.samples),
            targets_only=True,
        )


def bare(op: str) -> str:
    """Returns an operation's name without namespace, overload and in-place mark."""
    name = op.removeprefix("aten.").split(".")[0]
    return name.rstrip("_") or name


@dataclass(slots=True)
class Suspicion:
    """A cause that the evidence speaks for.

    Attributes:
        strength: How much it does, from 0 to 1, before anything was tried.
        summary: What happened, in a sentence with the value.
        evidence: The numbers behind it.
    """

    strength: float
    summary: str
    evidence: list[dict[str, Any]] = field(default_factory=list)


class Cause(ABC):
    """A reason for a step to go bad. One class, one file.

    Attributes:
        code: Its name in incidents; a contract.
        meaning: What it stands for, in a line.
        why: Why it happens and what to do, for ``nanguard explain``.
        lower_rate_helps: Whether a lower learning rate may keep it from happening again.
        lies_in_samples: Whether it comes again with the same samples, whatever the weights are.
    """

    code: str
    meaning: str
    why: str
    lower_rate_helps: bool = True
    lies_in_samples: bool = False

    @abstractmethod
    def suspect(self, case: Case) -> Suspicion | None:
        """Returns what speaks for this cause; None if nothing does."""

    def trials(self, case: Case) -> list[Trial]:
        """Tries what would keep the step finite if this is the cause, and only then."""
        return []

    def concluded(self, case: Case, suspicion: Suspicion) -> str:
        """Returns what happened, in a sentence, now that things have been tried."""
        return suspicion.summary

    def repairs(self, case: Case) -> list[Repair]:
        """Returns what the user can do about it."""
        return []


def all_causes() -> list[Cause]:
    """Returns one of each cause there is, in the order of their codes."""
    from nanguard.diagnose import causes

    found: list[Cause] = []
    for module in pkgutil.iter_modules(causes.__path__):
        loaded = importlib.import_module(f"{causes.__name__}.{module.name}")
        found += [
            member()
            for member in vars(loaded).values()
            if isinstance(member, type)
            and issubclass(member, Cause)
            and member.__module__ == loaded.__name__
        ]
    return sorted(found, key=lambda cause: cause.code)


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
    maker = assigned(file.scope_of(call.lineno), name, call.lineno)
    maker = maker if maker is not None else assigned(file.tree, name, call.lineno)
    return _called_later(file, maker) if isinstance(maker, ast.Call) else None


def _called_later(file: SourceFile, maker: ast.Call) -> Site | None:
    """Returns where the function returns that a call has made, or the object that can be called."""
    name = called_name(maker)
    for path in (file.path, *_imported(file, name)):
        other = SourceFile.open(path)
        for node in () if other is None else ast.walk(other.tree):
            if isinstance(node, ast.ClassDef) and node.name == name:
                calls = [n for n in node.body if isinstance(n, _Function) and n.name == "__call__"]
            elif isinstance(node, _Function) and node.name == name:
                handed = {r.value.id for r in _returns_of(node) if isinstance(r.value, ast.Name)}
                inner = [n for n in ast.walk(node) if isinstance(n, _Function)]
                calls = [n for n in inner if n.name in handed]
            else:
                continue
            if len(calls) == 1 and other is not None:
                return last_return(other, calls[0].name, calls[0].lineno)
    return None


def _returns_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.Return]:
    return [node for node in own_nodes(function.body) if isinstance(node, ast.Return)]


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
    """Returns the line that makes the learning rate that a file sets by hand."""
    sets = [
        node
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Assign) and any(_is_rate(target) for target in node.targets)
    ]
    if not sets:
        return None
    last = max(sets, key=lambda node: node.lineno)
    site = Site(file.path, last.lineno, "")
    return made_at(last.value, site, []) or site


def _is_rate(target: ast.expr) -> bool:
    key = target.slice if isinstance(target, ast.Subscript) else None
    return isinstance(key, ast.Constant) and key.value == "lr"


# Operations between a parameter and the origin: what is farther away has no direct part in it.
_NEAR_PARAMETER = 6
# A curve of fewer points shows no drift.
_LEAST_POINTS = 6
# Drift is a move of at least this size, and of this many times what the quantity was at first.
_LEAST_MOVE, _TIMES = 2.0, 2.0
# It began where this share of the move was behind it for good.
_BEGUN = 0.1


@dataclass(frozen=True, slots=True)
class Drift:
    """A parameter that moved far away from what it was.

    Attributes:
        name: Its name.
        began: The step from which on it moved away.
        curve: Its element farthest from zero, step by step.
    """

    name: str
    began: int
    curve: Curve

    def in_words(self) -> str:
        """Returns what moved, how far and since when."""
        first, last = name_of(self.curve[0][1]), name_of(self.curve[-1][1])
        return f"{self.name} has drifted from {first} to {last} since step {self.began}"

    def to_json(self) -> dict[str, Any]:
        """Returns the drift as an incident holds it."""
        return {"tensor": self.name, "first_step": self.began, "curve": self.curve}


def drift_behind(case: Case) -> Drift | None:
    """Returns the parameter near the origin that has drifted farthest; None if none has."""
    near = {
        ancestor.name
        for stats in case.inputs
        for ancestor in case.ancestors(stats.name, _NEAR_PARAMETER)
        if ancestor.op == "parameter" and ancestor.name
    }
    found = [_drift(name, case.facts.curves[name]) for name in near & set(case.facts.curves)]
    drifts = [drift for drift in found if drift is not None]
    return max(drifts, key=lambda drift: abs(drift.curve[-1][1]), default=None)


def _drift(name: str, curve: Curve) -> Drift | None:
    """Returns a curve as a drift, if it moved far, and not all at once at its end."""
    if len(curve) < _LEAST_POINTS:
        return None
    first, last = curve[0][1], curve[-1][1]
    move = last - first
    if abs(move) < max(_LEAST_MOVE, _TIMES * abs(first)):
        return None
    began = len(curve) - 1
    while began > 0 and (curve[began - 1][1] - first) / move > _BEGUN:
        began -= 1
    # What jumps at its end is an explosion, and no drift.
    return Drift(name, curve[began][0], curve) if began < len(curve) - 3 else None
