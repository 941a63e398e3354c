"""What code, configurations and scripts show of the points of the checklist."""

from __future__ import annotations

import ast
import re
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from nanguard.advice.checklist_points import PointTrace
from nanguard.check.code.training import CLIPS, Training, ValueRoles, root
from nanguard.check.code.values import kinds_of
from nanguard.errors import SourceError
from nanguard.source.text import decode, read_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from nanguard.check.code.code import Code
    from nanguard.check.code.values import Value
    from nanguard.check.config.document import Leaf
    from nanguard.check.config.run_config import RunConfig, Setting, TrainingStage

_TRAINERS = frozenset(("huggingface", "axolotl"))
# Settings that show something where they are above zero, or on: the trace, and their names.
_POSITIVE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("clip", ("clip_norm", "clip_value")),
    ("warmup", ("warmup_steps", "warmup_epochs", "warmup_ratio", "warmup")),
    ("rate-set", ("lr",)),
    ("save", ("save_steps", "save_epochs", "save_interval", "checkpointing")),
    ("sync-batchnorm", ("sync_batchnorm",)),
    ("scaler-on", ("grad_scaler", "dynamic_loss_scale")),
    ("batchnorm", ("batchnorm",)),
)
# Keys that no rule reads: the trace, and what the key looks like.
_KEYS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("drop-last", re.compile(r"(^|_)drop_last$")),
    ("small-trial", re.compile(r"^(limit_train_batches|overfit_batches|max_train_samples)$")),
    ("metrics", re.compile(r"^(report_to|log_with|wandb_project|logger|tensorboard_dir)$")),
)
_NONE = (None, False, "", "none", "no", 0)


def config_traces(run: RunConfig) -> Iterator[PointTrace]:
    """Yields what one run shows."""
    for document in run.documents:
        yield PointTrace("configuration", document.path, None, "its keys")
    for stage in run.stages:
        yield from _stage(stage)
    for leaf in run.leaves:
        yield from _leaf(leaf)
    if run.family.name in _TRAINERS:
        words = "the Trainer of transformers does it"
        yield PointTrace("hf-trainer", run.path, None, words)


def _stage(stage: TrainingStage) -> Iterator[PointTrace]:
    for name, settings in _POSITIVE:
        setting = stage.get(*settings)
        if setting is not None and _is_on(setting):
            yield _trace(name, setting)
    clip = stage.get("clip_norm")
    if clip is not None and clip.number == 0:
        yield _trace("clip-off", clip)
    strategy = stage.get("save_strategy")
    if strategy is not None:
        yield _trace("save-off" if strategy.text == "no" else "save", strategy)
    hidden = stage.get("nan_filter")
    if hidden is not None and hidden.truth is False:
        yield _trace("nan-filter-off", hidden)
    yield from _ranks(stage.all("processes", "devices"))
    yield from _precision(stage)


def _precision(stage: TrainingStage) -> Iterator[PointTrace]:
    claims = stage.precision.claims
    if not claims:
        return
    first = claims[0].setting
    yield _trace("precision-set", first)
    half = stage.precision.half
    if half is not None:
        yield _trace("half", first)
    if half == "fp16":
        yield _trace("fp16", first)


def _ranks(settings: Iterable[Setting]) -> Iterator[PointTrace]:
    for setting in settings:
        if setting.number is not None and (setting.number > 1 or setting.number == -1):
            yield _trace("several-ranks", setting)


def _leaf(leaf: Leaf) -> Iterator[PointTrace]:
    value = leaf.node.value if leaf.node.kind == "scalar" else "listed"
    text = value.lower() if isinstance(value, str) else value
    if text in _NONE:
        return
    dotted = ".".join(leaf.path)
    for name, pattern in _KEYS:
        if pattern.search(leaf.key):
            yield PointTrace(name, leaf.document.path, leaf.entry.line, f"{dotted} is set")
    if leaf.key == "distributed_type" and isinstance(text, str) and text.startswith("multi_"):
        yield PointTrace(
            "several-ranks", leaf.document.path, leaf.entry.line, f"{dotted} is {value}"
        )


def _is_on(setting: Setting) -> bool:
    if setting.truth is not None:
        return setting.truth
    return setting.text == "auto" or (setting.number is not None and setting.number > 0)


def _trace(name: str, setting: Setting) -> PointTrace:
    return PointTrace(name, setting.path, setting.line, f"{setting.key}: {setting.written[:40]}")


