"""The evidence about one bad step, and what a cause makes of it: suspicion, proof, repair."""

from __future__ import annotations

import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanguard.diagnose.lab import Lab, Trial
    from nanguard.diagnose.repairs import Repair
    from nanguard.guard.verdicts import Symptom
    from nanguard.replay.task import Facts, Loaded, ReplayOutcome
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
