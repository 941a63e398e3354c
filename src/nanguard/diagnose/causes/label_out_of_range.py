"""Targets outside the domain of the loss."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import TYPE_CHECKING

from nanguard.diagnose.cause import ARCS, LOGS, ROOTS, Cause, Suspicion
from nanguard.diagnose.repairs import (
    Repair,
    edit,
    finite_masks,
    set_keyword,
    silencing,
    with_keyword,
    without_samples,
)
from nanguard.findings import name_of

if TYPE_CHECKING:
    from nanguard.diagnose.cause import Case
    from nanguard.diagnose.lab import Trial
    from nanguard.replay.tracer.op_records import Stats
    from nanguard.replay.tracer.sites import Site
    from nanguard.source.edits import SourceFile

_CHOOSES = ("nll_loss_forward", "nll_loss2d_forward", "nll_loss_nd", "gather", "index", "take")
_LIMITED = (*LOGS, *ROOTS, *ARCS)
_ZERO = ("log", "log2", "log10", "xlogy")
# What takes back tanh, a sigmoid and the normal distribution; names of methods that score a value.
_UNSQUASHED = ("atanh", "logit", "erfinv")
_SCORING = ("log_prob", "logprob", "log_likelihood", "nll", "loss")
# A root of something this little below zero is a matter of rounding.
_ROUNDING = 1e-3


class LabelOutOfRange(Cause):
    """A target that the loss is not defined for."""

    code = "label-out-of-range"
    meaning = (
        "a target is outside the loss's domain: a 0/255 mask, a negative count for a log, an "
        "action on the tanh bound, a class that is masked, a text that CTC cannot align"
    )
    why = (
        "The model is fine and so is the loss, but this target is not one the loss is defined "
        "for. Clamping it into range would train on a wrong target in silence. Check the label "
        "map, the scale of masks (0/255 or 0/1) and the lengths, and repair or drop the sample."
    )
    lower_rate_helps = False
    lies_in_samples = True

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether the operand at fault comes from the targets alone."""
        if case.phase != "forward":
            return None
        if case.op.endswith("ctc_loss"):
            return Suspicion(
                0.95,
                "CTC finds no way to align a target with its input: the target is too long, "
                "where repeated symbols need a blank between them",
            )
        if case.origin.intended and (_chose(case) or _smoothed(case)):
            if case.op == "logsumexp":
                return None
            if _smoothed(case):
                return Suspicion(
                    0.9,
                    "label smoothing gives a share of the target to classes whose logits are "
                    "masked with -inf, so the loss is inf",
                )
            return Suspicion(
                0.9, "the target is a class whose logit was masked with -inf, so its loss is inf"
            )
        if case.op not in _LIMITED or not (case.origin.module == "loss" or _scores(case)):
            return None
        return self._from_targets(case)

    def _from_targets(self, case: Case) -> Suspicion | None:
        if case.origin.wrapped is not None:
            return None  # the script has made a wrong number of good data
        stats = self._from_data(case)
        if stats is not None and _is_distribution(case):
            return Suspicion(
                0.85,
                f"log_prob of a value outside of the distribution's support, or on its edge: "
                f"{case.op} of {name_of(stats.at_fault[0])}",
                [{"what": f"input {stats.name} of {case.origin.op}", **stats.to_json()}],
            )
        if stats is not None:
            value = stats.at_fault[0]
            near = case.ancestors(stats.name, 1)
            # 0 * log(0) is a fault of the formula, and not of the target.
            formula = value == 0 and case.op in _ZERO and any(a.op == "input" for a in near)
            formula = formula or (case.op in ROOTS and value > -_ROUNDING)
            return Suspicion(
                0.4 if formula else 0.85,
                f"{case.op} of {name_of(value)}, which comes from the data and not from the model",
                [{"what": f"input {stats.name} of {case.origin.op}", **stats.to_json()}],
            )
        # A probability that has become 0 is the model's, whichever target asks for it.
        found = [value for stats in case.inputs for value in stats.at_fault]
        vanished = case.op in _ZERO and bool(found) and not any(found)
        if case.facts.samples and not vanished:
            # The target may be mixed with what the model put out; a trial will tell.
            return Suspicion(0.5, f"{case.op} is not defined for what this target makes of it")
        return None

    @staticmethod
    def _from_data(case: Case) -> Stats | None:
        """Returns an operand at fault that no parameter had a part in."""
        for stats in case.inputs:
            known = case.origin.sources.get(stats.name, set())
            if case.saturates(stats.name):
                continue  # the model's, even where its parameters are not known as such
            if not stats.shape and any(a.op == "input" for a in case.ancestors(stats.name, 1)):
                continue  # one number that the script has computed: a weight, a schedule
            if stats.at_fault and "data" in known and "parameter" not in known:
                return stats
        return None

    def trials(self, case: Case) -> list[Trial]:
        """Replaces the targets, and nothing else."""
        if case.origin.intended:
            return []  # the target of another sample may be masked here, too
        # What comes from the data alone may be an input, too, as in an autoencoder.
        alone = self._from_data(case) is not None
        trial = case.without_samples() if alone else case.without_targets()
        return [trial] if trial else []

    def repairs(self, case: Case) -> list[Repair]:
        """Repairs the target, or makes the loss tell it apart."""
        what = "repair or drop the target; check the label map and scale"
        if _is_distribution(case):
            what = "keep the value inside of the support, where it is stored or clamped"
        if case.origin.intended and _smoothed(case):
            return _without_smoothing(case) + silencing(
                finite_masks(case), "masked classes still take a share of the target"
            )
        found = without_samples(case, what)
        if case.op.endswith("ctc_loss"):
            summary = "let CTC ignore targets that cannot be aligned: zero_infinity=True"
            found += with_keyword(
                case.origin.site, "zero_infinity", "True", summary, called="ctc_loss"
            )
        if case.origin.intended:
            found += finite_masks(case)
        return found


