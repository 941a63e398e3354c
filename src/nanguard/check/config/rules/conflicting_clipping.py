"""CFG008: two clipping norms for one run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change, clip_after
from nanguard.check.config.node import set_to
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import Setting, TrainingStage
    from nanguard.findings import Finding


class ConflictingClipping(ConfigRule):
    """Two different clipping norms for the same gradients, in one file or between files.

    Why it breaks a run: one of them is not applied, or both are, one after the other. Whoever
    lowers the one that does not count sees no change, and looks for the cause elsewhere.

    Set it in one place. With DeepSpeed that is ``gradient_clipping`` in its JSON, best as
    ``"auto"``, so that it follows the trainer's own.
    """

    code = "CFG008"
    name = "conflicting-clipping"
    severity = Severity.WARNING
    seen_in = "https://github.com/axolotl-ai-cloud/axolotl/issues/1381"
    examples = (
        Passes(
            "generator: {lr: 1.0e-4, grad_clip: 1.0}\ndiscriminator: {lr: 4.0e-4, grad_clip: 0.1}\n"
            "epochs: 9\n",
            "gan.yaml",
        ),
        Passes(
            "optimizer: {lr: 1.0e-4, grad_clip: 1.0}\ntrain: {epochs: 9, max_grad_norm: 1}\n",
            "b.yaml",
        ),
        Fails(
            "optimizer: {lr: 1.0e-4, grad_clip: 5.0}\ntrain: {epochs: 9, max_grad_norm: 0.5}\n",
            line=1,
            file="a.yaml",
            fixed="optimizer: {lr: 1.0e-4, grad_clip: 0.5}\n"
            "train: {epochs: 9, max_grad_norm: 0.5}\n",
        ),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding where two settings give two norms."""
        found = [s for s in stage.all("clip_norm") if _counts(s, stage)]
        if len({s.number for s in found}) < 2:
            return
        kept = clip_after(stage)
        wrong = [s for s in found if s.number != kept]
        place = next((s for s in wrong if s.path not in stage.partial), found[0])
        edits = tuple(e for s in wrong if s.path == place.path for e in set_to(s, kept))
        if not edits:  # the wrong one is in the other file: this one follows it
            other = next(s.number for s in found if s.path != place.path)
            edits = set_to(place, other)
        said = ", ".join(
            f"{s.key} = {s.written} ({s.path.rsplit('/', 1)[-1]}:{s.line})" for s in found
        )
        yield self.at(
            place,
            f"gradients are to be clipped at two norms: {said}; only one of them counts",
            change(f"clip at {name_of(kept)} everywhere, the smaller of the two", edits),
        )


def _counts(setting: Setting, stage: TrainingStage) -> bool:
    """Returns whether a norm takes part: numbers do, and 0 for "off" only against another file."""
    if setting.number is None or setting.number < 0:
        return False
    return setting.number > 0 or len({s.path for s in stage.all("clip_norm")}) > 1
