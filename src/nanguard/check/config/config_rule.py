"""What rules about configurations have in common."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.config.run_config import RunConfig, kind_of
from nanguard.check.paths import in_tests
from nanguard.check.rule import Rule
from nanguard.findings import Fix, Severity, name_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.config.run_config import Setting, TrainingStage
    from nanguard.findings import Edit, Finding


class ConfigRule(Rule[RunConfig]):
    """A rule that looks at each part of a run.

    Attributes:
        as_read: Whether a finding weighs less where no code of the project mentions its key.
        by_habit: Whether it says what usually comes of a number, and not what the file does. What
            a key stands for is then only known where the program that reads the file is: in
            other files such a finding is a remark.
        needs_reader: Whether it goes by what a key stands for, which its name alone does not say.
            In a project whose code is there, such a finding is a remark unless the program that
            reads the file is known, or the code is seen to give the value to an optimizer or layer.
    """

    reads = "config"
    by_habit: ClassVar[bool] = False
    as_read: ClassVar[bool] = True
    needs_reader: ClassVar[bool] = False

    def check(self, source: RunConfig) -> Iterator[Finding]:
        """Yields what is wrong with a run; what several parts share is said once."""
        seen: set[tuple[str | None, int | None, int | None]] = set()
        for finding in self.look(source):
            place = (finding.path, finding.line, finding.column)
            if place not in seen and finding.path in source.owned:
                seen.add(place)
                found = _as_read(source, finding) if self.as_read else _in_tests(finding)
                guessed = self.by_habit and finding.path not in source.parsed
                guessed = guessed or (self.needs_reader and not is_handed_on(source, finding))
                yield replace(found, severity=Severity.INFO) if guessed else found

    def look(self, source: RunConfig) -> Iterator[Finding]:
        """Yields what is wrong with each part of a run."""
        for stage in source.stages:
            yield from self.judge(stage)

    @abstractmethod
    def judge(self, stage: TrainingStage) -> Iterator[Finding]:
        """Yields what is wrong with one part of a run."""

    def at(
        self,
        setting: Setting,
        message: str,
        *fixes: Fix,
        severity: Severity | None = None,
    ) -> Finding:
        """Returns a finding at a setting.

        Args:
            setting: The setting.
            message: What was found, with the value.
            fixes: Ways to repair it, best first.
            severity: Where this one is worse or milder than the rule in general.
        """
        return self.finding(
            message,
            path=setting.path,
            line=setting.line,
            column=setting.column,
            where=setting.key,
            severity=severity,
            fixes=fixes,
        )


def _in_tests(finding: Finding) -> Finding:
    """Returns a finding; what a folder of tests sets up trains nothing that anybody waits for."""
    tested = in_tests(finding.path or "")
    return replace(finding, severity=Severity.INFO) if tested else finding


def is_handed_on(source: RunConfig, finding: Finding) -> bool:
    """Returns whether a value is known, or seen, to go where its key says."""
    if finding.path in source.parsed or not source.usage.known:
        return True
    return bool(source.usage.values.handed_on((finding.where or "").split(".")))


def _as_read(source: RunConfig, finding: Finding) -> Finding:
    """Returns a finding as it weighs in this project."""
    finding = _in_tests(finding)
    if finding.severity is Severity.INFO or not finding.where or finding.path in source.parsed:
        return finding
    if not source.usage.known or source.usage.mentions(finding.where):
        return finding
    message = f"{finding.message}; no code here reads it"
    return replace(finding, severity=Severity.INFO, message=message)


def change(title: str, edits: tuple[Edit, ...], *plan: str, keys: bool = False) -> Fix:
    """Returns a fix that changes the numbers a run computes.

    Args:
        title: What to do, in a line, with the reason.
        edits: The changes.
        plan: What to do once the repair has held, in order.
        keys: Whether a key is renamed or added, which is done only if asked for.
    """
    return Fix(title, safe=False, edits=edits, plan=plan, keys=keys)


NO_CLIP_FROM = 1e3  # from here on nothing is clipped


def clip_after(stage: TrainingStage) -> float:
    """Returns the smallest norm that is set and clips anything; 1.0 if there is none."""
    values = [setting.number for setting in stage.all("clip_norm")]
    return min(
        (value for value in values if value is not None and 0 < value < NO_CLIP_FROM), default=1.0
    )


@dataclass(frozen=True, slots=True)
class Limit:
    """How high a learning rate may be.

    Attributes:
        most: Above this, runs of the kind usually diverge.
        start: Where to start instead.
        what: The kind of run, in words.
    """

    most: float
    start: float
    what: str


_BY_OPTIMIZER = {
    "lion": Limit(1e-3, 1e-4, "Lion"),
    "muon": Limit(0.2, 0.02, "Muon"),
    "adafactor": Limit(0.02, 1e-3, "Adafactor"),
    "rmsprop": Limit(0.3, 1e-3, "RMSprop"),
    "adagrad": Limit(1.0, 0.01, "Adagrad"),
    "lamb": Limit(0.05, 2e-3, "LAMB"),
    "galore": Limit(0.05, 1e-3, "GaLore"),
}
# The first line whose traits are all there is the one that counts.
_ADAM: tuple[tuple[frozenset[str], Limit], ...] = (
    (frozenset(("reinforcement",)), Limit(0.2, 3e-4, "reinforcement learning")),
    (frozenset(("graph",)), Limit(0.1, 1e-2, "a graph network")),
    (frozenset(("adapter",)), Limit(3e-3, 2e-4, "adapters on a frozen model")),
    (frozenset(("distillation",)), Limit(3e-3, 1e-4, "distillation")),
    (frozenset(("adversarial",)), Limit(6e-3, 2e-4, "adversarial training")),
    (frozenset(("tuned", "t5")), Limit(2e-3, 1e-4, "fine-tuning T5")),
    (frozenset(("tuned", "diffusion")), Limit(5e-4, 1e-5, "fine-tuning a diffusion model")),
    (
        frozenset(("tuned", "transformer", "large")),
        Limit(5e-4, 1e-5, "fine-tuning all of a large model"),
    ),
    (frozenset(("tuned", "convolution")), Limit(6e-3, 1e-4, "fine-tuning a convolutional network")),
    (frozenset(("tuned", "small")), Limit(2e-3, 1e-4, "fine-tuning a small model")),
    (frozenset(("tuned", "vision")), Limit(6e-3, 1e-4, "fine-tuning a vision model")),
    (
        frozenset(("tuned", "transformer")),
        Limit(6e-4, 5e-5, "fine-tuning a pretrained transformer"),
    ),
    (frozenset(("tuned",)), Limit(5e-3, 1e-4, "fine-tuning a pretrained model")),
    (frozenset(("diffusion",)), Limit(1.5e-3, 1e-4, "a diffusion model")),
    (frozenset(("large",)), Limit(1.2e-3, 3e-4, "a large model")),
    (frozenset(("transformer",)), Limit(6e-3, 3e-4, "a transformer")),
    (frozenset(("convolution",)), Limit(0.015, 1e-3, "a convolutional network")),
    (frozenset(("recurrent",)), Limit(0.02, 1e-3, "a recurrent network")),
    (frozenset(), Limit(0.03, 1e-3, "an Adam-type optimizer")),
)
_UNSURE = frozenset(("transformer", "tuned", "diffusion", "large"))


def limit_of(stage: TrainingStage) -> Limit | None:
    """Returns how high the learning rate may be; None if any value can be right."""
    kind = kind_of(stage.optimizer)
    traits = stage.traits
    if kind is None and traits & _UNSURE and "sgd" in stage.usage.optimizers:
        kind = "sgd"  # the file does not say, and the code has it
    if kind in ("free", "lars", "other") or traits & {"noam", "prompt", "field"}:
        return None
    if stage.scope and stage.scope[-1] in ("aux", "auxiliary", "quantiles"):
        return None  # the few parameters of an entropy model, which bear a high rate
    if kind in _BY_OPTIMIZER:
        return _BY_OPTIMIZER[kind]
    if kind == "sgd":
        return Limit(50.0, 1.0, "SGD") if "recurrent" in traits else Limit(5.0, 0.1, "SGD")
    if kind is None and stage.usage.scales_by_layer:
        return None
    if kind is None and not traits & _UNSURE:
        return Limit(5.0, 1e-3, "any usual optimizer")
    return next(limit for needed, limit in _ADAM if needed <= traits)


def too_high(stage: TrainingStage) -> list[Setting]:
    """Returns the learning rates of a stage that are above the limit."""
    limit = limit_of(stage)
    if limit is None:
        return []
    return [s for s in stage.all("lr") if s.number is not None and not s.number <= limit.most]


def rate_after(stage: TrainingStage) -> float | None:
    """Returns the learning rate that a stage has once its faults are repaired."""
    rate = stage.number("lr")
    if rate is None:
        return None
    limit = limit_of(stage)
    if limit is not None and not abs(rate) <= limit.most:
        return limit.start
    return abs(rate)


def raise_slowly(start: float) -> tuple[str, ...]:
    """Returns when to raise a learning rate again that was lowered."""
    return (
        f"Train 1 000 steps at {name_of(start)}: the loss has to fall and stay finite.",
        f"Then raise it step by step, {name_of(start)} -> {name_of(2 * start)} -> "
        f"{name_of(5 * start)}, 1 000 quiet steps each.",
        f"NaN within the first epochs: go down to {name_of(start / 2)}, or {name_of(start / 10)}; "
        "NaN only later: keep the rate and clip at 0.5.",
    )
