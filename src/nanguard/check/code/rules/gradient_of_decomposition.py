"""Gradients through the vectors of a decomposition."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.training_path import is_beside_training
from nanguard.check.code.value_questions import (
    carries_gradient,
    is_learned,
    is_only_shown,
)
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

# Where the vectors are among the results, and what they are called as fields.
_VECTORS = {
    "svd": ((0, 2), ("U", "V", "Vh")),
    "eigh": ((1,), ("eigenvectors",)),
    "eig": ((1,), ("eigenvectors",)),
    "symeig": ((1,), ("eigenvectors",)),
}
_KEEPS_APART = frozenset(
    {"eye", "eye_like", "rand", "randn", "rand_like", "randn_like", "diag_embed"}
)
_LOOKS_AFTER = re.compile(r"isfinite|isnan|nan_to_num|LinAlgError|RuntimeError|register_hook")
_FIX = Fix(
    "for a rotation, take a representation of 6 numbers and Gram-Schmidt, or compute the "
    "decomposition of a detached matrix; else add noise that keeps the values apart, and check the "
    "gradient with isfinite before the step"
)


class GradientOfDecomposition(CodeRule):
    """A gradient through the vectors of `svd`, `eigh` or `eig` of what a network made.

    The singular values and eigenvalues alone are no problem, and nothing is said of them.

    *Why it breaks a run*: the gradient of the vectors holds `1 / (s_i - s_j)` and is infinite, then
    NaN, where two values are equal: in a matrix of rank 1, in symmetric point sets, where a feature
    collapses. Close ones make gradients of any size. One such sample is enough.
    """

    code = "SRC053"
    name = "gradient-of-decomposition"
    severity = Severity.WARNING
    claim = "value"
    seen_in = "https://github.com/Pzoom522/ProcrustEs-KGE/issues/2"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\nclass Align(torch.nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n        self.net = torch.nn.Linear(3, 3)\n\n"
            "    def forward(self, a, b):\n        h = self.net(a).transpose(1, 2) @ self.net(b)\n"
            "        u, s, v = torch.svd(h)\n        return v @ u.transpose(1, 2)\n",
            line=11,
        ),
        Passes(
            "import torch\n\n\nclass Rank(torch.nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n        self.net = torch.nn.Linear(3, 3)\n\n"
            "    def forward(self, a):\n        _, s, _ = torch.svd(self.net(a))\n"
            "        return s.sum()\n"
        ),
        Passes(
            "import torch\n\n\nclass Align(torch.nn.Module):\n    def __init__(self):\n"
            "        super().__init__()\n        self.net = torch.nn.Linear(3, 3)\n\n"
            "    def forward(self, a, b):\n        h = self.net(a).transpose(1, 2) @ self.net(b)\n"
            "        u, s, v = torch.svd(h.detach())\n        return v @ u.transpose(1, 2)\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        told: set[int] = set()
        for made in code.of(*_VECTORS):
            value = made.inputs[0] if made.inputs else None
            if (
                value is None
                or id(made.scope) in told
                or not made.path.startswith("torch")
                or not made.grad
            ):
                continue
            if not carries_gradient(value) or not _uses_vectors(code, made):
                continue
            told.add(id(made.scope))
            around = code.segment(made.scope.node) if made.scope and made.scope.name else ""
            yield self.at(
                code,
                made.node,
                f"the gradient of the vectors of {made.op} is infinite where two values are equal",
                fixes=(_FIX,),
                shown=is_learned(code, value),
                weak=is_beside_training(code, made)
                or is_only_shown(code, made)
                or _LOOKS_AFTER.search(around) is not None
                or any(part.op in _KEEPS_APART for part in value.upstream(16)),
            )


def _uses_vectors(code: Code, made: Value) -> bool:
    """Returns whether what is read of the results are vectors, and not only the values."""
    places, fields = _VECTORS[made.op]
    parent = code.parents.get(made.node) if made.node is not None else None
    if isinstance(parent, ast.Attribute):
        return parent.attr in fields
    if isinstance(parent, ast.Subscript):
        index = parent.slice
        return isinstance(index, ast.Constant) and index.value in places
    if not isinstance(parent, ast.Assign) or len(parent.targets) != 1:
        return False
    target = parent.targets[0]
    scope = made.scope.node if made.scope is not None else code.tree
    if isinstance(target, ast.Tuple):
        names = [getattr(target.elts[n], "id", "_") for n in places if n < len(target.elts)]
    elif isinstance(target, ast.Name):
        uses = (n for n in ast.walk(scope) if isinstance(n, ast.Attribute) and n.attr in fields)
        return any(getattr(use.value, "id", "") == target.id for use in uses)
    else:
        return False
    read = {
        n.id for n in ast.walk(scope) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)
    }
    return any(name != "_" and name in read for name in names)
