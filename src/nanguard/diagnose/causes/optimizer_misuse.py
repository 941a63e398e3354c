"""An optimizer, a scaler or a clip that is used wrongly."""

from __future__ import annotations

import ast
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanguard.diagnose.cause import Cause, Suspicion
from nanguard.diagnose.repairs import Repair, bounded_divisor, edit, with_keyword
from nanguard.findings import name_of
from nanguard.source.edits import called_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.diagnose.cause import Case
    from nanguard.diagnose.lab import Trial
    from nanguard.replay.tracer.sites import Site
    from nanguard.source.edits import SourceFile

# What schedules call the share of the run that is over.
_PROGRESS = ("progress", "frac", "fraction")


class OptimizerMisuse(Cause):
    """Loss and gradients would have been fine."""

    code = "optimizer-misuse"
    meaning = "a wrong optimizer, scaler or clip call, or an optimizer with no usable eps"
    why = (
        "The step itself made the bad value: an eps of 0, a learning rate that a schedule turned "
        "into NaN, gradients divided by a norm of 0, or a scaled loss that was stepped without "
        "its scaler. With a GradScaler the order is: scale, backward, unscale_, clip, "
        "scaler.step(optimizer), update."
    )
    lower_rate_helps = False

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether the step, and not the loss, is at fault."""
        rate = case.facts.lr
        if rate is not None and not math.isfinite(rate):
            site = case.origin.site
            where = "" if site is None else f", made so by {Path(site.file).name}:{site.line}"
            if case.facts.schedule_state is not None:
                where = f": {case.facts.schedule_state}"
            return Suspicion(0.97, f"the learning rate is {name_of(rate)}{where}")
        if case.symptom.scaled_by_hand:
            return Suspicion(
                0.95,
                "the loss was scaled by a GradScaler, but the optimizer was stepped without it, "
                "so gradients that overflowed were applied",
            )
        if case.phase == "optimizer":
            eps = case.facts.eps
            note = f"; its eps is {name_of(eps)}" if eps == 0 else ""
            own = "" if case.kernel != "div" else " of the gradients by their own norm of 0"
            return Suspicion(
                0.93 if eps == 0 else 0.85,
                f"{case.origin.op}{own} made a bad value after backward, in the step{note}",
                [
                    {"what": f"input {s.name} of {case.origin.op}", **s.to_json()}
                    for s in case.inputs
                ],
            )
        if case.facts.stale_grads and case.largest_input() > 1e9:
            return Suspicion(0.72, "gradients of earlier steps were never cleared, and add up")
        return None

    def trials(self, case: Case) -> list[Trial]:
        """Clears the gradients, if they were not."""
        if not case.facts.stale_grads or case.phase == "optimizer":
            return []
        return [case.lab.try_out("gradients cleared before each backward", fresh_grads=True)]

    def repairs(self, case: Case) -> list[Repair]:
        """Makes the call as it should be."""
        facts = case.facts
        if case.symptom.scaled_by_hand:
            return edit(
                facts.step_site,
                "let the scaler make the step, and adapt its scale",
                lambda file, site: _by_the_scaler(file, site, facts.scaler_name),
            )
        if facts.schedule_state is not None:
            return [Repair(f"give the schedule good numbers again: {facts.schedule_state}")]
        if facts.lr is not None and not math.isfinite(facts.lr):
            return _bounded_progress(case) or [
                Repair(f"repair the schedule: it makes the learning rate {name_of(facts.lr)}")
            ]
        if facts.eps == 0:
            return with_keyword(facts.made, "eps", "1e-8", "give the optimizer an eps above 0")
        if case.phase == "optimizer" and case.divisor() is not None:
            return bounded_divisor(case)
        if facts.stale_grads:
            return [Repair("clear the gradients in every step: optimizer.zero_grad()")]
        return []


def _bounded_progress(case: Case) -> list[Repair]:
    """Keeps ``1 - step / total`` at 0 or above where a schedule computes with it."""

    def make(file: SourceFile, site: Site) -> str | None:
        around = [
            node
            for node in ast.walk(file.tree)
            if isinstance(node, ast.ClassDef) and node.lineno <= site.line <= (node.end_lineno or 0)
        ]
        for scope in (file.scope_of(site.line), *around):
            found = [node for node in ast.walk(scope) if _is_rest(node)]
            if len(found) == 1:
                return file.replaced([(found[0], f"max({file.text_of(found[0])}, 0.0)")])
        return None

    found = edit(case.origin.site, "keep what is left of the run at 0 or above", make)
    # A schedule that sets the rate by itself is not asked again where only the update is made.
    return [replace(repair, acts_later=case.facts.schedule is None) for repair in found]


def _is_rest(node: ast.AST) -> bool:
    """Returns whether an expression is what is left of a whole: ``1 - step / total``."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Sub):
        return False
    whole, part = node.left, node.right
    divided = isinstance(part, ast.BinOp) and isinstance(part.op, ast.Div)
    named = isinstance(part, ast.Name) and part.id in _PROGRESS
    return isinstance(whole, ast.Constant) and whole.value == 1 and (divided or named)


def _by_the_scaler(file: SourceFile, site: Site, known: str | None) -> str | None:
    """Returns a text in which the scaler makes the step; None if it is not clear how."""
    step = file.node_at(site, lambda node: called_name(node) == "step")
    if not isinstance(step, ast.Call) or not isinstance(step.func, ast.Attribute):
        return None
    scaler = known or next(_scalers_in(file), None)
    if scaler is None:
        return None
    text = f"{scaler}.step({file.text_of(step.func.value)})"
    if f"{scaler}.update(" not in file.text:
        text += f"\n{' ' * step.col_offset}{scaler}.update()"
    return file.replaced([(step, text)])


def _scalers_in(file: SourceFile) -> Iterator[str]:
    """Yields what a file calls the objects that scale its losses."""
    for node in ast.walk(file.tree):
        call = node if isinstance(node, ast.Call) and len(node.args) == 1 else None
        if call and isinstance(call.func, ast.Attribute) and call.func.attr == "scale":
            yield file.text_of(call.func.value)
