"""Every point of the checklist, what answers one, and how an answer is given."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from nanguard.findings import Finding

# What follows from one thing that is there and others that are not: the name, what has to be
# there, what must not be there, and what to say.
_DERIVED: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("one-rank", "step", ("several-ranks",), "one process trains, and has nobody to agree with"),
    (
        "unscaled",
        "step",
        ("scaler", "scaler-on", "fp16"),
        "no GradScaler is used, and gradients are not scaled",
    ),
    ("full-precision", "step", ("half",), "nothing is computed in half precision"),
    (
        "no-batchnorm",
        "model",
        ("batchnorm", "foreign-model"),
        "the models of the project have no BatchNorm",
    ),
    (
        "nan-filter",
        "hf-trainer",
        ("nan-filter-off",),
        "logging_nan_inf_filter is on by default and leaves NaN out of the logged loss",
    ),
)


@dataclass(frozen=True, slots=True)
class PointTrace:
    """One thing that a file shows.

    Attributes:
        name: What it is a trace of.
        path: The file.
        line: The line, counted from 1; None for the whole file.
        words: What is there, in words.
    """

    name: str
    path: str
    line: int | None
    words: str


@dataclass(slots=True)
class ProjectFacts:
    """Everything that answers are made from.

    Attributes:
        traces: What files show, by name, in the order of files and lines.
        findings: What rules found, by rule.
        ran: The rules that looked.
    """

    traces: dict[str, list[PointTrace]] = field(default_factory=dict)
    findings: dict[str, list[Finding]] = field(default_factory=dict)
    ran: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, traces: Iterable[PointTrace], findings: Iterable[Finding], ran: Iterable[str]
    ) -> ProjectFacts:
        """Returns the facts, with what follows from them."""
        facts = cls(ran=frozenset(ran))
        for trace in traces:
            facts.traces.setdefault(trace.name, []).append(trace)
        for finding in findings:
            facts.findings.setdefault(finding.name, []).append(finding)
        for name, there, missing, words in _DERIVED:
            if there in facts.traces and not any(other in facts.traces for other in missing):
                first = facts.traces[there][0]
                facts.traces[name] = [PointTrace(name, first.path, first.line, words)]
        return facts

    def shown(self, names: tuple[str, ...]) -> list[PointTrace]:
        """Returns the traces of these names, the first name's first."""
        return [trace for name in names for trace in self.traces.get(name, ())]

    def found(self, rules: tuple[str, ...]) -> list[Finding]:
        """Returns what these rules found."""
        return [finding for rule in rules for finding in self.findings.get(rule, ())]


_PLACES = 5


