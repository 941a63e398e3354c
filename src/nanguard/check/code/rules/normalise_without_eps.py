"""Division by a norm, a spread or a range that can be 0."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule, bare, operand, replaced
from nanguard.check.code.training_path import (
    is_about_data,
)
from nanguard.check.code.value_questions import (
    can_be_zero,
    guarded_by,
    has_eps_outside,
    is_learned,
    is_number,
    is_repaired_at_once,
    is_table,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity
from nanguard.source import floors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

_REWARDS = re.compile(
    r"(b_|mb_|batch_|discounted_?)?(adv(antages?)?|returns?|rewards?|gaes?|discounts?|costs?)(_\w+)?"
    r"|g_?t|discounted_r"
)
# What reads scans and sounds.
_OF_RECORDS = (
    "nibabel", "SimpleITK", "pydicom", "medpy", "librosa", "torchaudio", "soundfile", "wfdb", "mne",
)  # fmt: skip
_WORDS = {
    "minmax": "range",
    "norm": "norm",
    "std": "standard deviation",
    "sumsq": "root mean square",
    "var": "variance",
}


class NormaliseWithoutEps(CodeRule):
    """Scaling by a norm, a standard deviation, a root mean square or a range, with no eps.

    *Why it breaks a run*: a padded row, a dead unit, a constant image has a norm, a spread or a
    range of exactly 0, and 0 / 0 is NaN.

    It is a warning where that is seen to happen: returns or advantages, which are all equal when no
    reward was earned, what a ReLU has set to 0, the spread, range or size by which a module scales
    what it is given or has learned, along a dimension that may collapse, distances from the edge of
    an empty mask, and the range of slices of scans and of sounds in a `Dataset`. Elsewhere it is a
    remark.

    Use `F.normalize(x, dim=-1)`, `layer_norm`, or bound the divisor:
    `x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6)`.
    """

    code = "SRC025"
    name = "normalise-without-eps"
    severity = Severity.WARNING
    claim = "value"
    seen_in = "https://github.com/keras-team/keras/pull/23093"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef f(x):\n    return x / x.norm(dim=-1, keepdim=True)\n",
            line=5,
            fixed="import torch\n\n\ndef f(x):\n"
            "    return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-6)\n",
        ),
        Passes(
            "import torch\n\n\ndef f(x):\n    s = x.std(-1, keepdim=True)\n    s[s < 0.1] = 0.1\n"
            "    return (x - x.mean(-1, keepdim=True)) / s\n"
        ),
        Passes(
            "import torch\n\n\ndef f(x):\n    s = x.std(-1, keepdim=True)\n    s[s == 0] = 1.0\n"
            "    return (x - x.mean(-1, keepdim=True)) / s\n"
        ),
        Fails(
            "import torch\n\n\ndef f(x):\n    ms = x.pow(2).mean(-1, keepdim=True)\n"
            "    return x * torch.rsqrt(ms)\n",
            line=6,
        ),
        Fails(
            "import torch\n\n\ndef f(x):\n    lo, hi = x.amin(), x.amax()\n"
            "    return (x - lo) / (hi - lo)\n",
            line=6,
        ),
        Fails(
            "import torch\n\n\ndef f(x):\n    x = x - x.min(1, keepdim=True)[0]\n"
            "    return x / x.max(1, keepdim=True)[0]\n",
            line=6,
        ),
        Fails(
            "import numpy as np\nimport torch\nfrom torch.utils.data import Dataset\n\n\n"
            "class Waves(Dataset):\n    def __getitem__(self, i):\n"
            "        x = np.load(self.files[i])\n"
            "        return torch.from_numpy((x - np.mean(x)) / np.std(x))\n",
            line=9,
        ),
        Fails(
            "import nibabel\nimport torch\nfrom torch.utils.data import Dataset\n\n\n"
            "class Slices(Dataset):\n    def __getitem__(self, i):\n"
            "        x = nibabel.load(self.files[i]).get_fdata()[..., self.slices[i]]\n"
            "        return torch.from_numpy((x - x.min()) / (x.max() - x.min()))\n",
            line=9,
        ),
        Fails(
            "import torch\n\n\ndef scaled(returns):\n"
            "    return (returns - returns.mean()) / returns.std()\n",
            line=5,
        ),
        Passes("import torch\n\n\ndef f(x):\n    return x / (x.norm(dim=-1) + 1e-6)\n"),
        Passes("import torch\n\n\ndef f(x, mean, std):\n    return (x - mean) / std\n"),
        Passes("import torch\n\n\ndef f(x, eps):\n    return x / x.std().clamp(min=eps)\n"),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        for quotient in code.of("div", "rsqrt"):
            divisor = _divisor(quotient)
            if divisor is None:
                continue
            in_data = is_about_data(quotient)
            mapped = _is_of_distance_map(divisor)
            word = _word(divisor, numpy=in_data or mapped or _is_of_rewards(divisor.core))
            if not word or not can_be_zero(divisor) or guarded_by(divisor, quotient.guards):
                continue
            if has_eps_outside(code, quotient) or is_table(divisor) or is_number(divisor):
                continue
            if is_repaired_at_once(code, quotient.node):
                continue
            if quotient.op == "div" and not _is_of_the_same(quotient.inputs[0], divisor):
                continue
            yield self.at(
                code,
                quotient.node,
                f"division by a {word} that can be 0: 0 / 0 is NaN",
                fixes=_fixes(code, quotient),
                shown=mapped
                or _is_of_zeros(divisor.core)
                or _is_of_activations(quotient, divisor.core)
                or _is_spread_of_learned(code, divisor.core)
                or _is_range_of_learned(code, divisor.core),
                claim="code"
                if _is_of_rewards(divisor.core) or (in_data and _is_of_records(code, divisor))
                else None,
            )


def _is_of_rewards(divisor: Value) -> bool:
    """Returns whether it is the spread of what an agent has earned: 0 where all is the same."""
    spread = divisor.op in ("std", "numpy.std")
    if not divisor.inputs or not (spread or _starts_at_zero(divisor.inputs[0].core)):
        return False
    measured = divisor.inputs[0]
    if measured.core.op == "sum":  # of the rewards of each episode
        measured = measured.core.inputs[0] if measured.core.inputs else measured
        names = [part.name.lower() for part in measured.upstream(4)]
        return any(name in ("scores", "rewards") for name in names)
    return _REWARDS.fullmatch(measured.name.lower()) is not None


def _is_of_records(code: Code, divisor: Value) -> bool:
    """Returns whether it is the range or the spread of what some records lack altogether.

    A slice of a scan may lie outside of the body, a clip may be silent.
    """
    if divisor.core.op not in ("sub", "std", "numpy.std", "max", "numpy.max"):
        return False
    return code.names.imported(*_OF_RECORDS)


def _is_of_distance_map(divisor: Value) -> bool:
    """Returns whether it is the largest distance in a map of distances from a mask's edge."""
    return any(part.name.startswith("distance_transform") for part in divisor.upstream(16))


