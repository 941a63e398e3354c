"""Training in float16 with a loss that nothing scales."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.training import Training
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

# Whoever scales losses, in any file of the project.
_SCALES = re.compile(
    rb"[Ss]caler|scale_loss|loss_scal|FP16_Optimizer|[Aa]ccelerat|deepspeed|[Ll]ightning|fairscale"
)


class Fp16LossNotScaled(CodeRule):
    """A float16 autocast region, or apex at O1 or O2, with a plain `loss.backward()`.

    *Why it breaks a run*: gradients below 6e-8 are 0 in float16, and most are that small: layers
    stop learning without a sign of it. What overflows is not skipped either, since that is the
    scaler's work: one inf in a gradient reaches the weights.

    Scale the loss: `scaler.scale(loss).backward()`, `scaler.step(optimizer)`, `scaler.update()`
    with a `GradScaler`; with apex, `with amp.scale_loss(loss, optimizer) as scaled`. Or use
    bfloat16, which needs no scaling.
    """

    code = "SRC038"
    name = "fp16-loss-not-scaled"
    severity = Severity.WARNING
    seen_in = "https://github.com/NVIDIA/apex/issues/747"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n"
            "        with torch.cuda.amp.autocast():\n            loss = model(x).mean()\n"
            "        loss.backward()\n        opt.step()\n",
            line=8,
        ),
        Fails(
            "import torch\nfrom apex import amp\n\n\ndef train(model, loader, opt):\n"
            '    model, opt = amp.initialize(model, opt, opt_level="O1")\n    for x in loader:\n'
            "        loss = model(x).mean()\n        loss.backward()\n        opt.step()\n",
            line=6,
        ),
        Passes(
            "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n"
            "        with torch.autocast('cuda', dtype=torch.bfloat16):\n"
            "            loss = model(x).mean()\n        loss.backward()\n        opt.step()\n"
        ),
        Passes(
            "import torch\nfrom apex import amp\n\n\ndef train(model, loader, opt):\n"
            '    model, opt = amp.initialize(model, opt, opt_level="O1")\n    for x in loader:\n'
            "        with amp.scale_loss(model(x).mean(), opt) as scaled:\n"
            "            scaled.backward()\n        opt.step()\n"
        ),
        Passes(
            "import torch\n\n\ndef train(model, teacher, loader, opt):\n    for x in loader:\n"
            "        with torch.no_grad(), torch.cuda.amp.autocast():\n            y = teacher(x)\n"
            "        loss = (model(x) - y).square().mean()\n        loss.backward()\n"
            "        opt.step()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        training = Training.of(code)
        starts = [call for call in training.called("initialize") if _is_apex(code, call)]
        regions = [*code.of("autocast")]
        if not starts and not (regions and training.backwards):
            return
        project = code.project
        text = code.text.content.encode()
        if _SCALES.search(text) or (project is not None and project.some_file_has(_SCALES)):
            return
        fix = Fix("scale the loss with a GradScaler, or use bfloat16")
        for call in starts:
            message = "apex is asked for float16, and no file of the project scales a loss"
            yield self.at(code, call.node, message, fixes=(fix,))
        for backward in training.backwards if not starts else ():
            if any(_is_of_half(made) for made in _loss(backward).upstream(40)):
                message = "backward of a loss from a float16 autocast region, and nothing scales it"
                yield self.at(code, backward.node, message, fixes=(fix,))
                return


def _loss(backward: Value) -> Value:
    return backward.inputs[0] if backward.inputs else backward


def _is_of_half(value: Value) -> bool:
    """Returns whether a value was made in a float16 region, where gradients are recorded."""
    return value.autocast == "float16" and value.grad


def _is_apex(code: Code, call: Value) -> bool:
    """Returns whether a call hands a model to apex for a level that computes in float16."""
    if not isinstance(call.node, ast.Call) or not code.names.imported("apex"):
        return False
    level = call.keywords.get("opt_level")
    return level is not None and level.const in ("O1", "O2", None)
