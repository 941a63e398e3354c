"""What a file of training code shows, call by call."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

from nanguard.advice.checklist.facts import Trace
from nanguard.check.code.roles import Roles, root
from nanguard.check.code.training import CLIPS, Training

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value

FINITE = ("isfinite", "isnan", "isinf")
_HF = re.compile(r"^(transformers|trl|sentence_transformers|setfit)\b")
_LIGHTNING = re.compile(r"^(lightning|pytorch_lightning)\b")
_FOREIGN = re.compile(r"^(torchvision\.models|timm|segmentation_models|transformers|diffusers)\b")
_WARM = re.compile(r"warm_?up|^OneCycleLR$|^LinearLR$", re.IGNORECASE)

_SCALERS = ("GradScaler", "ShardedGradScaler")

# Calls that show something by their name alone: the trace, the names, and what to say.
_CALLS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("clip", tuple(sorted(CLIPS)), "clips gradients"),
    ("scaler", _SCALERS, "a GradScaler"),
    ("unscale", ("unscale", "unscale_gradients"), "unscales gradients"),
    ("batchnorm", ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"), "a BatchNorm"),
    ("sync-batchnorm", ("convert_sync_batchnorm", "SyncBatchNorm"), "synchronises BatchNorm"),
    ("half", ("autocast", "half", "bfloat16"), "computes in half precision"),
    (
        "save",
        ("save_file", "save_state", "save_checkpoint", "save_pretrained", "ModelCheckpoint",
         "save_model", "async_save"),
        "writes a checkpoint",
    ),
    (
        "safe-load",
        ("load_file", "load_state", "load_checkpoint", "resume", "load_model"),
        "loads a checkpoint",
    ),
    (
        "metrics",
        ("SummaryWriter", "CSVLogger", "TensorBoardLogger", "WandbLogger", "MLFlowLogger",
         "DictWriter", "init_trackers", "add_scalar", "log_metrics"),
        "writes metrics down",
    ),
)  # fmt: skip

# Operations that rules look at: where nothing is found, they are as they should be.
_LOOKED_AT: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("masking", ("masked_fill", "softmax", "scaled_dot_product_attention"), "a mask or softmax"),
    ("attention", ("scaled_dot_product_attention", "MultiheadAttention"), "attention"),
    (
        "norm",
        ("rsqrt", "sqrt", "norm", "normalize", "std", "var", "layer_norm", "rms_norm", "LayerNorm",
         "RMSNorm", "GroupNorm"),
        "a norm, root or deviation",
    ),
    (
        "risky-function",
        ("log", "exp", "cross_entropy", "binary_cross_entropy_with_logits", "log_softmax",
         "CrossEntropyLoss", "BCEWithLogitsLoss", "nll_loss"),
        "a logarithm or exponential",
    ),
)  # fmt: skip
_PRODUCTS = frozenset(("matmul", "bmm", "einsum", "baddbmm"))


class CodeTraces:
    """Reads the traces of one file.

    Args:
        code: The file.
    """

    def __init__(self, code: Code) -> None:
        self.code = code
        self.training = Training.of(code)
        self.roles = Roles.of(code)

    def all(self) -> Iterator[Trace]:
        """Yields every trace, in no order."""
        for name, calls, words in _CALLS:
            for call in self.training.called(*calls):
                yield self._at(name, call, words)
        yield from self._looked_at()
        yield from self._loop()
        yield from self._checks()
        yield from self._clips()
        yield from self._files()
        yield from self._settings()
        yield from self._trainers()
        yield from self._models()

    def _at(self, name: str, value: Value, words: str) -> Trace:
        return Trace(name, self.code.text.path, value.line or None, words)

    def _looked_at(self) -> Iterator[Trace]:
        for name, operations, words in _LOOKED_AT:
            for value in self.training.called(*operations):
                worded = any(isinstance(given.const, str) for given in value.inputs)
                if value.op != "call" and not worded:  # as in logger.log("...")
                    yield self._at(name, value, words)
        for softmax in self.training.called("softmax"):
            if any(part.op in _PRODUCTS for part in softmax.upstream(24)):
                yield self._at("attention", softmax, "attention")

    def _loop(self) -> Iterator[Trace]:
        if self.training.trains:
            for step in self.training.steps:
                yield self._at("step", step, "steps are made here")
        if self.training.several_ranks:
            path = self.code.text.path
            yield Trace("several-ranks", path, None, "trains on several ranks")
        for made in self.training.called("Guard"):
            if made.path.startswith("nanguard"):
                yield self._at("guard", made, "a Guard watches every step")
        for made in self.training.called(*_SCALERS):
            if "enabled" not in made.keywords or made.keywords["enabled"].const is True:
                yield self._at("scaler-on", made, "a GradScaler leaves out steps that overflow")
        for call in self.training.called("all_reduce", "reduce", "gather"):
            if any(p.op in FINITE for given in call.inputs for p in given.upstream(24)):
                yield self._at("agreed", call, "ranks tell each other whether the step is bad")

    def _checks(self) -> Iterator[Trace]:
        for check in self.training.called(*FINITE):
            given = next((v for v in check.inputs if v.path not in ("math", "numpy")), None)
            if given is None:
                continue
            role = self.roles.role(given)
            if role == "loss":
                yield self._at("loss-check", check, f"{check.op} on the loss")
            elif role in ("norm", "gradient"):
                yield self._at("gradient-check", check, f"{check.op} on the {role}")
            elif not any(part.has("network") for part in root(given).upstream(12)):
                yield self._at("input-check", check, f"{check.op} on an input")

    def _clips(self) -> Iterator[Trace]:
        for clip in self.training.clips:
            bare = isinstance(self.code.parents.get(clip.node), ast.Expr) if clip.node else True
            if clip.op != "clip_grad_norm" and "norm" not in clip.name:
                continue
            if bare:
                yield self._at("norm-unused", clip, "the norm is thrown away")
            else:
                yield self._at("norm-used", clip, "keeps the norm of the gradient")
            if clip.inputs and "accelerator" in clip.inputs[0].name.lower():
                yield self._at("accelerator-clip", clip, "Accelerate unscales before it clips")
        for step in self.training.called("step"):
            if "max_norm" in step.keywords:
                yield self._at("clip", step, "the guard clips gradients")

    def _files(self) -> Iterator[Trace]:
        for call in self.training.called("save"):
            if call.path.startswith(("torch.save", "torch.distributed.checkpoint")):
                yield self._at("save", call, "writes a checkpoint")
        for call in self.training.called("load"):
            only = call.keywords.get("weights_only")
            if call.path == "torch.load" and only is not None and only.const is True:
                yield self._at("safe-load", call, "loads a checkpoint with weights_only=True")
            elif call.path.startswith("torch.distributed.checkpoint"):
                yield self._at("safe-load", call, "loads a checkpoint")
        for call in self.training.called("init", "log"):
            if call.path.startswith(("wandb.", "mlflow.", "swanlab.", "trackio.")):
                yield self._at("metrics", call, "writes metrics down")

    def _settings(self) -> Iterator[Trace]:
        for name, calls in self.training.calls.items():
            for call in [call for call in calls if "profiler" not in call.path]:
                told = next((key for key in call.keywords if _WARM.search(key)), "")
                number = call.keywords[told].number() if told else None
                if _WARM.search(name) or (told and number != 0 and name != "add_argument"):
                    yield self._at("warmup", call, f"{told or name}: a warm-up")
                if call.path.startswith("torch.optim.") and "lr" in call.keywords:
                    yield from self._rate(call)

    def _rate(self, optimizer: Value) -> Iterator[Trace]:
        rate = optimizer.keywords["lr"].number()
        adaptive = "adam" in optimizer.path.lower()
        if rate is not None and 0 < rate <= (1e-3 if adaptive else 0.1):
            name = optimizer.path.rpartition(".")[2]
            yield self._at("rate-low", optimizer, f"{name} with lr {rate:g}")

    def _trainers(self) -> Iterator[Trace]:
        for made in [v for name, v in self._made() if name.endswith("Trainer")]:
            if _HF.search(made.path):
                yield self._at("hf-trainer", made, "the Trainer of transformers does it")
            elif _LIGHTNING.search(made.path):
                yield self._at("lightning-trainer", made, "Lightning's Trainer does it")
                given = made.keywords.get("gradient_clip_val")
                if given is not None and given.number() != 0 and given.name != "None":
                    yield self._at("clip", made, "gradient_clip_val clips gradients")
        for name, made in self._made():
            if name.endswith(("Arguments", "Config")) and _HF.search(made.path):
                yield from self._arguments(made)

    def _arguments(self, made: Value) -> Iterator[Trace]:
        given = made.keywords
        if "logging_nan_inf_filter" in given and given["logging_nan_inf_filter"].const is False:
            yield self._at("nan-filter-off", made, "logging_nan_inf_filter=False")
        if "max_grad_norm" in given and given["max_grad_norm"].number() == 0:
            yield self._at("clip-off", made, "max_grad_norm=0 turns clipping off")
        if "save_strategy" in given and given["save_strategy"].const == "no":
            yield self._at("save-off", made, "save_strategy='no' writes no checkpoint")
        if any(given[key].const for key in ("fp16", "bf16") if key in given):
            yield self._at("half", made, "computes in half precision")

    def _models(self) -> Iterator[Trace]:
        for cls in self.code.classes.values():
            if cls.is_module():
                path, line = self.code.text.path, cls.node.lineno
                yield Trace("model", path, line, f"the parameters of {cls.name}")
        for name, calls in self.training.calls.items():
            for call in calls:
                if _FOREIGN.search(call.path) or name == "from_pretrained":
                    yield self._at("foreign-model", call, "a model of others")
                if call.path.startswith("torch.nn.init."):
                    yield self._at("init", call, "fills parameters")
                last = call.keywords.get("drop_last")
                if last is not None and last.const is True:
                    yield self._at("drop-last", call, "drop_last=True leaves no batch of one")
                if name in ("clamp", "clip", "minimum") and call.inputs[:1]:
                    yield from self._bound(call)

    def _bound(self, clamp: Value) -> Iterator[Trace]:
        upper = clamp.arg(2, "max") or (clamp.arg(1, "other") if clamp.op == "minimum" else None)
        if upper is not None and clamp.inputs[0].has("weights"):
            yield self._at("weights-bounded", clamp, "weights have an upper bound")

    def _made(self) -> Iterator[tuple[str, Value]]:
        for name, calls in self.training.calls.items():
            for call in calls:
                if call.path:
                    yield name, call
