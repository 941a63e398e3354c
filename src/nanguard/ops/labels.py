"""Cross-entropy that looks at its labels, logits that are masked per sample, and counts of both.

A label out of range, or one whose class is masked for its sample, is a fault in the data. Clamping
it into range would train on a wrong class in silence, so that is not on offer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch

from nanguard.errors import UsageError
from nanguard.ops.bounds import any_kept, check_float, wide, with_bad
from nanguard.ops.bounds import keep as chosen
from nanguard.ops.fused import again, apply, kernel, once, ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

OnBad = Literal["raise", "ignore", "report", "nan"]


class Counter:
    """How often an edge was met, counted on the device and read when it suits.

    An op that defines what would have been NaN has to say so somewhere, or nobody learns that half
    of the batches are empty. Counting adds no wait; ``value`` waits for the device. Counting writes
    into a tensor from outside, which ``torch.func`` transforms do not allow; leave the counter out
    there.
    """

    def __init__(self) -> None:
        self._counts: dict[torch.device, Tensor] = {}

    @torch.no_grad()
    def add(self, flags: Tensor) -> None:
        """Adds the number of true values."""
        if flags.device not in self._counts:
            self._counts[flags.device] = torch.zeros((), dtype=torch.int64, device=flags.device)
        self._counts[flags.device].add_(flags.sum())

    def value(self) -> int:
        """Returns the count. Waits for the device."""
        return sum(int(count) for count in self._counts.values())

    def reset(self) -> None:
        """Starts at zero again."""
        for count in self._counts.values():
            count.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Returns the count. Waits for the device."""
        return {"count": self.value()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a count."""
        self._counts = {torch.device("cpu"): torch.tensor(int(state["count"]))}

    def __repr__(self) -> str:
        return f"Counter({self.value()})"


def checked_cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    allowed: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    on_bad: OnBad = "raise",
    empties: Counter | None = None,
    bad_labels: Counter | None = None,
) -> Tensor:
    """Returns the cross-entropy, after looking whether every label is one.

    Prevents the device-side assert (on CUDA) that a label of 101 among 101 classes ends in, and the
    infinite loss of a target whose class is masked for its sample. The mean over no targets is 0.
    Halves are computed and returned in float32.

    Args:
        logits: Of shape (..., classes).
        target: Class numbers, of shape (...).
        allowed: Boolean, of the shape of the logits or broadcast to it: the classes each sample can
            have. The others are masked, and label smoothing leaves them out.
        ignore_index: Targets with this value do not count.
        label_smoothing: How much of the target is spread over all allowed classes.
        reduction: ``"mean"`` over the targets that count, ``"sum"`` or ``"none"``.
        on_bad: What a bad label does. ``"raise"`` raises, and for that waits for the device at each
            call. The others do not wait: ``"nan"`` makes the loss NaN, ``"ignore"`` leaves the
            label out, ``"report"`` leaves it out and insists on a ``bad_labels`` counter.
        empties: Counts the means of nothing.
        bad_labels: Counts bad labels.
    """
    if reduction not in ("mean", "sum", "none"):
        raise _usage(f"reduction is {reduction!r}", "Use 'mean', 'sum' or 'none'.")
    labels = Labels(target, None, allowed, ignore_index, label_smoothing, on_bad, bad_labels)
    if reduction == "none":
        return labels.losses(logits)[0]
    return labels.reduced(logits, mean=reduction == "mean", empties=empties)


def mask_logits(
    logits: Tensor,
    allowed: Tensor,
    target: Tensor | None = None,
    *,
    on_bad: Literal["raise", "nan"] = "raise",
    bad_labels: Counter | None = None,
) -> Tensor:
    """Returns the logits with the classes masked that a sample cannot have.

    Prevents the infinite loss of a wrong label map: a target that is masked, or a sample for which
    no class is left, is refused. The mask value is finite, half of the smallest number of the type:
    its softmax is exactly 0, where the usual -1e9 is -Inf in float16. For a loss with label
    smoothing use ``checked_cross_entropy(..., allowed=...)``, which leaves masked classes out.

    Args:
        logits: Of shape (..., classes).
        allowed: Boolean, of the shape of the logits or broadcast to it.
        target: Class numbers, of shape (...); negative ones (ignored) are not looked at.
        on_bad: ``"raise"`` raises, and for that waits for the device at each call; ``"nan"`` makes
            the masked logits of the sample NaN, without waiting.
        bad_labels: Counts samples with a masked target or with no class.
    """
    check_float(logits, "mask_logits")
    _check_allowed(logits, allowed)
    if target is not None:
        _check_shapes(logits, target)
    if on_bad not in ("raise", "nan"):
        raise _usage(f"on_bad is {on_bad!r}", "Use 'raise' or 'nan'.")
    nan = on_bad == "nan"
    asked = bad_labels is not None or not nan
    looked_at = (logits, allowed) if target is None else (logits, allowed, target)
    if ready(*looked_at) and allowed.numel() in (logits.numel(), logits.shape[-1]):
        bad = logits.new_empty(logits.shape[:-1], dtype=torch.bool) if asked else None
        masked = apply(_MaskedLogits, logits, allowed, target, bad, nan)
    else:
        bad = _masked_samples(logits, allowed, target)
        low = torch.finfo(logits.dtype).min / 2
        other = logits.new_full((1,), low).masked_fill(bad.unsqueeze(-1), torch.nan) if nan else low
        masked = torch.where(allowed, logits, other)
    if bad is not None and bad_labels is not None:
        bad_labels.add(bad)
    if bad is not None and not nan:
        _refuse_masked(bad, target)
    return cast("Tensor", masked)


def _masked_samples(logits: Tensor, allowed: Tensor, target: Tensor | None) -> Tensor:
    """Returns which samples have no class, or a target that is masked."""
    bad = (~any_kept(allowed, -1).squeeze(-1)).expand(logits.shape[:-1])
    if target is None:
        return bad
    reachable = (target >= 0) & (target < logits.shape[-1])
    bad = bad | ~_permits(allowed, target.where(reachable, 0), logits.shape) & (target >= 0)
    return bad | (target >= logits.shape[-1])


class _MaskedLogits(torch.autograd.Function):
    """One kernel each way."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        allowed: Tensor,
        target: Tensor | None,
        bad: Tensor | None,
        nan: bool,  # noqa: FBT001
    ) -> Tensor:
        ctx.save_for_backward(allowed)
        return cast("Tensor", _mask_logits(logits, allowed, target, bad, nan))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (allowed,) = ctx.saved_tensors
        slope = _chosen(grad, allowed) if once(grad) else torch.where(allowed, grad, 0.0)
        return slope, None, None, None, None


