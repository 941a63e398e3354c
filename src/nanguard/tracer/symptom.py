"""What is wrong with a step, before anyone knows why."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from nanguard.findings import name_of, number


@dataclass
class Symptom:
    """What is wrong with a step.

    Attributes:
        where: ``loss``, ``gradient``, ``parameter``, ``optimizer state`` or ``buffer``.
        kind: ``nan`` or ``inf``.
        loss: The loss, if there was one.
        grad_norm: The norm of the gradients, if it was looked at.
        terms: The terms of the loss, by the names the script has for them.
        names: The tensors that are bad, by name.
        scale: Its scale.
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
    scaled_by_hand: bool = False
    evaluated: bool = False

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
