"""Division by a count that can be 0."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, bare, operand, replaced
from nanguard.check.code.origins import origins
from nanguard.check.code.training_path import is_beside_training
from nanguard.check.code.value_questions import (
    can_be_zero,
    guarded_by,
    has_eps_outside,
    is_made_by_network,
    is_number,
    is_only_shown,
    is_open,
    is_repaired_at_once,
)
from nanguard.check.code.values import SHAPE
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity
from nanguard.source import floors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_NEVER_EMPTY = frozenset(
    {"tril", "triu", "eye", "ones", "ones_like", "softmax", "fill_diagonal", "fill_diagonal_"}
)


# What may take the element out that a row has in common with itself.
_TAKES_OUT = frozenset({"mul", "sub", "rsub", "and", "setitem", "scatter", "masked_fill", "xor"})


# Operations whose results are tensors, and not numbers of Python.
_OF_TENSORS = frozenset(
    {"sum", "nansum", "mean", "count_nonzero", "bincount", "histc", "matmul", "spmm", "index_add"}
    | {"scatter_add"}
)
_ORDERS = frozenset({"gt", "gte", "ge", "lt", "lte", "le"})
# Where nodes may be their own neighbours, a degree may be at least 1.
_LOOPS = re.compile(r"self[ _-]?loop", re.IGNORECASE)
_IGNORED = frozenset({-100.0, 255.0})
_IGNORE = re.compile(r"ignore|label_pad")
# Masks of what may be absent from a whole batch, and not of padding, which no row consists of.
_MAY_BE_ABSENT = re.compile(
    r"(^|_)(valid|active|visib(le|ility)|alive|fg|foreground|positives?|objects?|inliers?|events?)(_|$)"
    r"|^_?(loss|label|response|completion|answer|action)_?masks?$"
)
# How many anchors, boxes or pixels were matched.
_MATCHED = re.compile(r"((total_?|n_?|num_?)(pos|positives?|fg|foreground|matche[ds])|pos_num)\w*")
_ADJACENCY = re.compile(r"adj(acency)?(_\w+)?|\w+_adj")
_MENDED = re.compile(r"isinf|self[ _-]?loop|\beye\(|\binf\b|isnan|nan_to_num", re.IGNORECASE)


class DivisionByUnguardedSum(CodeRule):
    """Division by the sum of a mask, of weights, or by a count, that can be 0.

    *Why it breaks a run*: the batch in which every token is padding, no box matches or no pixel is
    valid comes sooner or later. Its sum is 0, the mean 0 / 0 is NaN, and so is every weight after
    the step.

    It is a warning where a comparison is seen, here or in a caller, that can leave nothing in
    (`y == c`, `iou > 0.5`, `y != -100`), for the degree of a node, for attention weights that are
    masked after their softmax, for how often each code was chosen, for a bound that comes after the
    division, and for masks of what a batch may have none of (`valid`, `loss_mask`, `num_pos`,
    `events`); elsewhere, as for padding, it is a remark.

    Bound the divisor: `mask.sum().clamp(min=1)`.
    """

    code = "SRC024"
    name = "division-by-unguarded-sum"
    severity = Severity.WARNING
    claim = "number"
    seen_in = "https://github.com/NVIDIA-NeMo/Automodel/issues/3796"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef f(x, mask):\n    return (x * mask).sum() / mask.sum()\n",
            line=5,
            fixed="import torch\n\n\ndef f(x, mask):\n"
            "    return (x * mask).sum() / mask.sum().clamp(min=1)\n",
        ),
        Fails(
            "import torch\n\n\ndef f(nll, y):\n    n = (y != -100).sum()\n"
            "    return nll.sum() / n\n",
            line=6,
        ),
        Fails(
            "import torch\n\n\ndef scatter_loss(f, y, c):\n    z = f[y == c]\n"
            "    n = z.shape[0]\n    return (z - z.mean(0)).square().sum() / (n - 1)\n",
            line=7,
        ),
        Fails(
            "import torch\n\n\ndef loss_of(losses, labels):\n    valid = labels**2 > 0\n"
            "    losses = torch.where(valid, losses, torch.zeros_like(losses))\n"
            "    return losses.sum() / torch.sum(valid)\n",
            line=7,
        ),
        Passes(
            "import torch\n\n\ndef scatter_loss(f, y, c):\n    z = f[y == c]\n"
            "    n = z.shape[0]\n    if n < 2:\n        return f.sum() * 0\n"
            "    return (z - z.mean(0)).square().sum() / (n - 1)\n"
        ),
        Passes(
            "import torch\n\n\ndef weigh(y, w):\n    pos = (y == 1).sum().float()\n"
            "    neg = (y == 0).sum().float()\n    w[y == 1] = neg / (pos + neg)\n    return w\n"
        ),
        Passes("import torch\n\n\ndef f(x, mask):\n    return x.sum() / mask.sum().clamp(min=1)\n"),
        Passes(
            "import torch\n\n\ndef f(x, mask):\n    n = mask.sum()\n    if n == 0:\n"
            "        return x.sum() * 0\n    return x.sum() / n\n"
        ),
        Passes(
            "import torch\n\n\ndef f(adj, keep):\n    adj = adj * keep\n"
            "    return torch.nan_to_num(adj / keep.sum(-1, keepdim=True))\n"
        ),
        Passes(
            "import torch\n\n\ndef f(idx, queue):\n    every = torch.cat([idx.t(), queue], dim=1)\n"
            "    same = torch.eq(idx, every).float()\n"
            "    return same / same.sum(1, keepdim=True)\n"
        ),
        Fails(
            "import torch\n\n\ndef mean_of_neighbours(adj, h):\n"
            "    degree = torch.spmm(adj, torch.ones((adj.shape[0], 1)))\n"
            "    return torch.spmm(adj, h) / degree\n",
            line=6,
        ),
        Fails(
            "import torch\nimport torch.nn.functional as F\n\n\n"
            "def box_loss(pred, labels, boxes):\n    pos = labels > 0\n"
            "    pred, boxes = pred[pos, :], boxes[pos, :]\n"
            '    return F.smooth_l1_loss(pred, boxes, reduction="sum") / boxes.size(0)\n',
            line=8,
        ),
        Passes("import torch\n\n\ndef f(total, loader):\n    return total / len(loader)\n"),
        Fails(
            "import torch\n\n\ndef attend(scores, mask):\n    weight = torch.softmax(scores, 1)\n"
            "    weight = weight * mask.float()\n"
            "    return weight / weight.sum(1, keepdim=True)\n",
            line=7,
        ),
        Passes(
            "import torch\n\n\ndef attend(scores, mask):\n    weight = torch.softmax(scores, 1)\n"
            "    weight = weight * mask.float()\n"
            "    return weight / (weight.sum(1, keepdim=True) + 1e-8)\n"
        ),
        Fails(
            "import torch\n\n\ndef word_loss(losses, mask, words, frames):\n"
            "    total = (losses * mask).sum() / mask.sum().clamp(min=1)\n"
            "    length = frames.new_zeros(4, 9).scatter_add(1, words, frames)[:, 1:]\n"
            "    spoken = (length > 0).float()\n"
            "    return total + (losses * spoken).sum() / spoken.sum()\n",
            line=8,
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        told: set[tuple[int, int]] = set()
        for quotient, divisor in _quotients(code):
            share = _is_share_of_itself(code, quotient)
            if not can_be_zero(divisor):
                continue
            masked = _is_masked_softmax(quotient)
            if not masked and (guarded_by(divisor, quotient.guards) or _is_never_empty(divisor)):
                continue
            if _is_written_to_what_was_counted(code, quotient, divisor):
                continue
            if is_repaired_at_once(code, quotient.node):
                continue
            counted = divisor.core.inputs[0].core if divisor.core.inputs else divisor.core
            key = (id(quotient.scope), id(counted))
            if has_eps_outside(code, quotient) or key in told:
                continue
            told.add(key)
            yield self.at(
                code,
                quotient.node,
                "division by a sum that is 0 when nothing is left in: 0 / 0 is NaN",
                fixes=_fixes(code, quotient),
                shown=share
                or _may_pick_nothing(code, divisor)
                or _is_of_codes(divisor)
                or _is_bounded_too_late(code, quotient)
                or _is_size_of_picked(divisor)
                or _is_number_matched(divisor)
                or _is_rest_of_masks(divisor)
                or _is_degree(divisor.core)
                or _is_sum_of_adjacency(code, divisor)
                or _is_of_what_may_be_absent(quotient),
                weak=is_beside_training(code, quotient)
                or is_only_shown(code, quotient)
                or is_number(divisor)  # Python's own division raises
                or (_is_degree(divisor.core) and _LOOPS.search(code.text.content) is not None),
            )


def _is_of_codes(divisor: Value) -> bool:
    """Returns whether it is how often each class or code was chosen in a batch: some never are."""
    core = divisor.core
    counted = core.inputs[0].core if core.op == "sum" and core.inputs else core
    along = len(core.inputs) > 1 or "dim" in core.keywords
    return counted.op == "one_hot" and along


def _is_bounded_too_late(code: Code, quotient: Value) -> bool:
    """Returns whether a quotient is bounded from below, where 0 / 0 is NaN already."""
    for parent in code.ancestors(quotient.node) if quotient.node is not None else ():
        if isinstance(parent, ast.stmt):
            return False
        made = code.values.get(parent) if isinstance(parent, ast.Call) else None
        if made is not None and made.op in ("max", "maximum", "clamp", "clamp_min"):
            return made.lo > 0
    return False


def _quotients(code: Code) -> Iterator[tuple[Value, Value]]:
    """Yields divisions by sums and counts, with what they divide by."""
    for quotient in code.of("div", "pow", "rsqrt"):
        divisor = _divisor(quotient) if quotient.grad and quotient.inputs else None
        if divisor is None:
            continue
        whole = quotient.op == "div" and (
            _is_share_of_itself(code, quotient) or _is_count(divisor) or _is_weighted_mean(quotient)
        )
        if whole or _is_sum_of_adjacency(code, divisor):
            yield quotient, divisor


def _divisor(quotient: Value) -> Value | None:
    """Returns what something is divided by, or the base of a negative power."""
    if quotient.op == "div":
        return quotient.inputs[1] if len(quotient.inputs) > 1 else None
    if quotient.op == "rsqrt":
        return quotient.inputs[0]
    exponent = quotient.arg(1, "exponent")
    number = exponent.number() if exponent is not None else None
    return quotient.inputs[0] if number is not None and number < 0 else None


def _may_pick_nothing(code: Code, divisor: Value) -> bool:
    """Returns whether a comparison is counted that no element has to pass.

    It may stand where the function is called that adds up what it is handed.
    """
    given = [part for part in divisor.upstream(8) if is_open(part) and part.has("mask")]
    handed = [maker for part in given for maker in origins(code, part).makers]
    return any(_counts_some(part) for part in (divisor, *handed)) or any(
        map(_is_of_log_chances, divisor.upstream(16))
    )


def _is_of_log_chances(test: Value) -> bool:
    """Returns whether log-probabilities are asked which are not 0: none is where all are masked."""
    if test.op not in ("compare", "ne") or len(test.inputs) != 2 or test.inputs[1].number() != 0:
        return False
    if test.op == "compare" and test.name != "NotEq":
        return False
    return any(part.has("logprob", "logratio") for part in test.inputs[0].upstream(4))


def _counts_some(divisor: Value) -> bool:
    parts = [*divisor.upstream(16)]
    about_padding: set[int] = set()
    for part in parts:  # nearest first: what a name is given to comes after the name
        inherits = part.op in SHAPE and id(part) in about_padding
        if part.inputs and (inherits or "pad" in part.name.lower()):
            about_padding.add(id(part.inputs[0]))
    return any(
        _is_of_some_groups(part) or (is_selective(part) and not _is_about_padding(part))
        for part in parts
        if id(part) not in about_padding or _is_of_some_groups(part)
    )


def _is_about_padding(test: Value) -> bool:
    """Returns whether a comparison asks what is padding: no row is all padding."""
    return any("pad" in part.name.lower() for part in test.upstream(8))


def _is_of_some_groups(test: Value) -> bool:
    """Returns whether it asks which groups have anything, and one of them was left out before."""
    counted = test.inputs[0] if test.op in ("compare", *_ORDERS, "ne") and test.inputs else None
    while counted is not None and counted.op in SHAPE and counted.inputs:
        index = counted.inputs[1] if counted.op == "getitem" and len(counted.inputs) > 1 else None
        cut = [part.node for part in (index.items or (index,))] if index is not None else []
        if any(isinstance(node, ast.Slice) and node.lower is not None for node in cut):
            return counted.core.op in ("scatter_add", "index_add", "bincount")
        counted = counted.inputs[0]
    return False


def is_selective(test: Value) -> bool:
    """Returns whether a comparison asks for a class, a limit, or against an ignored label."""
    if test.op not in ("compare", *_ORDERS, "eq", "ne") or len(test.inputs) != 2:
        return False
    if test.inputs[0].has("mask"):
        return False  # a mask is asked whether it is one: who made it decides
    number = test.inputs[1].number()
    asked = {"compare": test.name}.get(test.op, test.op).lower()
    if asked in ("noteq", "ne"):
        return number in _IGNORED or _IGNORE.search(test.inputs[1].name.lower()) is not None
    if asked == "eq":
        return number is not None
    if number == 0.0:  # words as a rule, and no limit that somebody chose
        core = test.inputs[0].core
        squared = core.inputs[0] if core.op in ("pow", "square", "abs") and core.inputs else core
        return asked == "gt" and (core.has("labels") or squared.has("labels"))
    return asked in _ORDERS and number is not None


def _is_share_of_itself(code: Code, quotient: Value) -> bool:
    """Returns whether outputs of a layer are divided by their sum: of any sign, or of a ReLU."""
    if quotient.op != "div":
        return False
    over, under = (part.core for part in quotient.inputs[:2])
    if under.op != "sum" or not under.inputs or under.inputs[0].core is not over:
        return False
    if over.op == "relu" or _is_masked_softmax(quotient):
        return True
    return over.lo < 0 and over.op == "call" and is_made_by_network(code, quotient.inputs[0])


def _is_masked_softmax(quotient: Value) -> bool:
    """Returns whether attention weights are masked after their softmax and divided by their sum.

    What the mask leaves may have underflowed to 0 beside what it took out.
    """
    over, under = (part.core for part in quotient.inputs[:2])
    if under.op != "sum" or not under.inputs or under.inputs[0].core is not over:
        return False
    if over.op != "mul" or len(over.inputs) < 2:
        return False
    weights = [factor for factor in over.inputs[:2] if factor.core.op == "softmax"]
    others = [factor for factor in over.inputs[:2] if factor.core.op != "softmax"]
    return bool(weights) and all(factor.has("mask") for factor in others)


def _is_of_what_may_be_absent(quotient: Value) -> bool:
    """Returns whether a masked mean is over things that a batch may have none of, by their name."""
    under = quotient.inputs[1].core
    if under.op != "sum" or not under.inputs or not _is_weighted_mean(quotient):
        return False
    names = (part.name.lower() for part in under.inputs[0].upstream(3))
    return any(_MAY_BE_ABSENT.search(name) for name in names)


def _is_rest_of_masks(divisor: Value) -> bool:
    """Returns whether it counts what one mask has more than another: nothing, once cut short."""
    return any(
        part.op == "sub" and all("mask" in side.name.lower() for side in part.inputs[:2])
        for part in divisor.upstream(12)
    )


def _is_number_matched(divisor: Value) -> bool:
    """Returns whether it is how many boxes were matched with something, by its name."""
    if _is_mask_of_answers(divisor):
        return True
    counted = any(part.op == "compare" for part in divisor.upstream(16))
    return counted and any(_MATCHED.fullmatch(part.name.lower()) for part in divisor.upstream(8))


def _is_mask_of_answers(divisor: Value) -> bool:
    """Returns whether a loss of log-probabilities counts the tokens of answers: some are empty."""
    core = divisor.core
    mask = core.inputs[0].core if core.op == "sum" and core.inputs else core
    scope = mask.scope
    if scope is None or mask.op or mask.name != "mask" or "loss" not in scope.name.lower():
        return False
    return any(given.has("logprob") for given in scope.parameters.values())


def _is_sum_of_adjacency(code: Code, divisor: Value) -> bool:
    """Returns whether it is the degrees of nodes, and nobody in the file sees to lonely ones."""
    core = divisor.core
    if core.op != "sum" or not core.inputs or _MENDED.search(code.text.content):
        return False
    along = len(core.inputs) > 1 or "dim" in core.keywords
    return along and _ADJACENCY.fullmatch(core.inputs[0].name.lower()) is not None


def _is_degree(core: Value) -> bool:
    """Returns whether it is a matrix times ones: the number of neighbours, 0 for a lonely node."""
    if core.op not in ("matmul", "spmm") or len(core.inputs) < 2:
        return False
    return core.inputs[1].core.op in ("ones", "ones_like")


def _is_count(value: Value) -> bool:
    core = value.core
    if _is_degree(core):
        return True
    if core.op == "mul":
        return any(_is_count(part) for part in core.inputs)
    if core.op == "sub" and core.inputs[1].number() == 1:
        return _is_number_picked(core.inputs[0])
    if _is_size_of_picked(value):
        return True
    if core.has("masksum", "weightsum"):
        return core.op in ("sum", "mean", "count_nonzero", "nansum", "add")
    if core.op in ("index_add", "scatter_add") and core.inputs:
        return value.has("count") or core.inputs[-1].core.op in ("ones", "ones_like")
    if core.op == "sum" and core.inputs and core.inputs[0].core.op in ("bincount", "histc"):
        return True
    return core.op in ("sum", "bincount", "histc") and value.has("count")


def _is_size_of_picked(value: Value) -> bool:
    """Returns whether it is the number of rows that a comparison has picked."""
    core = value.core
    if core.op not in ("size", "len", "numel") and not (core.op == "shape" and value.has("size")):
        return False
    picked = core.inputs[0].core if core.inputs else core
    source = core.inputs[0] if core.inputs else core
    for part in source.upstream(3):
        if part.op == "getitem" and len(part.inputs) > 1:
            picked = part
            break
    index = picked.inputs[1] if picked.op == "getitem" and len(picked.inputs) > 1 else None
    first = index.items[0] if index is not None and index.items else index
    return first is not None and any(is_selective(part) for part in first.upstream(4))


def _is_number_picked(value: Value) -> bool:
    """Returns whether it is how many elements a condition has picked, such as those of a class."""
    core = value.core
    if core.op in ("shape", "size", "len", "numel", "getitem") or value.has("size"):
        chosen = [p for p in value.upstream(8) if p.op == "getitem" and len(p.inputs) > 1]
        return any(part.inputs[1].has("mask", "bool") for part in chosen)
    return core.has("masksum") and core.op == "sum"


def _is_written_to_what_was_counted(code: Code, quotient: Value, divisor: Value) -> bool:
    """Returns whether a quotient goes only to elements whose number its divisor holds.

    ``w[y == 1] = a / ((y == 1).sum() + b)``: where nothing was counted, nothing is written.
    """
    statement = code.statement_of(quotient.node) if quotient.node is not None else None
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    picked = {ast.unparse(t.slice) for t in targets if isinstance(t, ast.Subscript)}
    return any(
        part.op == "compare" and part.node is not None and ast.unparse(part.node) in picked
        for part in divisor.upstream(24)
    )


def _is_weighted_mean(quotient: Value) -> bool:
    """Returns whether a sum is divided by the sum of its weights, or of something handed in."""
    if quotient.op != "div":
        return False
    over, under = (part.core for part in quotient.inputs[:2])
    scope = quotient.scope
    if under.op == "sum" and scope is not None and "normali" in scope.name.lower():
        return under.inputs[0].core is over and over.op == ""
    if over.op == "neg" and over.inputs:
        over = over.inputs[0].core
    if over.op != "sum" or under.op != "sum" or not under.inputs or not over.inputs:
        return False
    weights = under.inputs[0].core
    if weights.op == "" and weights.number() is None:
        return True
    picked = over.inputs[0]
    if picked.op == "getitem" and len(picked.inputs) > 1 and picked.inputs[1].core is weights:
        return True
    product = over.inputs[0].core
    return product.op == "mul" and any(part.core is weights for part in product.inputs)


def _is_never_empty(value: Value) -> bool:
    core = value.core
    if _is_degree(core):
        return any(part.op == "eye" for part in core.inputs[0].upstream(16))
    counted = core.inputs[0].core.op if core.op == "sum" and core.inputs else ""
    if core.op in ("index_add", "scatter_add") or counted in ("bincount", "histc"):
        return False  # what was counted may have been picked before
    parts = [*value.upstream(16)]
    if any(map(_holds_itself, parts)) and not any(part.op in _TAKES_OUT for part in parts):
        return True
    return any(
        part.op in _NEVER_EMPTY or "causal" in part.name.lower() or part.op == "local"
        for part in parts
    )


def _holds_itself(value: Value) -> bool:
    """Returns whether labels are compared with a set that holds them, as a row with itself."""
    if value.op not in ("eq", "compare") or len(value.inputs) < 2:
        return False
    if value.op == "compare" and value.name != "Eq":
        return False
    one, other = value.inputs[:2]
    return any(part.core is one.core for part in _members(other)) or any(
        part.core is other.core for part in _members(one)
    )


def _members(value: Value) -> Iterator[Value]:
    """Yields what a value was made from, and what was put together in it."""
    for part in value.upstream(8):
        yield part
        for item in part.items or ():
            yield from item.upstream(6)


def _fixes(code: Code, quotient: Value) -> tuple[Fix, ...]:
    node = operand(quotient, 1)
    title = "bound the divisor from below"
    counts = _is_number_of(quotient, quotient.inputs[1].core)
    bound = f".clamp(min={floors.COUNT if counts else floors.DIVISOR})"
    if node is None or not _is_tensor(quotient.inputs[1]):
        return (Fix(title + f": {bound}"),)
    return (Fix(title, edits=(replaced(code, node, f"{bare(code, node)}{bound}"),)),)


def _is_tensor(value: Value) -> bool:
    """Returns whether a divisor is a tensor for certain, which has a clamp, and no number."""
    if is_number(value):
        return False
    core = value.core
    parts = core.inputs if core.op == "mul" else (core,)
    return any(part.core.op in _OF_TENSORS for part in parts)


def _is_number_of(quotient: Value, divisor: Value) -> bool:
    """Returns whether a divisor is 0 or at least 1: a number of things, and no sum of weights.

    Where what is added up is also a factor of the numerator, and is no mask, it may be anything.
    """
    if divisor.op == "mul":
        parts = [part.core for part in divisor.inputs]
        return all(_is_whole(part) or _is_number_of(quotient, part) for part in parts)
    if divisor.op not in ("sum", "nansum") or not divisor.inputs:
        return divisor.op != "mean" and not divisor.has("weightsum")
    added = divisor.inputs[0]
    if added.has("weights"):
        return False
    factors = quotient.inputs[0].upstream(16)
    return added.has("mask", "labels", "count") or all(f.core is not added.core for f in factors)


def _is_whole(value: Value) -> bool:
    number = value.number()
    return value.has("size") or (number is not None and number.is_integer())
