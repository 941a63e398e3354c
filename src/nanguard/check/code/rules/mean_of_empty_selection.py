"""A mean over what a comparison has picked, which may be nothing."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.origins import origins
from nanguard.check.code.rules.division_by_unguarded_sum import is_selective
from nanguard.check.code.training_path import is_beside_training
from nanguard.check.code.value_questions import (
    carries_gradient,
    guarded_by,
    is_number,
    is_only_shown,
    is_open,
    is_repaired_at_once,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_LOSSES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "cross_entropy", "nll_loss",
    "binary_cross_entropy", "binary_cross_entropy_with_logits",
)  # fmt: skip
# What is worked out for each element, so that there are as many as there were before.
_EACH = frozenset(
    {"named", "float", "pow", "square", "abs", "squeeze", "add", "sub", "mul", "div", "log", "exp",
     "neg", "sqrt", "log_prob"}
)  # fmt: skip
# What takes labels for numbers.
_MEASURES = frozenset({"log_prob", "sub", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"})
_NOTHING_MEASURED = 1e-2  # up to here a limit tells a measured value from none
_MAP = re.compile(r"depth|disp|gt|truth|flow")
_MASK = re.compile(r"(loss_|valid_|label_)?mask")
_BATCH = re.compile(r"batch|sample|inputs")
_LABELS = re.compile(r"y|y_\w+|\w+_y|(\w+_)?(label|target|domain|class|speaker)s?(_\w+)?")
_PADDING = re.compile(r"att(n|ention)?(_|$)|pad|mask|len(gth)?s?(_|$)|seq")
_FIX = Fix(
    "sum instead, and divide by the number of elements, bounded from below: "
    "`x[keep].sum() / keep.sum().clamp(min=1)`; or skip the term where nothing is picked"
)


class MeanOfEmptySelection(CodeRule):
    """The mean, or a loss that takes the mean, of the elements that a comparison picks.

    *Why it breaks a run*: the batch in which no box matches, no pixel is labelled or no token is of
    the class comes sooner or later. The mean of nothing is NaN, and so is every weight after the
    step.

    Divide the sum by a count that is bounded from below, or leave the term out where nothing is
    picked: `if keep.any():`.
    """

    code = "SRC043"
    name = "mean-of-empty-selection"
    severity = Severity.WARNING
    claim = "number"
    seen_in = "https://github.com/zhang-tao-whu/e2ec/issues/7"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef class_loss(losses, y):\n    return losses[y == 1].mean()\n",
            line=5,
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\n"
            "def box_loss(boxes, wanted, labels):\n    pos = labels > 0\n"
            "    return F.smooth_l1_loss(boxes[pos], wanted[pos])\n",
            line=7,
        ),
        Fails(
            "import torch\n\n\ndef far_loss(d):\n"
            "    return torch.masked_select(d, d > 0.5).mean()\n",
            line=5,
        ),
        Passes(
            "import torch\nimport torch.nn.functional as F\n\n\n"
            "def box_loss(boxes, wanted, labels):\n    pos = labels > 0\n"
            "    if not pos.any():\n        return boxes.sum() * 0\n"
            "    return F.smooth_l1_loss(boxes[pos], wanted[pos])\n"
        ),
        Passes(
            "import torch\nimport torch.nn.functional as F\n\n\n"
            "def box_loss(boxes, wanted, labels):\n    pos = labels > 0\n"
            '    total = F.smooth_l1_loss(boxes[pos], wanted[pos], reduction="sum")\n'
            "    return total / pos.sum().clamp(min=1)\n"
        ),
        Passes(
            "import torch.nn.functional as F\n\n\ndef tag_loss(logits, tags, att):\n"
            "    words = att.view(-1) == 1\n"
            "    return F.cross_entropy(logits[words], tags.view(-1)[words])\n"
        ),
        Fails(
            "import torch\n\n\ndef scale_loss(depth, truth):\n    keep = truth > 0.1\n"
            "    d = torch.log(depth[keep]) - torch.log(truth[keep])\n"
            "    return (d**2).mean()\n",
            line=7,
        ),
        Passes(
            "import torch\nimport torch.nn.functional as F\n\n\n"
            "def pose_loss(pred, truth, labels):\n    pred = pred[labels == 1]\n"
            "    truth = truth[labels == 1]\n    if len(truth) > 0:\n"
            "        return (pred - truth).abs().mean()\n    return pred.sum() * 0\n"
        ),
        Fails(
            "import torch.nn.functional as F\n\n\ndef step_of(net, batch):\n"
            "    logits = net(batch)\n    logits, y = logits[batch.mask], batch.y[batch.mask]\n"
            "    return F.cross_entropy(logits, y)\n",
            line=7,
        ),
        Fails(
            "import torch.nn.functional as F\n\n\ndef class_loss(net, x, y_org, y_trg):\n"
            "    out = net(x)\n"
            "    return F.cross_entropy(out[y_org != y_trg], y_org[y_org != y_trg])\n",
            line=6,
        ),
        Passes(
            "import torch.nn.functional as F\n\n\ndef class_loss(net, x, y_org, y_trg):\n"
            "    out, other = net(x), y_org != y_trg\n    if not other.any():\n"
            "        return 0.0 * out.sum()\n"
            "    return F.cross_entropy(out[other], y_org[other])\n"
        ),
        Passes(
            "import torch.nn.functional as F\n\n\ndef word_loss(logits, y, pad_id):\n"
            "    return F.cross_entropy(logits[y != pad_id], y[y != pad_id])\n"
        ),
        Passes("import torch\n\n\ndef first_loss(losses):\n    return losses[:4].mean()\n"),
        Passes("import torch\n\n\ndef cut_loss(losses, n):\n    return losses[:-n].mean()\n"),
        Fails(
            "import torch\n\n\ndef tag_loss(losses, labels):\n"
            "    return losses[labels != 0].mean()\n",
            line=5,
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        told: set[int] = set()
        yield from self._of_cut_ends(code)
        for mean in (*code.of("mean", *_LOSSES), *_logged_sums(code)):
            index = _selection(mean.inputs[0]) if mean.inputs else None
            if index is None or not mean.grad or mean.line in told:
                continue
            asked = [*_asked(code, index)]
            tests = [
                part
                for part in asked
                if is_selective(part) or _is_of_two_labels(part) or _is_of_hard_ones(part)
            ]
            of_batch = _is_mask_of_batch(index)
            if any(_is_about_padding(test) or _is_of_map(test) for test in tests):
                continue
            if not tests and not of_batch and not any(map(_is_of_labels, asked)):
                continue
            if guarded_by(index, mean.guards) or _is_counted(mean):
                continue
            if _is_summed(mean) or is_repaired_at_once(code, mean.node):
                continue
            told.add(mean.line)
            what = "mask" if of_batch and not tests else "comparison"
            yield self.at(
                code,
                mean.node,
                f"log of a sum over what a {what} picks: -inf where it picks nothing"
                if mean.op == "sum"
                else f"mean over what a {what} picks: NaN where it picks nothing",
                fixes=(_FIX,),
                shown=bool(tests) or _is_of_numbers(index, mean),
                weak=is_beside_training(code, mean)
                or is_only_shown(code, mean)
                or is_number(mean.inputs[0]),
            )

    def _of_cut_ends(self, code: Code) -> Iterator[Finding]:
        """Means of ``x[:-n]``, where a setting of the project says that n is 0."""
        for mean in code.of("mean", *_LOSSES):
            cut = _cut_by_nothing(code, mean.inputs[0]) if mean.inputs else ""
            if cut and mean.grad and not _is_summed(mean):
                yield self.at(
                    code,
                    mean.node,
                    f"mean of a slice [:-{cut}], which is empty where that is 0, as it is by "
                    "default: NaN",
                    fixes=(Fix(f"write [: x.shape[dim] - {cut}]"),),
                    shown=True,
                    weak=is_beside_training(code, mean) or cut in mean.guards,
                )


def _logged_sums(code: Code) -> Iterator[Value]:
    """Yields sums that nothing is added to before their logarithm is taken."""
    for log in code.of("log"):
        total = log.inputs[0].core if log.inputs else None
        if total is not None and total.op == "sum" and len(total.inputs) == 1:
            yield total


def _cut_by_nothing(code: Code, value: Value) -> str:
    """Returns what is cut off the end of a value, if that is a setting that is 0 by default."""
    for part in value.upstream(8):
        index = part.inputs[1] if part.op == "getitem" and len(part.inputs) > 1 else None
        for item in (index.items or (index,)) if index is not None else ():
            upper = item.node.upper if isinstance(item.node, ast.Slice) else None
            if not isinstance(upper, ast.UnaryOp) or not isinstance(upper.op, ast.USub):
                continue
            length = code.values.get(upper.operand)
            if length is None or length.op != "attribute" or length.number() != 0:
                continue
            return ast.unparse(upper.operand)
    return ""


def _is_of_labels(test: Value) -> bool:
    """Returns whether labels are asked which of them are not 0: none may be."""
    if test.op not in ("compare", "ne") or len(test.inputs) != 2:
        return False
    unlike = {"compare": test.name}.get(test.op, test.op).lower() in ("noteq", "ne")
    return unlike and test.inputs[1].number() == 0 and test.inputs[0].core.has("labels")


def _is_of_two_labels(test: Value) -> bool:
    """Returns whether the labels of a batch are compared with others: all or none may agree."""
    if test.op not in ("compare", "ne", "eq") or len(test.inputs) != 2:
        return False
    if {"compare": test.name}.get(test.op, test.op).lower() not in ("noteq", "ne", "eq"):
        return False
    sides = [part.core for part in test.inputs]
    given = all(part.const is None and part.op in ("", "part", "field", "argmax") for part in sides)
    named = [part.name.lower() for part in sides]
    return given and named[0] != named[1] and all(map(_LABELS.fullmatch, named))


def _is_of_hard_ones(test: Value) -> bool:
    """Returns whether two things that are learned are compared, as miners of hard pairs do."""
    if test.op not in ("compare", "gt", "ge", "lt", "le") or len(test.inputs) != 2:
        return False
    if test.op == "compare" and test.name not in ("Lt", "LtE", "Gt", "GtE"):
        return False
    picked = [
        any(part.op in ("sort", "max", "min", "topk") for part in side.upstream(12))
        for side in test.inputs
    ]
    return any(picked) and all(carries_gradient(part) for part in test.inputs)


def _is_of_numbers(index: Value, mean: Value) -> bool:
    """Returns whether labels that are missing where they are 0 are numbers, and no words."""
    labels = {id(t.inputs[0].core) for t in index.upstream(6) if _is_of_labels(t)}
    return any(
        part.op in _MEASURES and any(id(given.core) in labels for given in part.inputs[:2])
        for part in mean.upstream(24)
    )


def _is_mask_of_batch(index: Value) -> bool:
    """Returns whether an index is the mask that comes with a batch, whatever it is made of."""
    core = index.core
    if core.op not in ("attribute", "field") or not core.inputs:
        return False
    return _MASK.fullmatch(core.name) is not None and _BATCH.search(core.inputs[0].name) is not None


def _is_about_padding(test: Value) -> bool:
    """Returns whether it asks which words are no padding: no row is all padding."""
    return any(_PADDING.search(part.name.lower()) for part in test.upstream(8))


def _is_of_map(test: Value) -> bool:
    """Returns whether it asks where a map was measured at all: no map is empty as a rule."""
    number = test.inputs[-1].number() if test.inputs else None
    if number is None or not 0 <= number <= _NOTHING_MEASURED:
        return False
    return number > 0 or _MAP.search(test.inputs[0].core.name.lower()) is not None


def _is_counted(mean: Value) -> bool:
    """Returns whether a condition has looked at something that was picked by the same index."""
    names = {part.name for part in mean.upstream(24) if part.name and part.op != "self"}
    return not names.isdisjoint(mean.guards)


def _asked(code: Code, index: Value) -> Iterator[Value]:
    """Yields what an index is made from, here or where its function is called."""
    for part in index.upstream(6):
        yield part
        if is_open(part):
            yield from origins(code, part).makers


def _selection(value: Value, depth: int = 12) -> Value | None:
    """Returns what picks the elements of a value; None if all of them are there."""
    if value.op in _EACH and depth > 0:
        parts = (_selection(part, depth - 1) for part in value.inputs[:2])
        return next((part for part in parts if part is not None), None)
    if value.op == "join" and depth > 0:
        parts = (_selection(part, depth - 1) for part in value.inputs)
        return next((part for part in parts if part is not None), None)
    if value.op not in ("getitem", "masked_select") or len(value.inputs) < 2:
        return None
    if value.inputs[0].op == "sort" and depth > 0:
        return _selection(value.inputs[0].inputs[0], depth - 1)
    index = value.inputs[1]
    if index.items is not None:
        return index.items[0] if len(index.items) == 1 else None
    return index if index.has("mask", "bool") else None


def _is_summed(loss: Value) -> bool:
    """Returns whether a loss is told to add up, or to give each element its own."""
    if loss.op == "mean":
        # of each column, over the rows that were picked: as empty as a mean of all
        return False
    told = loss.keywords.get("reduction") or loss.keywords.get("size_average")
    return told is not None and told.const not in ("mean", True)