def _chose(case: Case) -> bool:
    """Returns whether the target chose the bad value among others, as a cross-entropy does."""
    if case.op in _CHOOSES:
        return True
    passed = (step["op"].rpartition(".")[2] for step in case.facts.path)
    return case.origin.module == "loss" and any(op in _CHOOSES for op in passed)


def _smoothed(case: Case) -> bool:
    """Returns whether the loss adds up all log-probabilities, as label smoothing does."""
    if case.op not in ("sum", "mean", "mul"):
        return False
    return any("_log_softmax" in case.ancestor_ops(stats.name, 3) for stats in case.inputs)


def _scores(case: Case) -> bool:
    """Returns whether a model says how likely a value is, outside of its forward pass.

    What undoes the squashing of an output has no other use.
    """
    function = "" if case.origin.site is None else case.origin.site.function or ""
    return case.op in _UNSQUASHED or any(word in function for word in _SCORING)


def _is_distribution(case: Case) -> bool:
    """Returns whether a distribution is asked how likely a value is."""
    return case.origin.site is not None and "log_prob" in case.origin.site.code


def _without_smoothing(case: Case) -> list[Repair]:
    """Turns label smoothing off where the file asks for it."""
    in_step = False

    def make(file: SourceFile, site: Site) -> str | None:
        nonlocal in_step
        smoothed = [
            node
            for node in ast.walk(file.tree)
            if isinstance(node, ast.Call) and any(k.arg == "label_smoothing" for k in node.keywords)
        ]
        here = [n for n in smoothed if n.lineno <= site.line <= (n.end_lineno or n.lineno)]
        in_step = bool(here)
        for node in here or smoothed:
            return set_keyword(file, node, "label_smoothing", "0.0")
        return None

    summary = "smooth over the classes that are not masked only, or not at all: label_smoothing=0.0"
    made = edit(case.origin.site, summary, make)
    # A loss that was made before the step cannot be changed in it.
    return made if in_step else [replace(repair, source=None) for repair in made]
