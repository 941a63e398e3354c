"""A softmax over nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.diagnose.cause import SOFTMAX, Cause, Suspicion
from nanguard.diagnose.repairs import Repair, finite_masks, silencing, without_samples

if TYPE_CHECKING:
    from nanguard.diagnose.cause import Case
    from nanguard.diagnose.lab import Trial


class FullyMaskedSoftmax(Cause):
    """Every entry of a row is masked."""

    code = "fully-masked-softmax"
    meaning = "a row of a softmax or logsumexp has -inf in every entry"
    why = (
        "A mask writes -inf where nothing may be attended to. When a whole row is masked, an "
        "empty sequence or an anchor without positives, softmax divides 0 by 0, and logsumexp is "
        "-inf with an undefined gradient. Test per row, not over the whole tensor: drop such rows, "
        "keep one entry unmasked, or mask with a large finite number."
    )
    lower_rate_helps = False
    lies_in_samples = True

    def suspect(self, case: Case) -> Suspicion | None:
        """Returns whether a row is masked completely."""
        masked = [stats for stats in case.inputs if stats.neg_infs]
        evidence = [
            {"what": f"input {stats.name} of {case.origin.op}", **stats.to_json()}
            for stats in masked
        ]
        attention = "attention" in case.op
        if (case.op in SOFTMAX or attention) and (masked or case.phase == "backward"):
            count = sum(stats.neg_infs for stats in masked)
            return Suspicion(
                0.95,
                f"{case.op} over a row in which every entry is -inf ({count} masked entries)",
                evidence,
            )
        if case.op in ("sub", "rsub") and len(masked) > 1:
            return Suspicion(0.85, "-inf minus its own maximum -inf, in a masked row", evidence)
        if case.op == "mul" and masked and not case.is_half and not case.is_zero_log_zero:
            return Suspicion(0.45, "0 * -inf: a mask was multiplied and not filled in", evidence)
        return None

    def trials(self, case: Case) -> list[Trial]:
        """Replaces the samples whose rows are masked."""
        trial = case.without_samples()
        return [trial] if trial else []

    def repairs(self, case: Case) -> list[Repair]:
        """Masks with a finite number."""
        masked = silencing(finite_masks(case), "the row has nothing to attend to all the same")
        return masked + without_samples(
            case, "leave out samples in which everything is masked, or keep one entry unmasked"
        )
