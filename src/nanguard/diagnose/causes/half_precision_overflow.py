"""Numbers too large for a 16-bit type."""

from __future__ import annotations

import ast
import math
import re
from typing import TYPE_CHECKING, Any

from nanguard.diagnose.cause import ARCS, CASTS, LARGEST, LOGS, Cause, Suspicion
from nanguard.diagnose.repairs import (
    Repair,
    bounded,
    edit,
    numbers_on_line,
    replaced_text,
    without_samples,
)
from nanguard.source.edits import SourceFile, argument, called_name

if TYPE_CHECKING:
    from nanguard.diagnose.cause import Case
    from nanguard.diagnose.lab import Trial
    from nanguard.replay.tracer.sites import Site

# The smallest float32 rounds to -inf in bfloat16.
_FLOAT32_MIN = r"torch\.finfo\(torch\.float(32)?\)\.min"
# What computes in the type of its operands, under autocast, too: written as a sign, and as a call.
_ARITHMETIC: dict[str, Any] = {
    "add": ast.Add,
    "sub": ast.Sub,
    "mul": ast.Mult,
    "div": ast.Div,
    "pow": ast.Pow,
}
_KEEP_TYPE = ("sum", "mean", "square", "exp", "cumsum", "prod", "var", "std", "norm", "logsumexp")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d*)?(?:e[+-]?\d+)?", re.IGNORECASE)


class HalfPrecisionOverflow(Cause):
    """float16 ends at 65504, bfloat16 a little before float32."""

    code = "half-precision-overflow"
    meaning = "a magnitude beyond the range of a 16-bit type: activation, mask, cast or norm"
    why = (
        "float16 holds numbers up to 65504. Squares, sums, scores and constants like -1e9 are "
        "beyond that sooner than one thinks. Compute that part in float32, use bfloat16, which has "
        "the range of float32, or take the type's own minimum for masks. The extremes of float32 "
        "are too large for bfloat16, too: torch.finfo(torch.float32).min is -inf there."
    )

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether finite numbers became infinite in a 16-bit type."""
        detail, loaded = case.origin.detail, case.loaded
        if loaded is not None and loaded.infinite and loaded.dtype in LARGEST:
            return Suspicion(
                0.88,
                f"{case.origin.parameter} was loaded as {loaded.dtype}, in which what is more than "
                f"{LARGEST[loaded.dtype]:.5g} is inf",
            )
        largest = LARGEST.get(case.precision)
        if detail is None or largest is None:
            return None
        infinite = detail.output.infs + detail.output.neg_infs > 0
        wide = case.precision == "bfloat16"
        constant = self._constant(case, largest)
        if constant is not None and (infinite or not wide):
            summary = f"{constant} does not fit into {case.precision}, it becomes -inf there"
            return Suspicion(0.93, summary)
        singular = case.divisor() is not None or case.op in (*LOGS, *ARCS)
        if not infinite or singular:
            return None
        if wide and not (case.op in CASTS and largest < case.largest_input() < math.inf):
            return None  # what overflows here would have done so in float32 soon after
        evidence = [
            {"what": f"input {s.name} of {case.origin.kernel}", **s.to_json()} for s in case.inputs
        ]
        return Suspicion(
            0.88,
            f"{case.origin.kernel} goes beyond {largest:g}, the largest {case.precision}: its "
            f"inputs reach {case.largest_input():.4g}",
            evidence,
        )

    def _constant(self, case: Case, largest: float) -> str | None:
        detail = case.origin.detail
        scalars = detail.scalars.values() if detail else ()
        for value in scalars:
            if isinstance(value, (int, float)) and largest < abs(value) < math.inf:
                return f"{value:g}"
        sites = [*case.origin.literals, *([case.origin.site] if case.origin.site else [])]
        for site in sites:
            for found in _NUMBER.finditer(site.code):
                text: str = found.group()
                if largest < abs(float(text)) < math.inf:
                    return text
        return None

    def trials(self, case: Case) -> list[Trial]:
        """Computes in float32."""
        return [] if case.loaded is not None else [case.in_float32()]

    def repairs(self, case: Case) -> list[Repair]:
        """Takes a number or a type that fits."""
        if case.loaded is not None:
            kind = case.loaded.dtype
            return [
                Repair(f"save {case.origin.parameter} in float32, and not in {kind}: buffers, too")
            ]
        found: list[Repair] = []
        largest = LARGEST[case.precision]
        for site in [*case.origin.literals, case.origin.site]:
            found += numbers_on_line(
                site,
                f"use a mask constant that {case.precision} can hold: 1e4",
                lambda value: value > largest,
                "1e4",
            )
        if case.precision == "bfloat16":
            found += _own_minimum(case)
        if case.precision == "float16":
            found += _operand_in_float32(case)
        if case.precision == "float16" and case.facts.made is not None:
            summary = "use bfloat16, which has the range of float32, instead of float16"
            if case.facts.autocast == "float16":
                found += replaced_text(
                    case.facts.made, summary, r"torch\.(float16|half)\b", "torch.bfloat16"
                )
            elif case.facts.half_parameters:
                found += replaced_text(case.facts.made, summary, r"\.half\(\)", ".bfloat16()")
        found.append(
            Repair(
                f"compute {case.op} in float32 (x.float(), or autocast(enabled=False) around it)",
                trial=case.in_float32(),
            )
        )
        return found + without_samples(case, "scale or clip such samples")


def _operand_in_float32(case: Case) -> list[Repair]:
    """Takes an operand of what overflows in float32, where the result then is one, too.

    Autocast would make half-precision numbers of the operands of a matrix product again.
    """

    def make(file: SourceFile, site: Site) -> str | None:
        def accept(node: ast.AST) -> bool:
            if isinstance(node, ast.BinOp):
                return isinstance(node.op, _ARITHMETIC.get(case.op, ()))
            return called_name(node) == case.op

        node = file.node_at(site, accept)
        if isinstance(node, ast.BinOp):
            number = isinstance(node.left, ast.Constant)
            operand: ast.expr | None = node.right if number else node.left
        else:
            operand = argument(node) if isinstance(node, ast.Call) else None
        if operand is None:
            return None
        return file.replaced([(operand, bounded(file.text_of(operand), ".float()"))])

    if case.op not in _ARITHMETIC and case.op not in _KEEP_TYPE:
        return []
    return edit(case.origin.site, f"compute {case.op} in float32", make)


def _own_minimum(case: Case) -> list[Repair]:
    """Takes the smallest number of bfloat16 where that of float32 was taken."""
    made = [a.site for s in case.inputs for a in case.ancestors(s.name, 4)]
    for site in (case.origin.site, *made):
        if site is not None and re.search(_FLOAT32_MIN, site.code):
            return replaced_text(
                site,
                f"line {site.line}: mask with the smallest number of bfloat16, not of float32",
                _FLOAT32_MIN,
                "torch.finfo(torch.bfloat16).min",
            )
    return []