def _is_of_zeros(divisor: Value) -> bool:
    """Returns whether what is measured is seen to be 0 as a whole for some rows."""
    measured = divisor.inputs[0].core if divisor.inputs else None
    while measured is not None and measured.op in ("mul", "sum", "mean", "pow", "abs"):
        measured = measured.inputs[0].core if measured.inputs else None
    return measured is not None and measured.op == "relu"


def _is_of_activations(quotient: Value, divisor: Value) -> bool:
    """Returns whether a module divides what it is given by its spread or size along a dimension."""
    scope = quotient.scope
    if scope is None or scope.cls is None or not scope.cls.is_module() or scope.name != "forward":
        return False
    if divisor.op in ("sqrt", "rsqrt") and divisor.inputs and divisor.has("norm"):
        divisor = divisor.inputs[0].core  # of a mean of squares
    if divisor.op not in ("std", "mean") or not divisor.inputs:
        return False
    if len(divisor.inputs) < 2 and "dim" not in divisor.keywords:
        return False
    measured = divisor.inputs[0].core
    if measured.has("square") and measured.inputs:
        measured = measured.inputs[0].core
    return any(measured is given for given in scope.parameters.values())


def _is_range_of_learned(code: Code, divisor: Value) -> bool:
    """Returns whether it is the largest less the smallest of what is learned, by dimension."""
    if divisor.op != "sub" or len(divisor.inputs) < 2 or not divisor.has("minmax"):
        return False
    highest = divisor.inputs[0].core
    return len(highest.inputs) > 1 and is_learned(code, highest.inputs[0])