_mask_logits = kernel(
    "mask_logits(Tensor logits, Tensor allowed, Tensor? target, Tensor(a!)? bad, bool nan)"
    " -> Tensor"
)
_chosen = kernel("chosen(Tensor x, Tensor mask) -> Tensor")


class Labels(NamedTuple):
    """Targets, and what is to be done about them.

    Attributes:
        target: Class numbers.
        mask: Boolean, True where a target counts; None if all do.
        allowed: The classes that each sample can have; None for all.
        ignore_index: Targets with this value do not count.
        smoothing: How much of a target is spread over all classes that can be.
        on_bad: What a bad label does.
        bad_labels: Counts bad labels.
    """

    target: Tensor
    mask: Tensor | None
    allowed: Tensor | None
    ignore_index: int
    smoothing: float
    on_bad: OnBad
    bad_labels: Counter | None

    def losses(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the loss of each target, 0 for those that do not count, and which ones count."""
        self._check(logits)
        if self._one_kernel(logits):
            losses, numbers = self._fused(logits, "each")
            return losses, self._states(numbers) == KEPT
        losses, keep, bad = _losses(logits, self)
        self._tell(bad, logits.shape[-1])
        return losses, keep

    def reduced(self, logits: Tensor, *, mean: bool, empties: Counter | None) -> Tensor:
        """Returns the mean of the losses that count, 0 if none does, or their sum."""
        self._check(logits)
        if self._one_kernel(logits):
            whole, numbers = self._fused(logits, "mean" if mean else "sum")
            if empties is not None:
                empties.add(numbers[-1] == 0)
            return whole
        losses, keep, bad = _losses(logits, self)
        self._tell(bad, logits.shape[-1])
        count = keep.sum()
        if empties is not None:
            empties.add(count == 0)
        return losses.sum() / count.clamp(min=1) if mean else losses.sum()

    def _check(self, logits: Tensor) -> None:
        check_float(logits, "cross_entropy")
        _check_shapes(logits, self.target)
        if self.on_bad not in ("raise", "ignore", "report", "nan"):
            raise _usage(f"on_bad is {self.on_bad!r}", "Use 'raise', 'ignore', 'report' or 'nan'.")
        if self.on_bad == "report" and self.bad_labels is None:
            raise _usage(
                "on_bad is 'report' and there is no counter", "Give it bad_labels=Counter()."
            )
        if not 0 <= self.smoothing < 1:
            raise _usage(f"label_smoothing is {self.smoothing}", "Use a number from 0 to below 1.")
        if self.allowed is not None:
            _check_allowed(logits, self.allowed)

    def _tell(self, bad: Tensor, classes: int) -> None:
        if self.bad_labels is not None:
            self.bad_labels.add(bad)
        if self.on_bad == "raise":
            _refuse(bad, self.target, classes, masked=self.allowed is not None)

    def _one_kernel(self, logits: Tensor) -> bool:
        given = [x for x in (self.mask, self.allowed) if x is not None]
        if self.smoothing or not ready(logits, self.target, *given):
            return False
        if self.mask is not None and self.mask.shape != self.target.shape:
            return False
        shared = (logits.numel(), logits.shape[-1])
        return self.allowed is None or self.allowed.numel() in shared

    def _fused(self, logits: Tensor, kind: str) -> tuple[Tensor, Tensor]:
        """Returns the losses, their sum or their mean, and what else the kernel found."""
        out, numbers = apply(_FusedLoss, logits, self, kind)
        if self.bad_labels is not None or self.on_bad == "raise":
            self._tell(self._states(numbers) == BAD, logits.shape[-1])
        return out, numbers

    def _states(self, numbers: Tensor) -> Tensor:
        """Returns what each label is, of the numbers of the kernel."""
        return numbers[:-1].view(3, *self.target.shape)[2]


def _losses(logits: Tensor, labels: Labels) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the loss of each target, which ones count, and which are bad; by torch's means."""
    target, allowed = labels.target, labels.allowed
    counts = target != labels.ignore_index
    if labels.mask is not None:
        counts = counts & labels.mask
    keep = counts & (target >= 0) & (target < logits.shape[-1])
    index = target.where(keep, 0)
    if allowed is not None:
        keep = keep & _permits(allowed, index, logits.shape)
    bad = counts & ~keep
    losses, _ = apply(_CrossEntropy, logits, index, keep, allowed, labels.smoothing)
    if labels.on_bad == "nan":
        losses = losses.masked_fill(bad, torch.nan)
    return losses, keep, bad


KEPT, BAD = 1, 2  # what the kernel says of a label, beside 0 for one that does not count


class _FusedLoss(torch.autograd.Function):
    """The logits are read once forward and once backward, and nothing of their size is kept.

    Beside the losses, their sum or their mean, it returns the numbers that the kernel found: the
    loss of each label, the log of each sum of exponentials, what each label is, how many count.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Labels, kind: str) -> tuple[Any, ...]:
        target, allowed = labels.target, labels.allowed
        nan = labels.on_bad == "nan"
        numbers = _label_loss(logits, target, allowed, labels.mask, labels.ignore_index, nan)
        if kind == "each":
            # A copy, as the numbers are kept for the derivative.
            out = numbers[: target.numel()].reshape(target.shape).clone()
        else:
            out = _mean_loss(numbers, kind == "mean")
        ctx.save_for_backward(logits, target, allowed, numbers)
        ctx.labels, ctx.kind = labels, kind
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(numbers)
        return out, numbers

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
        if grad is None:
            return None, None, None
        if not once(grad):
            logits = ctx.saved_tensors[0]
            return *again(_plainly(ctx.labels, ctx.kind), (logits,), grad, (True,)), None, None
        return _label_loss_slope(grad, *ctx.saved_tensors, ctx.kind == "mean"), None, None


def _plainly(labels: Labels, kind: str) -> Callable[[Tensor], Tensor]:
    """Returns the same loss, made of torch's own operations."""

    def loss(logits: Tensor) -> Tensor:
        losses, keep, _ = _losses(logits, labels)
        if kind == "each":
            return losses
        return losses.sum() / keep.sum().clamp(min=1) if kind == "mean" else losses.sum()

    return loss


_label_loss = kernel(
    "label_loss(Tensor logits, Tensor target, Tensor? allowed, Tensor? mask, int ignore, bool nan)"
    " -> Tensor"
)
_mean_loss = kernel("mean_loss(Tensor(a!) numbers, bool mean) -> Tensor")
_label_loss_slope = kernel(
    "label_loss_slope(Tensor grad, Tensor logits, Tensor target, Tensor? allowed, Tensor numbers,"
    " bool mean) -> Tensor"
)


class _CrossEntropy(torch.autograd.Function):
    """The loss of each row; rows that are not kept neither give a loss nor get a gradient.

    That holds if they are NaN, too, where torch's own derivative is ``0 * nan``: here each value of
    a gradient is chosen, and none is a product with a NaN. It is made in one pass besides.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor, target: Tensor, keep: Tensor, allowed: Tensor | None, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        logs = _log_softmax(logits, keep.unsqueeze(-1), allowed)
        loss = logs.gather(-1, target.unsqueeze(-1)).squeeze(-1).neg_()
        if smoothing:
            share = _share(logs, allowed)
            spread = logs.mul(share) if allowed is None else torch.where(allowed, logs, 0) * share
            loss = loss.mul_(1 - smoothing).sub_(spread.sum(-1), alpha=smoothing)
        return torch.where(keep, loss, 0.0), logs

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        logits, target, keep, allowed, smoothing = inputs
        ctx.save_for_backward(target, keep, allowed, *output)
        ctx.smoothing = smoothing
        ctx.dtype = logits.dtype
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_logs: Tensor | None) -> tuple[Any, ...]:
        target, keep, allowed, loss, logs = ctx.saved_tensors
        result = None
        if grad is not None:
            # Nothing of the loss: a row whose loss is NaN gets a gradient that is NaN.
            row = with_bad(torch.where(keep, grad, 0.0), loss).unsqueeze(-1)
            result = _exp_times(logs, row)
            result = result.scatter_add_(-1, target.unsqueeze(-1), row * (ctx.smoothing - 1))
            if ctx.smoothing:
                share = _share(logs, allowed) * row * ctx.smoothing
                result = result - (share if allowed is None else torch.where(allowed, share, 0.0))
        if grad_logs is not None:
            # Only second derivatives come here.
            choice = keep.unsqueeze(-1) if allowed is None else keep.unsqueeze(-1) & allowed
            more = torch._log_softmax_backward_data(grad_logs, logs, -1, logs.dtype)
            more = torch.where(choice, more, 0.0)
            result = more if result is None else result + more
        return None if result is None else result.to(ctx.dtype), None, None, None, None


def _log_softmax(logits: Tensor, rows: Tensor, allowed: Tensor | None) -> Tensor:
    """Returns the log-probabilities of the classes that can be, in float32 or wider."""
    dtype = wide(logits.dtype)
    if logits.device.type == "cpu":
        # The vectorised exponential below does not choose at NaN.
        logits = chosen(logits, rows)
    if allowed is not None:
        low = torch.finfo(dtype).min / 2
        # A tensor of one element, and not a number, so that choosing also widens.
        other = low if dtype == logits.dtype else logits.new_full((1,), low, dtype=dtype)
        logits = torch.where(allowed, logits, other)
    return torch.log_softmax(logits, -1, dtype=dtype)


def _exp_times(logs: Tensor, row: Tensor) -> Tensor:
    """Returns ``exp(logs) * row`` in one pass, for logarithms of at most 0.

    That happens to be the derivative of an ELU: a slope of ``exp`` up to 0, and of 1 otherwise. On
    a GPU, NaN is "otherwise", so that a row of zeros stays one.
    """
    rows, is_result = row.expand_as(logs), False
    return cast("Tensor", torch.ops.aten.elu_backward(rows, 1.0, 1.0, 1.0, is_result, logs))


def _share(logs: Tensor, allowed: Tensor | None) -> Tensor | float:
    """Returns what label smoothing gives to each class that can be."""
    if allowed is None:
        return 1 / logs.shape[-1]
    return 1 / allowed.expand(logs.shape).sum(-1, keepdim=True).clamp(min=1)


def _permits(allowed: Tensor, index: Tensor, shape: torch.Size) -> Tensor:
    return allowed.expand(shape).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def _refuse(bad: Tensor, target: Tensor, classes: int, *, masked: bool) -> None:
    """Raises for the first bad label. Waits for the device."""
    if not bool(bad.any()):
        return
    place, label = _first(bad, target)
    what = f"label {label} at {place} is not one of 0 to {classes - 1}"
    if masked and 0 <= label < classes:
        what = f"label {label} at {place} is a class that is masked for this sample"
    raise _usage(
        f"{what} ({int(bad.sum())} of {bad.numel()} labels are bad)",
        "Fix the label map of that data. To go on without such samples: on_bad='ignore'.",
    )


def _refuse_masked(bad: Tensor, target: Tensor | None) -> None:
    """Raises for the first sample whose target is masked. Waits for the device."""
    if not bool(bad.any()):
        return
    place, label = _first(bad, target)
    what = f"no class is left for the sample at {place}"
    if target is not None:
        what = f"the target {label} of the sample at {place} is masked or out of range"
    raise _usage(
        f"{what} ({int(bad.sum())} of {bad.numel()} samples are bad)",
        "Fix the label map, or the mask of classes for that data set.",
    )


def _first(bad: Tensor, target: Tensor | None) -> tuple[tuple[int, ...], int]:
    place = tuple(int(i) for i in bad.nonzero()[0])
    return place, int(target[place]) if target is not None else -1


def _check_shapes(logits: Tensor, target: Tensor) -> None:
    if target.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise _usage(f"the targets are {target.dtype}", "Give it class numbers: target.long().")
    if logits.shape[:-1] != target.shape or logits.shape[-1] == 0:
        raise _usage(
            f"logits of shape {tuple(logits.shape)} do not fit targets of {tuple(target.shape)}",
            "Give the logits the shape of the targets, and the classes as the last dimension.",
        )


def _check_allowed(logits: Tensor, allowed: Tensor) -> None:
    if allowed.dtype != torch.bool or allowed.shape[-1:] != logits.shape[-1:]:
        raise _usage(
            f"the mask of classes is {allowed.dtype} of shape {tuple(allowed.shape)}",
            f"Give it a boolean one that ends in {logits.shape[-1]} classes.",
        )


def _usage(what: str, do: str) -> UsageError:
    return UsageError(what, where="nanguard.ops, labels", do=do)
