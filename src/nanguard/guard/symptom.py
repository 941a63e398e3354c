"""What is wrong with a step, before anyone knows why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanguard.findings import name_of, number
from nanguard.guard import events

if TYPE_CHECKING:
    from nanguard.findings import Finding
    from nanguard.guard.judge import Reading, StepLimits


@dataclass
class Symptom:
    """What is wrong with a step.

    Attributes:
        where: ``loss``, ``gradient``, ``parameter``, ``optimizer state`` or ``buffer``.
        kind: ``nan``, ``inf`` or ``spike``.
        loss: The loss, if there was one.
        grad_norm: The norm of the gradients, if it was looked at.
        terms: The terms of the loss, by the names the script has for them.
        names: The tensors that are bad, by name.
        scale: Its scale.
        limit: What would have been usual, for a spike.
        scaled_by_hand: Whether a scaled loss was stepped without the scaler.
        evaluated: Whether it was noticed in an evaluation, and no step was touched.
    """

    where: str
    kind: str
    loss: float | None = None
    grad_norm: float | None = None
    terms: dict[str, float] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    scale: float | None = None
    limit: float | None = None
    scaled_by_hand: bool = False
    evaluated: bool = False

    @classmethod
    def of(cls, reading: Reading, limits: StepLimits) -> Symptom:
        """Returns what is wrong with the numbers of a bad step.

        Args:
            reading: The numbers.
            limits: What they were held to.
        """
        where, kind, limit = _wrong_with(reading, limits)
        return cls(
            where,
            kind,
            reading.loss,
            reading.grad_norm,
            reading.terms,
            scale=reading.scale,
            limit=limit,
        )

    def finding(self, step: int) -> Finding:
        """Returns the symptom as a finding about a step."""
        if self.kind == "spike":
            seen = events.LOSS_SPIKE if self.where == "loss" else events.GRADIENT_SPIKE
            usual = "" if self.limit is None else f"; up to {name_of(self.limit)} would be usual"
            return seen(f"{self.in_words()}{usual}", step=step)
        if self.where == "loss":
            for name, value in self.terms.items():
                if not math.isfinite(value):
                    message = f"loss term {name!r} is {name_of(value)}"
                    return events.NON_FINITE_LOSS(message, step=step, where=f"loss term {name!r}")
            return events.NON_FINITE_LOSS(self.in_words(), step=step)
        loss = name_of(math.nan if self.loss is None else self.loss)
        if self.where == "gradient":
            norm = name_of(math.nan if self.grad_norm is None else self.grad_norm)
            message = f"the gradient norm is {norm} while the loss is {loss}"
            return events.NON_FINITE_GRADIENT(message, step=step)
        message = f"parameters are not finite after this step (loss {loss})"
        return events.NON_FINITE_PARAMETER(message, step=step)

    def to_json(self) -> dict[str, Any]:
        """Returns the symptom as an incident holds it."""
        out: dict[str, Any] = {"where": self.where, "kind": self.kind}
        if self.loss is not None:
            out["loss"] = number(self.loss)
        if self.grad_norm is not None:
            out["grad_norm"] = number(self.grad_norm)
        out["terms"] = {name: number(value) for name, value in self.terms.items()}
        out["names"] = self.names[:20]
        if self.scale is not None:
            out["loss_scale"] = number(self.scale)
        if self.evaluated:
            out["during"] = "evaluation"
        return out

    def in_words(self) -> str:
        """Returns the symptom as a sentence begins."""
        if self.kind == "spike":
            value = self.loss if self.where == "loss" else self.grad_norm
            words = "the loss" if self.where == "loss" else "the gradient norm"
            return f"{words} jumped to {name_of(math.nan if value is None else value)}"
        if self.where == "loss":
            where = " in an evaluation" if self.evaluated else ""
            return f"the loss is {name_of(self.loss if self.loss is not None else math.nan)}{where}"
        if self.where == "gradient":
            loss = "" if self.loss is None else f" while the loss is {name_of(self.loss)}"
            named = f" (of {', '.join(self.names[:3])})" if self.names else ""
            return f"the gradient is not finite{named}{loss}"
        named = ", ".join(self.names[:3])
        return f"{self.where} {named} is not finite after the step"


def _wrong_with(reading: Reading, limits: StepLimits) -> tuple[str, str, float | None]:
    """Returns where a bad number is, of what kind, and what would have been usual for a spike."""
    for value in (*reading.terms.values(), reading.loss):
        if not math.isfinite(value):
            return "loss", kind_of(value), None
    if reading.poisoned:
        return "parameter", "nan", None
    if not math.isfinite(reading.grad_norm):
        return "gradient", kind_of(reading.grad_norm), None
    if not reading.loss <= limits.loss.act:
        return "loss", "spike", limits.loss.act
    return "gradient", "spike", limits.grad_norm.act


def kind_of(value: float) -> str:
    """Returns what is wrong with a number that is not finite."""
    return "nan" if math.isnan(value) else "inf"