def _is_spread_of_learned(code: Code, divisor: Value) -> bool:
    """Returns whether it is the spread of what is learned along a dimension, which may collapse.

    Over a batch of one it is NaN as well.
    """
    spread = divisor
    if spread.op in ("sqrt", "rsqrt") and spread.inputs:
        spread = spread.inputs[0].core
    if spread.op not in ("std", "var") or not spread.inputs:
        return False
    along = len(spread.inputs) > 1 or "dim" in spread.keywords
    return along and is_learned(code, spread.inputs[0])


def _divisor(quotient: Value) -> Value | None:
    if quotient.op == "rsqrt":
        return quotient.inputs[0] if quotient.inputs else None
    if len(quotient.inputs) < 2:
        return None
    return quotient.inputs[1]


def _is_of_the_same(over: Value, divisor: Value) -> bool:
    """Returns whether something is divided by a measure of itself, and not one by another."""
    if over.number() == 1:
        return True
    if over.core.has("std", "var", "norm") and over.core.op not in ("div", "mul"):
        return False
    measured = {id(part) for part in divisor.upstream(24)}
    names = {part.name for part in divisor.upstream(24) if part.name and not part.has("size")}
    return any(
        (id(part) in measured and part.const is None and part.op != "self")
        or (part.name in names and part.name != "self")
        for part in over.upstream(24)
        if not part.has("size")
    )


def _word(divisor: Value, *, numpy: bool = False) -> str:
    core = divisor.core
    if core.op.startswith("numpy.") and not numpy:
        return ""
    if core.op == "mul":
        return next((word for part in core.inputs if (word := _word(part, numpy=numpy))), "")
    if core.op in ("max", "amax", "maximum", "numpy.max") and core.inputs:
        inner = core.inputs[0]
        if _is_of_distance_map(divisor):
            return "largest distance"
        if inner.has("norm", "std"):
            return "largest norm"
        if _starts_at_zero(inner.core):
            return "range"
        return "peak" if inner.core.op == "abs" and len(core.inputs) < 3 else ""
    if core.op in ("mean", "sum", "median", "", "join", "add"):
        return "root mean square" if core.op == "mean" and core.has("sumsq") else ""
    return next((word for kind, word in _WORDS.items() if core.has(kind)), "")


def _starts_at_zero(value: Value) -> bool:
    """Returns whether the smallest of some values was taken off them: their peak is a range."""
    if value.op != "sub" or len(value.inputs) < 2:
        return False
    least = value.inputs[1].core
    least = least.inputs[0].core if least.op in ("index", "item") and least.inputs else least
    return least.op in ("min", "amin") and bool(least.inputs) and len(least.inputs) < 3


def _fixes(code: Code, quotient: Value) -> tuple[Fix, ...]:
    node = operand(quotient, 0 if quotient.op == "rsqrt" else 1)
    title = "bound the divisor from below"
    if node is None:
        return (Fix(title),)
    low = floors.SQUARE if quotient.op == "rsqrt" else floors.DIVISOR
    return (Fix(title, edits=(replaced(code, node, f"{bare(code, node)}.clamp(min={low})"),)),)


# What takes a dimension away, with the places of the dimension and of keepdim.
_REDUCES = {
    "norm": (2, 3),
    "vector_norm": (2, 3),
    "sum": (1, 2),
    "mean": (1, 2),
    "amax": (1, 2),
    "std": (1, 3),
    "var": (1, 3),
}
# What leaves the shape of a divisor as it is.
_KEEPS_SHAPE = frozenset(
    {"named", "detach", "clamp", "clamp_min", "clip", "add", "maximum", "sqrt", "float", "to"}
)
# Matrices that look the same from both sides.
_SQUARE = re.compile(
    r"adj|sim|affin|kernel|matri|mat$|cov|corr|gram|attn|dist|graph|^[akw]$|cost|conf"
)


