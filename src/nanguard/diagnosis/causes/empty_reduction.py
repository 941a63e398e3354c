"""The mean of nothing."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

from nanguard.diagnosis.cause import Cause, Suspicion
from nanguard.diagnosis.edits import argument, called_name
from nanguard.diagnosis.repairs import Repair, edit, set_keyword, without_samples

if TYPE_CHECKING:
    from nanguard.diagnosis.case import Case
    from nanguard.diagnosis.edits import SourceFile
    from nanguard.tracer.sites import Site

_MEANS = ("mean", "nanmean", "median", "std", "var", "mse_loss", "l1_loss", "smooth_l1_loss")
_IGNORING = ("nll_loss_forward", "nll_loss2d_forward")


class EmptyReduction(Cause):
    """A mean over zero elements."""

    code = "empty-reduction"
    meaning = "a mean over zero elements; all labels ignored"
    why = (
        "A selection was empty for this batch, or every label was one that the loss ignores. The "
        "mean of nothing is 0/0. Divide the sum by the count, bounded below by 1, or skip the term."
    )

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether there was nothing to reduce."""
        if case.phase == "backward" or case.origin.intended:
            return None
        empty = [stats for stats in case.inputs if stats.count == 0]
        if empty:
            return Suspicion(
                0.95,
                f"{case.op} over a selection of shape {list(empty[0].shape)}, which is empty",
                [{"what": f"input of {case.origin.op}", "shape": list(empty[0].shape)}],
            )
        if case.op in _IGNORING and not any(stats.nonfinite for stats in case.inputs):
            return Suspicion(0.95, "every label of the batch is one that the loss ignores")
        return None

    def repairs(self, case: Case) -> list[Repair]:
        """Divides by at least 1."""

        def mean(file: SourceFile, site: Site) -> str | None:
            call = file.node_at(site, lambda node: called_name(node) in _MEANS)
            inner = argument(call) if isinstance(call, ast.Call) else None
            if inner is None or not isinstance(call, ast.Call) or called_name(call) != "mean":
                return None
            if isinstance(call.func, ast.Attribute) and inner is call.func.value and call.args:
                return None
            text = file.text_of(inner)
            whole = text if text.isidentifier() else f"({text})"
            return file.replaced([(call, f"({whole}.sum() / max({whole}.numel(), 1))")])

        def cross_entropy(file: SourceFile, site: Site) -> str | None:
            call = file.node_at(site, lambda n: called_name(n) in ("cross_entropy", "nll_loss"))
            if not isinstance(call, ast.Call) or len(call.args) < 2:
                return None
            ignored = next((k for k in call.keywords if k.arg == "ignore_index"), None)
            index = "-100" if ignored is None else file.text_of(ignored.value)
            target = file.text_of(call.args[1])
            before = file.text_of(call)
            changed = set_keyword(file, call, "reduction", '"sum"')
            # The call is the only thing that changed, so its new text is what lies between.
            start = file.text.index(before)
            new = changed[start : len(changed) - (len(file.text) - start - len(before))]
            return changed.replace(new, f"({new} / (({target}) != {index}).sum().clamp(min=1))")

        if case.op in _IGNORING:
            found = edit(
                case.origin.site,
                "divide the sum by the number of labels, at least 1",
                cross_entropy,
            )
        else:
            found = edit(
                case.origin.site, "divide the sum by the count, at least 1, not by nothing", mean
            )
        return found + without_samples(case, "leave out batches in which nothing is selected")
