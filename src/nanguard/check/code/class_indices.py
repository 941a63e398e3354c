"""Class indices: which values are taken as such, and where they are bounded."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from nanguard.check.code.roles import label

if TYPE_CHECKING:
    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_CLASSES = re.compile(r"class|vocab|label|categor|n_?cls|num_cls|logits|n_out|out_features")
_TAKES_CLASSES = ("cross_entropy", "nll_loss", "one_hot", "multi_margin_loss")


def class_indices(code: Code) -> set[int]:
    """Returns the values that a loss takes as class indices, with what they were made from.

    Those whose loss is not reduced yet, so that some can still be left out, are negative.
    """
    used: set[int] = set()
    for loss in code.of(*_TAKES_CLASSES):
        target = loss.arg(0, "tensor") if loss.op == "one_hot" else loss.arg(1, "target")
        reduction = loss.keywords.get("reduction")
        masked = loss.op == "one_hot" or (reduction is not None and reduction.const == "none")
        for made in target.upstream(12) if target is not None else ():
            used.add(id(made) if not masked else -id(made))
    return used


def parameters_of_classes(code: Code) -> set[str]:
    """Returns the names of parameters that functions of the file take class indices by."""
    found: set[str] = set()
    for loss in code.of("cross_entropy", "nll_loss"):
        target = loss.arg(1, "target")
        core = target.core if target is not None else None
        scope = loss.scope
        if core is not None and scope is not None and scope.parameters.get(core.name) is core:
            found.add(core.name)
    return found


def is_masked(code: Code, value: Value, labels: Value) -> bool:
    """Returns whether the function leaves some labels out of the loss by comparing them."""
    for test in code.of("compare"):
        compares = test.scope is value.scope and test.name in ("NotEq", "Eq", "GtE", "Lt")
        if compares and label(test.inputs[0]) == label(labels):
            return True
    return False


def upper_bound(value: Value) -> Value | None:
    """Returns the upper bound an operation gives labels, if it gives one."""
    if value.op in ("clamp", "numpy.clamp"):
        high = value.arg(2, "max") or value.keywords.get("a_max")
        return high if high is not None and high.name != "None" else None
    if value.op == "clamp_min":
        return None
    if value.op == "clamp_max":
        return value.arg(1, "max")
    others = [part for part in value.inputs if not part.has("labels")]
    return others[0] if len(value.inputs) == 2 and others else None


def is_last_class(high: Value) -> bool:
    """Returns whether a bound is the number of classes, less one."""
    names = " ".join(made.name.lower() for made in high.upstream(8))
    if any(made.op == "len" for made in high.upstream(8)) and not _CLASSES.search(names):
        return False
    return bool(_CLASSES.search(names)) or (
        high.core.op == "sub" and high.core.inputs[1].number() == 1.0 and len(names) > 0
        and not re.search(r"\b(h|w|height|width|size|len)\b", names)
    )  # fmt: skip
