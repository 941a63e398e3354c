"""Targets outside the domain of the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.diagnosis.case import ARCS, LOGS, ROOTS
from nanguard.diagnosis.cause import Cause, Suspicion
from nanguard.diagnosis.repairs import Repair, finite_masks, with_keyword, without_samples
from nanguard.findings import name_of

if TYPE_CHECKING:
    from nanguard.diagnosis.case import Case
    from nanguard.diagnosis.lab import Trial
    from nanguard.tracer.records import Stats

_CHOOSES = ("nll_loss_forward", "nll_loss2d_forward", "nll_loss_nd", "gather", "index", "take")
_LIMITED = (*LOGS, *ROOTS, *ARCS)
_ZERO = ("log", "log2", "log10", "xlogy")
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
        if case.origin.intended and (case.op in _CHOOSES or case.origin.module == "loss"):
            if case.op == "logsumexp":
                return None
            return Suspicion(
                0.9, "the target is a class whose logit was masked with -inf, so its loss is inf"
            )
        if case.op not in _LIMITED or case.origin.module != "loss":
            return None
        return self._from_targets(case)

    def _from_targets(self, case: Case) -> Suspicion | None:
        stats = self._from_data(case)
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
        found = without_samples(case, "repair or drop the target; check the label map and scale")
        if case.op.endswith("ctc_loss"):
            summary = "let CTC ignore targets that cannot be aligned: zero_infinity=True"
            found += with_keyword(
                case.origin.site, "zero_infinity", "True", summary, called="ctc_loss"
            )
        if case.origin.intended:
            found += finite_masks(case)
        return found