_SCRIPT_BYTES = 256 << 10
_ENDINGS = frozenset((".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".pbs", ".mk"))
_NAMES = frozenset(("Makefile", "makefile", "justfile", "Justfile", "Dockerfile", "Procfile"))
_GUARDED = re.compile(r"\bnanguard\s+run\b|-m\s+nanguard\s+run\b")
_SEVERAL = re.compile(
    r"\b(accelerate\s+launch|deepspeed\s+\S|torchrun\b|torch\.distributed\.(run|launch)\b)"
)


def is_script(path: str) -> bool:
    """Returns whether a file is one that starts others, by its name."""
    pure = PurePath(path)
    return pure.suffix.lower() in _ENDINGS or pure.name in _NAMES


def script_traces(path: str) -> Iterator[PointTrace]:
    """Yields what a script shows; nothing if it cannot be read."""
    try:
        content = decode(path, read_bytes(path, _SCRIPT_BYTES), python=False).content
    except SourceError:
        return
    for number, line in enumerate(content.splitlines(), start=1):
        if line.lstrip().startswith("#"):
            continue
        if _GUARDED.search(line):
            yield PointTrace("guard", path, number, "nanguard run starts the training")
        if _SEVERAL.search(line):
            yield PointTrace("several-ranks", path, number, "starts several ranks")


def history_traces(root: str) -> Iterator[PointTrace]:
    """Yields where versions of a project are kept."""
    folder = Path(root).resolve()
    for place in (folder, *folder.parents):
        if (place / ".git").exists():
            yield PointTrace(
                "history", str(place / ".git"), None, "the project is under version control"
            )
            return
    if (folder / ".nanguard" / "configs").is_dir():
        where = str(folder / ".nanguard" / "configs")
        yield PointTrace("history", where, None, "changed configurations are kept")


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
        self.roles = ValueRoles.of(code)

    def all(self) -> Iterator[PointTrace]:
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

    def _at(self, name: str, value: Value, words: str) -> PointTrace:
        return PointTrace(name, self.code.text.path, value.line or None, words)

    def _looked_at(self) -> Iterator[PointTrace]:
        for name, operations, words in _LOOKED_AT:
            for value in self.training.called(*operations):
                worded = any(isinstance(given.const, str) for given in value.inputs)
                if value.op != "call" and not worded:  # as in logger.log("...")
                    yield self._at(name, value, words)
        for softmax in self.training.called("softmax"):
            if any(part.op in _PRODUCTS for part in softmax.upstream(24)):
                yield self._at("attention", softmax, "attention")

    def _loop(self) -> Iterator[PointTrace]:
        if self.training.trains:
            for step in self.training.steps:
                yield self._at("step", step, "steps are made here")
        if self.training.several_ranks:
            path = self.code.text.path
            yield PointTrace("several-ranks", path, None, "trains on several ranks")
        for made in self.training.called("Guard"):
            if made.path.startswith("nanguard"):
                yield self._at("guard", made, "a Guard watches every step")
        for made in self.training.called(*_SCALERS):
            if "enabled" not in made.keywords or made.keywords["enabled"].const is True:
                yield self._at("scaler-on", made, "a GradScaler leaves out steps that overflow")
        for call in self.training.called("all_reduce", "reduce", "gather"):
            if any(p.op in FINITE for given in call.inputs for p in given.upstream(24)):
                yield self._at("agreed", call, "ranks tell each other whether the step is bad")

    def _checks(self) -> Iterator[PointTrace]:
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

    def _clips(self) -> Iterator[PointTrace]:
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

    def _files(self) -> Iterator[PointTrace]:
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

    def _settings(self) -> Iterator[PointTrace]:
        for name, calls in self.training.calls.items():
            for call in [call for call in calls if "profiler" not in call.path]:
                option = next((key for key in call.keywords if _WARM.search(key)), "")
                number = call.keywords[option].number() if option else None
                if _WARM.search(name) or (option and number != 0 and name != "add_argument"):
                    yield self._at("warmup", call, f"{option or name}: a warm-up")
                if call.path.startswith("torch.optim.") and "lr" in call.keywords:
                    yield from self._rate(call)

    def _rate(self, optimizer: Value) -> Iterator[PointTrace]:
        rate = optimizer.keywords["lr"].number()
        adaptive = "adam" in optimizer.path.lower()
        if rate is not None and 0 < rate <= (1e-3 if adaptive else 0.1):
            name = optimizer.path.rpartition(".")[2]
            yield self._at("rate-low", optimizer, f"{name} with lr {rate:g}")

    def _trainers(self) -> Iterator[PointTrace]:
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

    def _arguments(self, made: Value) -> Iterator[PointTrace]:
        given = made.keywords
        if "logging_nan_inf_filter" in given and given["logging_nan_inf_filter"].const is False:
            yield self._at("nan-filter-off", made, "logging_nan_inf_filter=False")
        if "max_grad_norm" in given and given["max_grad_norm"].number() == 0:
            yield self._at("clip-off", made, "max_grad_norm=0 turns clipping off")
        if "save_strategy" in given and given["save_strategy"].const == "no":
            yield self._at("save-off", made, "save_strategy='no' writes no checkpoint")
        if any(given[key].const for key in ("fp16", "bf16") if key in given):
            yield self._at("half", made, "computes in half precision")

    def _models(self) -> Iterator[PointTrace]:
        for cls in self.code.classes.values():
            if cls.is_module():
                path, line = self.code.text.path, cls.node.lineno
                yield PointTrace("model", path, line, f"the parameters of {cls.name}")
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

    def _bound(self, clamp: Value) -> Iterator[PointTrace]:
        upper = clamp.arg(2, "max") or (clamp.arg(1, "other") if clamp.op == "minimum" else None)
        if upper is not None and clamp.inputs[0].has("weights"):
            yield self._at("weights-bounded", clamp, "weights have an upper bound")

    def _made(self) -> Iterator[tuple[str, Value]]:
        for name, calls in self.training.calls.items():
            for call in calls:
                if call.path:
                    yield name, call


_ORDERED = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_LEAVES = (ast.Continue, ast.Return, ast.Raise, ast.Break)
_LOGS = frozenset(
    ("log", "log_dict", "info", "print", "add_scalar", "add_scalars", "write", "set_postfix",
     "writerow", "log_metrics")
)  # fmt: skip
_WHOLE_NAME = re.compile(
    r"(?:(?:total|train|training|val|valid|validation|eval|test|epoch|running|avg|mean|best|sum"
    r"|cum|step|batch|final|loss)_?)*(?:loss(?:es)?)(?:_?(?:sum|total|val|value|item|avg|mean))?"
)
_NO_TERM = re.compile(r"scale|meter|weight|mask|coef|_fn$|func|dict|hist|type|name|log_|best|avg")
_WARMUP = re.compile(r"warm_?up", re.IGNORECASE)
_TERM = re.compile(r"[A-Za-z_]\w*")
_TRIAL = re.compile(
    r"^(limit_train_batches|overfit_batches|fast_dev_run|max_train_samples|max_samples"
    r"|data_fraction|subset_ratio|train_fraction|debug_samples|num_debug_samples|subset_size)$"
)


def syntax_traces(code: Code) -> Iterator[PointTrace]:
    """Yields what the syntax of a file shows."""
    training = Training.of(code)
    steps = {id(step.node) for step in training.steps}
    for node in ast.walk(code.tree):
        if isinstance(node, (ast.Assert, ast.If)):
            yield from _label_check(code, node)
        if isinstance(node, ast.If) and training.trains:
            yield from _skip(code, node, steps)
        if isinstance(node, ast.Call):
            yield from _logged(code, node)
        if isinstance(node, ast.Compare) and any(_WARMUP.search(name) for name in _names(node)):
            yield PointTrace("warmup", code.text.path, node.lineno, "the rate is warmed up by hand")
        yield from _trial(code, node)


def _label_check(code: Code, node: ast.Assert | ast.If) -> Iterator[PointTrace]:
    if isinstance(node, ast.If) and not any(isinstance(s, ast.Raise) for s in node.body):
        return
    for compare in ast.walk(node.test):
        ordered = isinstance(compare, ast.Compare) and isinstance(compare.ops[0], _ORDERED)
        if ordered and any("labels" in kinds_of(name) for name in _names(compare)):
            yield PointTrace(
                "label-check", code.text.path, node.lineno, "labels are compared and refused"
            )
            return


def _skip(code: Code, node: ast.If, steps: set[int]) -> Iterator[PointTrace]:
    """Yields a condition on finite numbers that leaves a step out."""
    if not any(name in FINITE for name in _names(node.test)) and not _asks(code, node.test):
        return
    leaves = any(isinstance(inner, _LEAVES) for inner in node.body)
    holds = any(id(inner) in steps for part in node.body for inner in ast.walk(part))
    if leaves or holds:
        yield PointTrace("skip", code.text.path, node.lineno, "a bad step is left out here")


def _asks(code: Code, test: ast.expr) -> bool:
    """Returns whether a condition is one on a value that was made by asking for finite numbers."""
    for node in ast.walk(test):
        value = code.values.get(node)
        if value is not None and any(part.op in FINITE for part in value.upstream(16)):
            return True
    return False


def _logged(code: Code, call: ast.Call) -> Iterator[PointTrace]:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "loss" and len(call.keywords) > 1:
        terms = [k.arg for k in call.keywords if k.arg]
    elif name in _LOGS:
        terms = _terms(call)
    else:
        return
    if len(terms) > 1:
        listed = ", ".join(terms[:4])
        yield PointTrace("loss-terms", code.text.path, call.lineno, f"reports {listed}")


def _terms(call: ast.Call) -> list[str]:
    """Returns the names of single terms of a loss that a call mentions."""
    found: dict[str, None] = {}
    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
        for name in _names(argument):
            low = name.lower()
            if "loss" in kinds_of(name) and not (
                _WHOLE_NAME.fullmatch(low) or _NO_TERM.search(low)
            ):
                found[name] = None
    return list(found)


def _trial(code: Code, node: ast.AST) -> Iterator[PointTrace]:
    name = node.arg if isinstance(node, (ast.keyword, ast.arg)) else ""
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 40:
        name = node.value.lstrip("-").replace("-", "_")
    if name and _TRIAL.match(name):
        words = f"{name}: a part of the data can be tried"
        yield PointTrace("small-trial", code.text.path, getattr(node, "lineno", None), words)


def _names(node: ast.AST) -> Iterator[str]:
    """Yields the names and the keys that an expression mentions."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            for word in inner.value[:200].replace("/", " ").split():
                if _TERM.fullmatch(word):
                    yield word
