"""Parameters that were bad from the start."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.diagnose.cause import ARCS, LOGS, ROOTS, Cause, Suspicion
from nanguard.diagnose.repairs import Repair, edit
from nanguard.errors import NanguardError
from nanguard.replay.tracer.op_kinds import UNFILLED
from nanguard.source.edits import called_name

if TYPE_CHECKING:
    from nanguard.check.checkpoint.checkpoint import Measured
    from nanguard.diagnose.cause import Case
    from nanguard.replay.tracer.sites import Site
    from nanguard.source.edits import SourceFile

# What is not defined for every number.
_LIMITED = (*LOGS, *ROOTS, *ARCS, "pow", "_weight_norm", "_weight_norm_interface")
# Steps in which a parameter that nothing has used yet still has its first value.
_EARLY = 2
# Tensors of a file that a sentence names.
_NAMED = 3
# More than any parameter begins with.
_LARGE = 1e6
_UNFILLED = ("empty", "Tensor", "FloatTensor", "empty_like", "new_empty")


class BadInitialization(Cause):
    """A parameter nobody filled, or one whose first value makes its layer undefined."""

    code = "bad-initialization"
    meaning = (
        "a parameter is uninitialised, its initial value makes the layer undefined, or state that "
        "was loaded is bad"
    )
    why = (
        "torch.empty and torch.Tensor(n) hand out memory as it is: sometimes zeros, sometimes NaN. "
        "And a scale that starts at 0 cannot be divided by. Fill every parameter, with a value for "
        "which the layer is defined. Weights, moments and averages that come out of a checkpoint "
        "are as bad as they were when it was saved: `nanguard check FILE` names them. Go back to "
        "an earlier one."
    )
    lower_rate_helps = False

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether a parameter's first value is at fault."""
        bad = _bad_from_the_start(case)
        if bad is not None:
            return bad
        scalars = case.origin.detail.scalars.values() if case.origin.detail else ()
        if any(isinstance(value, float) and not math.isfinite(value) for value in scalars):
            return None  # a number that the script wrote there is bad by itself
        for stats in case.inputs:
            if any(other.nonfinite for other in case.inputs if other is not stats):
                continue  # whatever it began with, it met something worse
            if any(abs(value) > _LARGE for value in stats.at_fault):
                continue  # nobody begins with that: it has grown
            known = case.origin.sources.get(stats.name, set())
            divisor = case.divisor()
            limited = case.op in _LIMITED and bool(stats.at_fault)
            singular = divisor is stats if divisor is not None else limited
            if known == {"parameter"} and singular and case.phase == "forward":
                # What an optimizer has moved is not what it began with, unless it is still 0.
                still = not any(stats.at_fault)
                early = case.outcome.step == 0 or (still and case.outcome.step <= _EARLY)
                names = [a.name for a in case.ancestors(stats.name) if a.op == "parameter"]
                first = names[0] if names else "a parameter"
                return Suspicion(
                    0.8 if early else 0.3,
                    f"{case.op} is not defined for the value that {first} began with",
                    [{"what": f"input {stats.name} of {case.origin.op}", **stats.to_json()}],
                )
        return None

    def repairs(self, case: Case) -> list[Repair]:
        """Fills the parameter."""
        file = case.origin.loaded_from
        if file is not None:
            return [
                Repair(f"go back to a checkpoint before {file}, or load only what is good in it")
            ]
        if case.loaded is not None:
            return [
                Repair("go back to an earlier checkpoint, or load only what is good in this one")
            ]
        if case.phase != "init" and case.op != "empty":
            return self._other_value(case)

        def make(file: SourceFile, site: Site) -> str | None:
            call = file.node_at(site, lambda node: called_name(node) in _UNFILLED)
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                return None
            text = file.text_of(call.func)
            return file.replaced([(call.func, text.rpartition(".")[0] + ".zeros")])

        return edit(case.origin.site, "fill it: torch.zeros, or as the layer is initialised", make)

    def _other_value(self, case: Case) -> list[Repair]:
        names = {
            (a.name or "").rpartition(".")[2]
            for s in case.inputs
            for a in case.ancestors(s.name)
            if a.op == "parameter"
        }

        def make(file: SourceFile, _site: Site) -> str | None:
            for node in ast.walk(file.tree):
                if not isinstance(node, ast.Assign) or not isinstance(
                    node.targets[0], ast.Attribute
                ):
                    continue
                if node.targets[0].attr in names:
                    zeros = [n for n in ast.walk(node.value) if called_name(n) == "zeros"]
                    for call in zeros:
                        assert isinstance(call, ast.Call)  # noqa: S101 - it has a called name
                        text = file.text_of(call.func)
                        return file.replaced([(call.func, text.replace("zeros", "ones"))])
            return None

        return edit(case.origin.site, "begin with a value for which the layer is defined", make)


def _bad_from_the_start(case: Case) -> Suspicion | None:
    """Returns what to say of values that were loaded bad, or that nobody has written."""
    name = case.origin.parameter
    if case.origin.loaded_from is not None:
        return Suspicion(0.89, _loaded(case.origin.loaded_from, name))
    if case.loaded is not None:
        return Suspicion(0.85, f"{name} was not finite in the state that was loaded")
    if case.phase == "init":
        if case.origin.op in ("parameter", "buffer"):
            # Who made it so is another question, which a second run may answer.
            return Suspicion(0.7, f"{name or 'a parameter'} was not finite when the step began")
        return Suspicion(0.95, f"{name or 'a parameter'} holds memory that was never filled")
    if case.origin.kernel in UNFILLED:  # what is copied to a device as a parameter, for example
        return Suspicion(0.85, "memory that was never filled is computed with")
    return None


def _loaded(file: str, parameter: str | None) -> str:
    """Returns what is bad in a file that state was loaded from."""
    name = Path(file).name
    found = _bad_in(file)
    if not found:
        what = "state" if parameter is None else parameter
        return f"{what} came out of {name} with values that are not finite"
    listed = ", ".join(
        f"{tensor.name} ({tensor.numbers.nonfinite} of {tensor.numbers.count})"
        for tensor in found[:_NAMED]
    )
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"{name} holds values that are not finite: {listed}{more}"


def _bad_in(file: str) -> list[Measured]:
    """Returns the tensors of a checkpoint that are not finite, as far as they can be read."""
    from nanguard.check.checkpoint.checkpoint import read_part
    from nanguard.check.scan import Scan

    try:
        return read_part(Path(file), Scan(threads=1)).poisoned
    except (OSError, ValueError, NanguardError):
        return []