class MissingKeepdim(CodeRule):
    """`x / x.norm(dim=1)`: a measure of each row without `keepdim=True` divides the tensor.

    *Why it breaks a run*: shapes are matched from the end, so that the norm of the first row
    divides the first column. It works for a batch of one; it is an error for most other batches,
    and where there are as many rows as columns each is silently scaled by the norm of another: a
    cosine above 1, which `acos` makes NaN, a probability that does not add up.

    Write `x / x.norm(dim=1, keepdim=True)`, or `F.normalize(x, dim=1)`.
    """

    code = "SRC060"
    name = "missing-keepdim"
    severity = Severity.WARNING
    seen_in = "https://github.com/HomebrewML/HeavyBall/issues/96"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef f(x):\n"
            "    return x / torch.norm(x, p=2, dim=1).detach().clamp(min=1e-8)\n",
            line=5,
        ),
        Fails(
            "import torch\n\n\ndef f(x):\n    total = x.sum(1) + 1e-6\n    return x / total\n",
            line=6,
        ),
        Passes("import torch\n\n\ndef f(x):\n    return x / x.norm(dim=1, keepdim=True)\n"),
        Passes("import torch\n\n\ndef f(x):\n    return x / x.norm(2, 1, True)\n"),
        Passes("import torch\n\n\ndef f(x):\n    return x / (x.sum(dim=0) + 1e-6)\n"),
        Passes("import torch\n\n\ndef f(v):\n    return v / (v.norm(dim=-1) + 1e-6)\n"),
        Passes("import torch\n\n\ndef f(x):\n    return x / x.sum(dim=1)[:, None]\n"),
        Passes("import torch\n\n\ndef f(x):\n    return x.t() / (x.norm(dim=1) + 1e-6)\n"),
        Passes("import torch\n\n\ndef f(x):\n    return x.diag() / (x.sum(dim=1) + 1e-6)\n"),
        Passes(
            "import torch\n\n\ndef f(x):\n    n = x.sum(dim=1)\n    n = n.unsqueeze(1)\n"
            "    return x / (n + 1e-6)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        for quotient in code.of("div"):
            if len(quotient.inputs) < 2:
                continue
            over, measure = _unnamed(quotient.inputs[0]), _measure(quotient.inputs[1])
            if measure is None or _unnamed(measure.inputs[0]) is not over or over.op == "join":
                continue
            yield self.at(
                code,
                quotient.node,
                f"{measure.op} without keepdim divides what it was taken of: shapes are matched "
                "from the end, so that rows are divided by the measures of others",
                fixes=(Fix("write keepdim=True"),),
                weak=over.has("size") or _SQUARE.search(over.name.lower()) is not None,
            )


def _unnamed(value: Value) -> Value:
    while value.op == "named" and value.inputs:
        value = value.inputs[0]
    return value


def _measure(divisor: Value) -> Value | None:
    """Returns what takes away a dimension that is not the first one, if that makes a divisor."""
    for _ in range(8):
        if divisor.op in _REDUCES:
            break
        if divisor.op not in _KEEPS_SHAPE or not divisor.inputs:
            return None
        if divisor.op in ("add", "maximum") and divisor.inputs[-1].number() is None:
            return None
        divisor = divisor.inputs[0]
    if divisor.op not in _REDUCES or not divisor.inputs:
        return None
    of_dim, of_keepdim = _REDUCES[divisor.op]
    dim, keepdim = divisor.arg(of_dim, "dim"), divisor.arg(of_keepdim, "keepdim")
    number = dim.const if dim is not None else None
    kept = keepdim is not None or bool({"keepdims", "**"} & divisor.keywords.keys())
    first = isinstance(number, bool) or not isinstance(number, int) or number < 1
    return None if kept or first else divisor
