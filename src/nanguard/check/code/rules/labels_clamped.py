"""Class labels that are clamped into range."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.training import label, root
from nanguard.check.code.values import SHAPE
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_LABELS = re.compile(r"label|target|class|cls|lbl|tgt")
_LABEL = re.compile(r"label|class|lbl|^y$|^cls$")
# Operations that make a class of a measurement: an angle, a depth or a sample is scaled, then cut.
_SCALES = frozenset(["mul", "div", "floordiv"])
_CUTS = frozenset(["round", "floor", "ceil", "trunc", "bucketize", "searchsorted", "digitize"])
# Nobody takes these of a label.
_CURVES = frozenset(["log", "log1p", "log2", "log10", "exp", "sqrt", "sigmoid", "tanh", "atan2"])
_ARITHMETIC = _SCALES | _CUTS | _CURVES | frozenset(["add", "sub", "neg", "abs", "sign"])
# What is picked out of something is where a value begins: the index is another matter.
_PICKS = frozenset(["getitem", "gather", "index", "index_select", "take", "join"])
_PASSES = (SHAPE - _PICKS) | frozenset(["long", "int", "astype", "clamp"])
_FIX = Fix(
    "check the range where the data is read, and raise with the value and the record; give values "
    "that mean nothing the ignore_index"
)


class LabelsClamped(CodeRule):
    """Class labels are clamped into the range of the classes.

    *Why it breaks a run*: a label out of range is a fault of the data or of the number of classes.
    Clamped, every such record is trained as the first or the last class: nothing fails, and the
    model learns what is wrong. Padding of -1 or -100 becomes class 0 in the same way.

    Check labels where they are read and stop with the record; mark what is to be left out with
    `ignore_index`.
    """

    code = "SRC012"
    name = "labels-clamped"
    severity = Severity.WARNING
    seen_in = "https://github.com/milesial/Pytorch-UNet/issues/291"
    examples: ClassVar = (
        Passes(
            "import torch\nfrom torch.nn import CrossEntropyLoss\n\n\n"
            "def loss(logits, positions):\n"
            "    ignored_index = logits.size(1)\n    positions.clamp_(0, ignored_index)\n"
            "    return CrossEntropyLoss(ignore_index=ignored_index)(logits, positions)\n"
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef loss(logits, labels, n):\n"
            "    labels = torch.clamp(labels, 0, n - 1)\n"
            "    return F.cross_entropy(logits, labels)\n",
            line=6,
        ),
        Fails(
            "import torch\nfrom torch.utils.data import Dataset\n\n\nclass Rows(Dataset):\n"
            "    def __getitem__(self, i):\n        row = self.rows[i]\n"
            '        label = min(int(row["label"]), self.num_classes - 1)\n'
            '        return row["x"], label\n',
            line=8,
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\ndef loss(logits, y):\n"
            "    y[y >= logits.size(-1)] = logits.size(-1) - 1\n"
            "    return F.cross_entropy(logits, y)\n",
            line=6,
        ),
        Passes(
            "import torch\n\n\ndef nll(logp, target, ignore=-100):\n    keep = target != ignore\n"
            "    picked = logp.gather(-1, target.clamp(min=0).unsqueeze(-1)).squeeze(-1)\n"
            "    return -(picked * keep).sum() / keep.sum().clamp(min=1)\n"
        ),
        Passes(
            "import torch\nimport torch.nn.functional as F\n\n\ndef loss(pred, target):\n"
            "    return F.mse_loss(pred, target.clamp(0, 1))\n"
        ),
        Passes(
            "import torch\n\n\ndef sample(image, x, y):\n    h, w = image.shape[-2:]\n"
            "    return image[..., y.clamp(0, h - 1), x.clamp(0, w - 1)]\n"
        ),
        Passes(
            "import torch\nimport torch.nn.functional as F\n\n\ndef loss(logits, x, edges):\n"
            "    target = torch.searchsorted(edges, x) - 1\n"
            "    return F.cross_entropy(logits, target.clamp(0, len(edges) - 2))\n"
        ),
        Passes(
            "import torch.nn.functional as F\n\n\ndef loss(logits, depth, bins):\n"
            "    target = (depth * bins).long().clamp(0, bins - 1)\n"
            "    return F.cross_entropy(logits, target)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        clamps = code.of("clamp", "clamp_max", "clamp_min", "min", "minimum", "numpy.clamp")
        used = class_indices(code)
        found = [value for value in clamps if _is_clamp(code, value, used)]
        found += [value for value in code.of("setitem", "where") if _is_capped(value, used)]
        for value in found:
            if value.node is not None:
                message = "labels out of range are trained as another class instead of being found"
                trained = id(value) in used or -id(value) in used
                yield self.at(code, value.node, message, weak=not trained, fixes=(_FIX,))


def _is_clamp(code: Code, value: Value, used: set[int]) -> bool:
    smaller = value.op in ("min", "minimum")  # of labels and a bound, in any order
    parts = [p for p in value.inputs if not _is_bound(p)] if smaller else value.inputs[:1]
    if any(map(_is_quantised, parts)):
        return False
    labels = next((part for part in value.inputs if part.has("labels")), None)
    if labels is None:
        return _is_class(code, value, used) or _becomes_label(code, value)
    if value.has("loss"):
        return False
    high = upper_bound(value)
    if high is None:
        is_lower = value.op in ("clamp", "clamp_min", "numpy.clamp")
        return is_lower and id(value) in used
    if _is_ignored(high):
        return False
    if high.number() is not None and high.number() in (1.0, 255.0) and id(value) not in used:
        return False
    if id(value) in used:
        return True
    if -id(value) in used and is_masked(code, value, labels):
        return False
    if -id(value) in used:
        return True
    names = " ".join(made.name.lower() for made in high.upstream(8))
    is_label = _LABELS.search(root(labels).name.lower()) or re.search(r"class|label", names)
    return bool(is_label) and is_last_class(high)


def _is_ignored(high: Value) -> bool:
    """Whether labels are clamped to a class that the loss passes over."""
    return any("ignore" in made.name.lower() for made in high.upstream(4))


def _is_class(code: Code, value: Value, used: set[int]) -> bool:
    """Whether what is clamped is taken as a class, whatever it is called."""
    high = upper_bound(value) if value.op == "clamp" else None
    if high is None or _is_ignored(high):
        return False
    if id(value) in used or -id(value) in used:
        return high.core.op == "sub" or is_last_class(high)
    return is_last_class(high) and value.inputs[0].name in parameters_of_classes(code)


def _becomes_label(code: Code, value: Value) -> bool:
    """Whether the smaller of something and the last class is called a label."""
    statement = code.parents.get(value.node) if value.node is not None else None
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    name = target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")
    if not _LABEL.search(name.lower()):
        return False
    if value.op not in ("min", "minimum", "clamp", "numpy.clamp", "clamp_max"):
        return False
    bounds = value.inputs if value.op in ("min", "minimum") else (upper_bound(value),)
    return any(b is not None and _is_bound(b) for b in bounds)


def _is_bound(value: Value) -> bool:
    return value.core.op == "sub" and is_last_class(value)


def _is_quantised(value: Value) -> bool:
    """Whether classes are made here, from a measurement, and are not the labels of the data."""
    steps = [*_arithmetic(value)]
    ops = {step.op.removeprefix("numpy.") for step in steps}
    if ops & _CURVES:
        return True
    scaled = any(s.op in _SCALES and not any(p.has("mask") for p in s.inputs) for s in steps)
    from_labels = any(
        s.has("labels") and s.op.removeprefix("numpy.") not in _ARITHMETIC | _PASSES for s in steps
    )
    if ops & {"bucketize", "searchsorted", "digitize"}:
        return True  # places between edges, the outermost of which are meant to be open
    return (scaled or bool(ops & _CUTS)) and not from_labels


def _arithmetic(value: Value, limit: int = 32) -> Iterator[Value]:
    """The arithmetic a value was made by, with what it begins with."""
    queue = [value]
    while queue and limit:
        limit -= 1
        step = queue.pop(0)
        yield step
        op = step.op.removeprefix("numpy.")
        if op in _ARITHMETIC:
            queue += step.inputs
        elif op in _PASSES:
            queue += step.inputs[:1]


def _is_capped(value: Value, used: set[int]) -> bool:
    """Whether what is at or above a limit is given the last class."""
    if len(value.inputs) != 3:
        return False
    base, index, written = value.inputs
    if value.op == "where":
        index, written, base = value.inputs
    tests = index.core.inputs if index.core.op == "and" else (index,)
    above = any(t.core.op == "compare" and t.core.name in ("Gt", "GtE") for t in tests)
    if not base.has("labels") or not above or _is_quantised(base):
        return False
    number = written.number()
    if number is not None and number < 0:
        return False
    trained = id(value) in used or -id(value) in used
    return trained and (number is not None or is_last_class(written))


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
