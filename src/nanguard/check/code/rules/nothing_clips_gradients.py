"""Training in half precision in a project in which nothing clips gradients."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, ClassVar

from nanguard.check.code.code_rule import CodeRule
from nanguard.check.code.training import Training
from nanguard.check.rule import Fails, Passes
from nanguard.findings import Finding, Fix, Severity

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code

# What clips, and optimizers that bound the length of their own updates.
_CLIPS = re.compile(
    r"clip_?grad|grad(ient)?s?_?clip|max_?(grad_?)?norm|clip_?norm|\.grad\.clamp"
    r"|\b(LARS|Lars|LAMB|Lamb|Adafactor|Lion|Muon)\w*\("
)
_FIX = Fix(
    "before the step: scaler.unscale_(optimizer), then "
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
)


_SCALER = re.compile(r"scal[ae]r")
# What is known for large gradients: recurrence, a discriminator, returns of a game, exponentials of
# what is learned.
_LARGE_GRADIENTS = re.compile(
    rb"nn\.(LSTM|GRU|RNN)(Cell)?\(|[dD]iscriminator\w*\(|\bgym(nasium)?\b|\bpolicy_(loss|gradient)\b"
    rb"|exp\([^()\n]{0,24}log_?(var|std|sigma)|log_?(var|std|sigma)\w*\)?\.(mul\([^)\n]*\)\.)?exp\("
)


class NothingClipsGradients(CodeRule):
    """A GradScaler in a project in which no file clips gradients; said once, at the step.

    *Why it breaks a run*: in float16 a gradient that overflows is skipped by the scaler, but one
    that is merely a hundred times too large is not: it is unscaled and stepped on, the weights
    move far away, and the next loss is NaN. Clipping the norm costs nothing on a healthy step.

    Many a run goes well without. It is a warning where the project has something that is known for
    large gradients: recurrent layers, a discriminator, rewards, exponentials of a log-variance;
    elsewhere it is a remark.

    Clip between `scaler.unscale_(optimizer)` and `scaler.step(optimizer)`. Where the optimizer
    bounds its own updates, or the loss cannot spike, allow it.
    """

    code = "SRC036"
    name = "nothing-clips-gradients"
    severity = Severity.WARNING
    seen_in = "https://github.com/chentuochao/Sound_Bubble/issues/4"
    examples: ClassVar = (
        Fails(
            "import torch\n\n\ndef train(model, loader, opt):\n"
            "    scaler = torch.cuda.amp.GradScaler()\n    for x in loader:\n"
            "        with torch.autocast('cuda', dtype=torch.float16):\n"
            "            loss = model(x)\n        scaler.scale(loss).backward()\n"
            "        scaler.step(opt)\n        scaler.update()\n",
            line=10,
        ),
        Passes(
            "import torch\n\n\ndef train(model, loader, opt):\n"
            "    scaler = torch.cuda.amp.GradScaler()\n    for x in loader:\n"
            "        loss = model(x)\n        scaler.scale(loss).backward()\n"
            "        scaler.unscale_(opt)\n"
            "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
            "        scaler.step(opt)\n        scaler.update()\n"
        ),
        Passes(
            "import torch\n\n\ndef train(model, loader, opt):\n    for x in loader:\n"
            "        loss = model(x)\n        loss.backward()\n        opt.step()\n"
        ),
    )

    def check(self, code: Code) -> Iterator[Finding]:
        """Yields what is wrong with a file."""
        training = Training.of(code)
        scalers = [made for made in training.called("GradScaler") if made.op in ("new", "call")]
        if not training.trains or not scalers or _CLIPS.search(code.text.content):
            return
        if all(_is_off(made.keywords.get("enabled")) for made in scalers):
            return
        project = code.project
        if project is not None and not project.is_first(code.text.path, "GradScaler(", _CLIPS):
            return
        step = next((s for s in training.steps if _SCALER.search(s.inputs[0].name.lower())), None)
        if step is not None:
            message = "trained with a GradScaler, and no file of the project clips gradients"
            yield self.at(
                code, step.node, message, fixes=(_FIX,), weak=not _expects_large_gradients(code)
            )


def _expects_large_gradients(code: Code) -> bool:
    """Returns whether something in the project is known for large gradients."""
    if code.project is not None:
        return code.project.some_file_has(_LARGE_GRADIENTS)
    return _LARGE_GRADIENTS.search(code.text.content.encode()) is not None


def _is_off(value: object) -> bool:
    return getattr(value, "const", None) is False
