"""CFG001: settings that ask for two precisions at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nanguard.check.config.config_rule import ConfigRule, change
from nanguard.check.config.node import set_to
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.precision import Claim, World
    from nanguard.check.config.run_config import TrainingStage
    from nanguard.findings import Edit, Finding

_WORDS = {
    "fp32": "full precision",
    "fp16": "mixed fp16",
    "bf16": "mixed bf16",
    "pure-fp16": "fp16 weights",
    "pure-bf16": "bf16 weights",
}


# Options of launchers and scripts that set the precision whatever files say.
_OPTIONS = ("mixed_precision", "fp16", "bf16", "precision", "amp", "dtype")


class ConflictingPrecision(ConfigRule):
    """Settings that ask for two precisions at once, in one file or between files.

    Why it breaks a run: one of them wins, and which one depends on the order in which code reads
    them. fp16 in place of bf16 overflows at 65 504; a loss scaler that belongs to the other type
    is missing or refuses to work; a launcher that says "no" leaves the trainer's own autocast
    without its scaler.

    Decide for one: bf16 where the hardware has it, else fp16 with loss scaling, else full
    precision; and say it once, or the same everywhere.
    """

    code = "CFG001"
    name = "conflicting-precision"
    severity = Severity.ERROR
    needs_reader = True
    seen_in = "https://github.com/deepspeedai/DeepSpeed/issues/5509"
    examples = (
        Passes("learning_rate: 1.0e-5\nmax_steps: 100\nbf16: true\nfp16: false\n", "run.yaml"),
        Passes(
            "lr: 1.0e-4\nepochs: 3\ndtype: bf16\namp: {enabled: false, dtype: float16}\n", "a.yml"
        ),
        Fails(
            "lr: 1.0e-4\nepochs: 3\nbf16: true\nfp16: true\n",
            line=4,
            file="run.yaml",
            fixed="lr: 1.0e-4\nepochs: 3\nbf16: true\nfp16: false\n",
        ),
        Fails(
            '{"fp16": {"enabled": true}, "bf16": {"enabled": true}, "zero_optimization": {}}',
            1,
            "d.json",
        ),
    )

    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields one finding where no way to train agrees with every setting."""
        precision = stage.precision
        if not precision.conflicting:
            return
        if any(stage.usage.overridden(c.setting.path, *_OPTIONS) for c in precision.claims):
            return  # the command that starts the run decides
        bound = [claim for claim in precision.claims if claim.setting.path in stage.partial]
        kept = precision.kept(bound)
        against = [claim for claim in precision.claims if kept not in claim.worlds]
        mine = [claim for claim in against if claim.setting.path not in stage.partial] or against
        place = mine[0].setting
        said = ", ".join(_said(claim) for claim in precision.claims)
        edits = tuple(
            edit
            for claim in against
            if claim.setting.path == place.path
            for edit in _agreeing(claim, kept)
        )
        yield self.at(
            place,
            f"these settings cannot all hold: {said}; which one wins depends on the order in "
            "which they are read",
            change(
                f"keep {_WORDS[kept]}, which most of the settings agree with",
                edits,
                "Look at the first lines of the next run: the precision it reports has to be "
                f"{_WORDS[kept]}.",
            ),
        )


def _said(claim: Claim) -> str:
    setting = claim.setting
    file = setting.path.rsplit("/", 1)[-1]
    return f"{setting.key} = {setting.written or 'null'} ({file}:{setting.line})"


def _agreeing(claim: Claim, kept: World) -> tuple[Edit, ...]:
    """Returns the change that makes a setting agree."""
    setting = claim.setting
    half = kept.removeprefix("pure-")
    if setting.name in ("fp16", "bf16"):
        return set_to(setting, setting.name == kept)
    if isinstance(setting.value, bool):
        return set_to(setting, kept in ("fp16", "bf16"))
    if setting.name == "mixed_precision" or (setting.name == "amp" and kept == "fp32"):
        return set_to(setting, half if kept in ("fp16", "bf16") else "no")
    return set_to(setting, _spelled(setting.text, kept))


def _spelled(like: str, kept: World) -> str:
    """Returns the name of a precision as the file spells such names."""
    if like.endswith(("-mixed", "-true")):
        return {"fp32": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}.get(
            kept, kept.replace("pure-", "").replace("fp", "") + "-true"
        )
    if "float" in like:
        name = {"fp32": "float32", "fp16": "float16"}.get(kept.removeprefix("pure-"), "bfloat16")
        return f"torch.{name}" if like.startswith("torch.") else name
    return kept.removeprefix("pure-")
