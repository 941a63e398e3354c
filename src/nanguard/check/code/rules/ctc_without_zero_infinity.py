"""A CTC loss that is infinite for a target that is too long."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Edit, Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

# Code that looks after infinite losses in another way.
_HANDLED = re.compile(r"isinf|isfinite|nan_to_num|float\(.inf.\)|math\.inf|np\.inf")
_PLACES = {"ctc_loss": 6, "new": 2}  # where the argument stands if it has no name


class CtcWithoutZeroInfinity(CodeRule):
    """`CTCLoss` without `zero_infinity=True`, and nothing that looks after infinite losses.

    *Why it breaks a run*: a target that is longer than its input, repeated symbols counted twice,
    cannot be aligned: its loss is inf and its gradient NaN. Subsampling by four and one utterance
    that is spoken fast, or cut too short, are enough. One such sample makes the batch's mean inf
    and every weight NaN.

    Write `CTCLoss(zero_infinity=True)`, and count or filter the samples it silences.
    """

    code = "SRC037"
    name = "ctc-without-zero-infinity"
    severity = Severity.WARNING
    seen_in = "https://github.com/FangShancheng/ABINet/issues/65"
    examples: ClassVar = (
        Fails(
            "import torch\n\nctc = torch.nn.CTCLoss(blank=0)\n",
            line=3,
            fixed="import torch\n\nctc = torch.nn.CTCLoss(blank=0, zero_infinity=True)\n",
        ),
        Fails(
            "import torch.nn.functional as F\n\n\ndef loss(lp, y, n, m):\n"
            "    return F.ctc_loss(lp, y, n, m)\n",
            line=5,
        ),
        Passes(
            "import torch\n\nctc = torch.nn.CTCLoss(blank=0, zero_infinity=True)\n\n\n"
            "def loss(lp, y, n, m):\n    return ctc(lp, y, n, m)\n"
        ),
        Passes(
            "import torch\n\nctc = torch.nn.CTCLoss()\n\n\ndef loss(lp, y, n, m):\n"
            "    value = ctc(lp, y, n, m)\n    return value[torch.isfinite(value)].mean()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        if _HANDLED.search(code.text.content):
            return
        for call in code.of("new", "ctc_loss"):
            if not isinstance(call.node, ast.Call) or not _is_ctc(call):
                continue
            given = call.arg(_PLACES[call.op], "zero_infinity")
            if given is not None and given.const is not False:
                continue
            yield self.at(
                code,
                call.node,
                "this CTC loss is inf, with NaN gradients, for a target that is too long for its "
                "input: zero_infinity is not set",
                fixes=(Fix("set zero_infinity=True", edits=_edits(code, call.node)),),
            )


def _is_ctc(call: Value) -> bool:
    # A call of the layer has the layer's path, and its settings stand elsewhere.
    return call.path == ("torch.nn.CTCLoss" if call.op == "new" else "torch.ctc_loss")


def _edits(code: Code, node: ast.Call) -> tuple[Edit, ...]:
    for keyword in node.keywords:
        if keyword.arg == "zero_infinity":
            return (Edit(*code.span(keyword.value), "True"),)
    if len(node.args) > 2:
        return ()
    _, end = code.span(node)
    comma = ", " if node.args or node.keywords else ""
    return (Edit(end - 1, end - 1, f"{comma}zero_infinity=True"),)