class PointVerdict(str, Enum):
    """The answer to a point."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "cannot tell"


@dataclass(frozen=True, slots=True)
class TracePlace:
    """Where an answer comes from.

    Attributes:
        path: The file.
        line: The line, counted from 1; None for the whole file.
        what: What is there.
    """

    path: str
    line: int | None
    what: str

    def to_json(self) -> dict[str, Any]:
        """Returns the place as the JSON has it."""
        return {"path": self.path, "line": self.line, "what": self.what}


@dataclass(frozen=True, slots=True)
class Answer:
    """A point, answered.

    Attributes:
        point: The point.
        verdict: The answer.
        places: Where it comes from, at most five.
        more: How many further places there are.
    """

    point: Point
    verdict: PointVerdict
    places: tuple[TracePlace, ...] = ()
    more: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the answer as the JSON has it."""
        return {
            "name": self.point.name,
            "section": self.point.section,
            "question": self.point.question,
            "answer": self.verdict.value,
            "places": [place.to_json() for place in self.places],
            "more": self.more,
            "advice": self.point.advice,
        }


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the checklist.

    It is answered in this order: a finding or a trace that speaks against it is a no; a trace
    that shows it is a yes; so is something its rules looked at and found nothing in; a trace of
    something that would need it, and has it nowhere, is a no. Without any of these nobody can
    tell.

    Attributes:
        name: What it is called.
        section: The part of the checklist it belongs to.
        question: The question.
        advice: What to do, in a line.
        faults: Rules whose findings answer no.
        denied: Traces that answer no.
        shown: Traces that answer yes.
        clean: Traces that answer yes where all the rules looked and found nothing.
        missing: Traces that answer no where nothing else answers.
        gap: What is missing there, in words.
        unsure: Traces of something that may be enough or not: nothing is called missing then.
    """

    name: str
    section: str
    question: str
    advice: str
    faults: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    clean: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    gap: str = ""
    unsure: tuple[str, ...] = ()

    def answer(self, facts: ProjectFacts) -> Answer:
        """Returns the answer for a project."""
        against = [
            *(_of_finding(finding) for finding in facts.found(self.faults)),
            *(_of_trace(trace) for trace in facts.shown(self.denied)),
        ]
        if against:
            return self._answered(PointVerdict.NO, against)
        shown = [_of_trace(trace) for trace in facts.shown(self.shown)]
        if shown:
            return self._answered(PointVerdict.YES, shown)
        clean = facts.shown(self.clean)
        if clean and facts.ran.issuperset(self.faults):
            words = "the rules found nothing wrong with it"
            places = [TracePlace(t.path, t.line, f"{t.words}: {words}") for t in clean]
            return self._answered(PointVerdict.YES, places)
        missing = [
            TracePlace(t.path, t.line, self.gap or t.words) for t in facts.shown(self.missing)
        ]
        if missing and not facts.shown(self.unsure):
            return self._answered(PointVerdict.NO, missing)
        return Answer(self, PointVerdict.UNKNOWN)

    def _answered(self, verdict: PointVerdict, places: list[TracePlace]) -> Answer:
        own = list(dict.fromkeys(places))
        return Answer(self, verdict, tuple(own[:_PLACES]), max(0, len(own) - _PLACES))


def _of_finding(finding: Finding) -> TracePlace:
    return TracePlace(finding.path or "", finding.line, f"{finding.name}: {finding.message}")


def _of_trace(trace: PointTrace) -> TracePlace:
    return TracePlace(trace.path, trace.line, trace.words)


DATA: tuple[Point, ...] = (
    Point(
        "inputs-checked",
        "data",
        "Are inputs looked at for NaN and Inf before they reach the model?",
        "Scan the data once, and refuse a batch with `torch.isfinite(x).all()` false.",
        shown=("input-check",),
    ),
    Point(
        "labels-in-range",
        "data",
        "Is every label known to be within the number of classes?",
        "Raise where `labels.min() < 0` or `labels.max() >= num_classes`; never clamp a label.",
        faults=("labels-clamped", "num-labels-below-classes"),
        shown=("label-check",),
    ),
    Point(
        "small-trial",
        "data",
        "Can the run be tried on a small part of the data first?",
        "Give the script an option for 1 % of the data, or for one data set out of several.",
        shown=("small-trial",),
    ),
)


MODEL: tuple[Point, ...] = (
    Point(
        "masks-are-safe",
        "model",
        "Do masks keep a softmax from rows that are masked as a whole?",
        "Test each row, not the whole tensor; mask logits with a finite value that fits the type.",
        faults=(
            "inf-masked-softmax",
            "whole-tensor-mask-check",
            "inf-masked-logits-loss",
            "mask-constant-overflows-half",
            "mean-of-empty-selection",
            "logits-masking-enabled",
        ),
        clean=("masking",),
    ),
    Point(
        "attention-scale",
        "model",
        "Does attention scale by the size of one head?",
        "Divide by the square root of head_dim, or call F.scaled_dot_product_attention.",
        faults=("scale-from-wrong-dim",),
        clean=("attention",),
    ),
    Point(
        "norms-have-eps",
        "model",
        "Does every norm, square root and deviation keep away from zero?",
        "Add the eps inside the root, and one that the half type can hold.",
        faults=(
            "normalise-without-eps",
            "missing-keepdim",
            "eps-outside-rsqrt",
            "eps-too-small-for-half",
            "sqrt-at-zero",
            "std-of-few",
            "fractional-power-gradient",
        ),
        clean=("norm",),
    ),
    Point(
        "functions-are-bounded",
        "model",
        "Are logarithms, exponentials and divisions kept within their range?",
        "Use log_softmax, logsigmoid and the losses with logits; clamp before, not after.",
        faults=(
            "unguarded-log",
            "log-of-softmax",
            "unbounded-exp",
            "division-by-unguarded-sum",
            "division-by-uniform-sample",
            "division-by-probability",
            "eps-lost-in-float32",
            "bce-after-sigmoid",
            "gumbel-log-log",
            "acos-at-boundary",
            "where-gradient-trap",
            "ctc-without-zero-infinity",
            "variance-from-moments",
            "discarded-result",
            "fft-in-half",
            "gradient-of-decomposition",
            "scale-without-floor",
            "fitted-variance-without-floor",
            "loss-of-wrong-input",
            "softmax-over-wrong-dim",
        ),
        clean=("risky-function",),
    ),
    Point(
        "loss-weights-bounded",
        "model",
        "Are loss weights bounded, such as those over diffusion time?",
        "Clamp weights that grow towards the ends of time, for example to at most 100.",
        shown=("weights-bounded",),
    ),
    Point(
        "parameters-initialised",
        "model",
        "Is every parameter filled before it is used?",
        "Fill what torch.empty made, with nn.init or zeros.",
        faults=("uninitialised-parameter",),
        clean=("init", "model"),
    ),
    Point(
        "batchnorm-has-batches",
        "model",
        "Does BatchNorm see more than one sample on every rank?",
        "Drop the last batch, convert to SyncBatchNorm, or use GroupNorm or LayerNorm.",
        faults=("batchnorm-batch-too-small", "eval-undone-by-train"),
        shown=("sync-batchnorm", "no-batchnorm", "drop-last"),
    ),
)


_LOOPS = ("step", "hf-trainer", "lightning-trainer")
_NOWHERE = "steps are made here, and nothing in the project"

STEP: tuple[Point, ...] = (
    Point(
        "guarded",
        "step",
        "Does the run train under nanguard?",
        "Start it with `nanguard run -- COMMAND`, or put a Guard around the loop.",
        shown=("guard",),
        missing=_LOOPS,
        gap=f"{_NOWHERE} starts them with nanguard run or a Guard",
    ),
    Point(
        "loss-checked",
        "step",
        "Is the loss known to be finite before backward?",
        "Check `torch.isfinite(loss)`; isnan alone lets Inf through.",
        faults=("nan-check-misses-inf", "nan-loss-replaced", "compared-with-nan"),
        shown=("loss-check", "guard"),
        missing=_LOOPS,
        gap=f"{_NOWHERE} checks the loss",
    ),
    Point(
        "gradients-clipped",
        "step",
        "Are gradients clipped?",
        "Clip to a norm of 1.0, or 0.5 where it spikes: clip_grad_norm_ before every step.",
        faults=(
            "missing-gradient-clipping",
            "clip-disabled-by-huge-norm",
            "clip-norm-too-large",
            "conflicting-clipping",
            "unclipped-recurrent-training",
            "nothing-clips-gradients",
            "clip-without-gradients",
        ),
        denied=("clip-off",),
        shown=("clip", "hf-trainer"),
        missing=("step", "lightning-trainer"),
        gap=f"{_NOWHERE} clips gradients",
    ),
    Point(
        "clip-after-unscale",
        "step",
        "Are gradients unscaled before they are clipped?",
        "Call `scaler.unscale_(optimizer)` before clip_grad_norm_.",
        faults=("clip-before-unscale",),
        shown=("accelerator-clip", "unscaled", "hf-trainer", "lightning-trainer"),
        clean=("unscale",),
    ),
    Point(
        "gradient-norm-watched",
        "step",
        "Is the norm of the gradient looked at, step by step?",
        "Keep what clip_grad_norm_ returns: log it, and check that it is finite.",
        shown=("gradient-check", "norm-used", "hf-trainer", "guard"),
        missing=("norm-unused", "step", "lightning-trainer"),
        gap="the norm of the gradient is not kept, here or anywhere",
    ),
    Point(
        "bad-step-left-out",
        "step",
        "Is a bad step left out as a whole?",
        "Do not call optimizer.step() at all; zeroed gradients still move Adam and decay weights.",
        faults=("step-after-zeroed-grads", "nan-loss-replaced"),
        shown=("guard", "skip", "scaler-on"),
        unsure=("scaler",),
        missing=_LOOPS,
        gap=f"{_NOWHERE} leaves a bad step out",
    ),
    Point(
        "ranks-agree",
        "step",
        "Do all ranks take the same decision about a bad step?",
        "All-reduce a flag before the decision; a rank that skips alone lets the others wait.",
        faults=("rank-divergent-skip",),
        shown=("agreed", "guard", "one-rank"),
    ),
    Point(
        "nothing-hidden",
        "step",
        "Do NaN and Inf stay visible in losses and logs?",
        "Remove nan_to_num, clamps and filters from the path of the loss; count what is skipped.",
        faults=(
            "nan-hidden-from-log",
            "nan-taken-for-improvement",
            "nan-to-num-hides-cause",
            "nan-loss-replaced",
            "loss-clamped",
            "loss-cut-from-graph",
            "nan-filter-hides-loss",
            "step-after-zeroed-grads",
        ),
        denied=("nan-filter",),
        shown=("nan-filter-off",),
        clean=("step",),
    ),
    Point(
        "loss-terms-reported",
        "step",
        "Are the terms of the loss reported one by one?",
        "Log each term by its name, or hand them to guard.loss(text=..., latent=...).",
        shown=("loss-terms",),
    ),
)


SETTINGS: tuple[Point, ...] = (
    Point(
        "learning-rate-in-range",
        "settings",
        "Is the learning rate in the range that such a run bears?",
        "Begin at 5e-5, diffusion at 1e-5; NaN in the first epochs: 1e-5 or 5e-6.",
        faults=(
            "learning-rate-too-high",
            "scientific-notation-is-string",
            "value-out-of-range",
            "min-lr-above-lr",
            "gradients-never-zeroed",
            "repeated-beta",
        ),
        clean=("rate-set",),
        shown=("rate-low",),
    ),
    Point(
        "warm-up",
        "settings",
        "Does the learning rate rise slowly?",
        "Warm up over 1000 to 2000 steps, or 5 epochs from a tenth of the rate.",
        faults=("no-warmup", "warmup-longer-than-training", "schedule-in-wrong-unit"),
        shown=("warmup",),
        missing=("step", "hf-trainer"),
        gap="steps are made here, and nothing in the project warms up",
    ),
    Point(
        "precision-aligned",
        "settings",
        "Do all settings agree on the precision, and is fp16 scaled?",
        "One of fp32, bf16 and fp16 in every file; a GradScaler for fp16.",
        faults=(
            "conflicting-precision",
            "fp16-without-loss-scaling",
            "fp16-loss-not-scaled",
            "scaled-gradients-stepped",
            "plain-scaler-with-fsdp",
            "scale-updated-between-steps",
            "half-precision-optimizer-state",
            "adam-eps-too-small",
        ),
        shown=("full-precision",),
        clean=("precision-set", "half"),
    ),
    Point(
        "keys-are-right",
        "settings",
        "Is every key of the configuration one that its reader knows, and there once?",
        "Correct the spelling, and keep one of two keys of the same name.",
        faults=("misspelled-key", "duplicate-key"),
        clean=("configuration",),
    ),
    Point(
        "anomaly-mode-off",
        "settings",
        "Is anomaly mode off in the usual run?",
        "Turn it on for a search only, behind an option.",
        faults=("anomaly-mode-left-on",),
        clean=("step", "hf-trainer", "lightning-trainer"),
    ),
)


KEEPING: tuple[Point, ...] = (
    Point(
        "checkpoints-regular",
        "keeping",
        "Are checkpoints written regularly?",
        "Write one every 1000 steps, and keep the last that was finite.",
        faults=("checkpoint-interval-too-long",),
        denied=("save-off",),
        shown=("save", "hf-trainer", "lightning-trainer"),
        missing=("step",),
        gap="steps are made here, and nothing in the project writes a checkpoint",
    ),
    Point(
        "resume-is-safe",
        "keeping",
        "Can the run go on from a good checkpoint, loaded without running code from it?",
        "Load with `weights_only=True` or safetensors, and check that everything is finite.",
        faults=("unsafe-checkpoint-load",),
        shown=("safe-load",),
        missing=("save",),
        gap="checkpoints are written here, and nothing in the project loads one",
    ),
    Point(
        "metrics-kept",
        "keeping",
        "Are loss and metrics written down while the run goes on?",
        "Write them to TensorBoard, W&B, or a CSV or JSONL file, every few steps.",
        shown=("metrics", "hf-trainer"),
    ),
    Point(
        "numerics-tested",
        "keeping",
        "Do tests look at whether losses and layers stay finite?",
        "Test layers with zeros, large values and full masks, and assert isfinite.",
        shown=("finite-test",),
        missing=("test",),
        gap="there are tests of training code, and none looks at isfinite",
    ),
    Point(
        "changes-kept",
        "keeping",
        "Is every version of the configuration kept?",
        "Put it under version control; `nanguard check --fix` keeps what it changes.",
        shown=("history",),
    ),
)


def all_points() -> tuple[Point, ...]:
    """Returns every point, in the order in which a run meets them."""
    return (*DATA, *MODEL, *STEP, *SETTINGS, *KEEPING)
