"""The mean or the maximum of nothing."""

from __future__ import annotations

import ast
import math
import re
from typing import TYPE_CHECKING

from nanguard.diagnose.cause import Cause, Suspicion
from nanguard.diagnose.repairs import Repair, edit, set_keyword, without_samples
from nanguard.replay.tracer.op_kinds import EXTREMES, nothing_left
from nanguard.source.edits import argument, called_name

if TYPE_CHECKING:
    from nanguard.diagnose.cause import Case
    from nanguard.replay.tracer.sites import Site
    from nanguard.source.edits import SourceFile

_MEANS = ("mean", "nanmean", "median", "std", "var", "mse_loss", "l1_loss", "smooth_l1_loss")
_CHOICES = ("amax", "amin", "scatter_reduce", "index_reduce", "segment_reduce")
# What gives an empty tensor its values reduces nothing.
_FILLING = ("set", "copy", "resize")
_IGNORING = ("nll_loss_forward", "nll_loss2d_forward")


class EmptyReduction(Cause):
    """A mean over zero elements, or a maximum over what is masked."""

    code = "empty-reduction"
    meaning = "a mean over zero elements; all labels ignored; a maximum with nothing left"
    why = (
        "A selection was empty for this batch, or every label was one that the loss ignores. The "
        "mean of nothing is 0/0. Divide the sum by the count, bounded below by 1, or skip the term."
        " The maximum of a row in which everything is masked, or of a segment without members, is "
        "the -inf it began with. Give such rows a value of their own."
    )
    lower_rate_helps = False
    lies_in_samples = True

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether there was nothing to reduce."""
        if case.phase == "backward":
            return None
        if case.origin.op in EXTREMES or case.op == "segment_reduce":
            return _nothing_left(case)
        if case.origin.intended:
            return None
        empty = [stats for stats in case.inputs if stats.count == 0]
        if empty and len(empty) == len(case.inputs) and case.op not in _FILLING:
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
            new = _sum_by_count(file, call, inner)
            return None if new is None else file.replaced([(call, new)])

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

        if case.origin.op in EXTREMES or case.op == "segment_reduce":
            found = _own_value(case)
        elif case.op in _IGNORING:
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


def _sum_by_count(file: SourceFile, call: ast.Call, inner: ast.expr) -> str | None:
    """Returns a mean as a sum divided by a count of at least 1, over the same dimension."""
    keywords = {keyword.arg: file.text_of(keyword.value) for keyword in call.keywords}
    rest = [file.text_of(arg) for arg in call.args if arg is not inner]
    text = file.text_of(inner)
    whole = text if text.isidentifier() else f"({text})"
    if not rest and not keywords:
        return f"({whole}.sum() / max({whole}.numel(), 1))"
    over = keywords.get("dim", rest[0] if rest else None)
    if over is None or len(rest) > 2 or not re.fullmatch(r"-?\d+", over):
        return None  # over several dimensions, or in another type
    asked = ", ".join([*rest, *(f"{name}={value}" for name, value in keywords.items())])
    return f"({whole}.sum({asked}) / max({whole}.shape[{over}], 1))"


def _nothing_left(case: Case) -> Suspicion | None:
    """Returns whether an infinity is what a maximum or minimum of nothing is."""
    detail = case.origin.detail
    if detail is None or (not case.origin.intended and any(s.nonfinite for s in case.inputs)):
        return None
    out = detail.output
    low, high = -math.inf if out.neg_infs else out.low, math.inf if out.infs else out.high
    asked = detail.scalars.get("reduce")
    segments = case.op == "segment_reduce" and math.isinf(low + high)
    if out.nans or not (segments or nothing_left(case.origin.op, asked, low, high)):
        return None
    return Suspicion(
        0.9,
        f"{case.op} had nothing to choose from for {out.nonfinite} of {out.count} results: a row "
        "that is masked whole, or a segment without members",
        [
            {"what": f"input {s.name} of {case.origin.op}", **s.to_json()}
            for s in case.inputs
            if "float" in s.dtype
        ],
    )


def _own_value(case: Case) -> list[Repair]:
    """Gives results for which there was nothing to choose from the value 0."""
    detail = case.origin.detail
    which = "posinf" if detail is not None and detail.output.infs else "neginf"

    def make(file: SourceFile, site: Site) -> str | None:
        call = file.node_at(site, lambda node: called_name(node) in _CHOICES)
        if not isinstance(call, ast.Call):
            return None
        # NaN is to be seen as before.
        return file.replaced(
            [(call, f'{file.text_of(call)}.nan_to_num(nan=float("nan"), {which}=0.0)')]
        )

    return edit(case.origin.site, "take 0 where there is nothing to choose from", make)
