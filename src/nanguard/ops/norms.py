"""Normalisation: RMSNorm, and AdaLN-Zero with a bound on its scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn import functional

from nanguard.errors import UsageError
from nanguard.ops.bounds import CapKind, cap, check_limit, wide
from nanguard.ops.fused import again, apply, kernel, once, ready

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

# Some versions of torch square half-precision values in half precision, where 300 ** 2 is Inf.
_PROBE = torch.full((2,), 300.0, dtype=torch.float16, device="cpu")
_SQUARES_WIDE = bool(functional.rms_norm(_PROBE, (2,), None, 1.0)[0] > 0)


class RMSNorm(nn.RMSNorm):
    """``torch.nn.RMSNorm`` that is defined on all-zero rows and computes halves in float32.

    Prevents 0/0 on all-zero rows, which a padded batch or a zero-initialised branch brings, and the
    overflow of squares in float16, where 300² is Inf. The usual repair, ``nan_to_num`` inside the
    norm, hides whatever came in; here a row with a NaN is NaN as a whole, and an Inf turns to NaN.

    Args:
        normalized_shape: The last dimensions, over which the mean of squares is taken.
        eps: Added to the mean of squares; must be positive.
        elementwise_affine: Whether there is a learned weight.
        device: Where the weight is.
        dtype: The type of the weight. The output has the type of the input in any case.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-6,
        elementwise_affine: bool = True,  # noqa: FBT001, FBT002 - as torch.nn.RMSNorm has it
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check_eps(eps)
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        super().__init__(shape, eps, elementwise_affine, device, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the input, each row divided by its root mean square and scaled."""
        return _rms_norm(x, list(self.normalized_shape), self.weight, cast("float", self.eps))


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Divides each row by its root mean square and scales it; ``RMSNorm`` as a function.

    Args:
        x: Any floating-point tensor; rows are along the last dimension.
        weight: The scale, as long as a row.
        eps: Added to the mean of squares; must be positive.
    """
    _check_eps(eps)
    return _rms_norm(x, [x.shape[-1]], weight, eps)


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float) -> Tensor:
    if weight is not None and weight.dtype != x.dtype:
        weight = weight.to(x.dtype)
    if _SQUARES_WIDE or wide(x.dtype) == x.dtype:
        return functional.rms_norm(x, shape, weight, eps)
    scale = None if weight is None else weight.to(wide(x.dtype))
    return functional.rms_norm(x.to(wide(x.dtype)), shape, scale, eps).to(x.dtype)


def _check_eps(eps: float) -> None:
    if not 1e-30 <= eps < math.inf:
        raise UsageError(
            f"eps is {eps}, and an all-zero row would be divided by it",
            where="nanguard.ops.RMSNorm",
            do="Use a positive number, for instance 1e-6.",
        )


class AdaLNZero(nn.Module):
    """Layer norm whose shift, scale and gate come from a condition, starting as the identity.

    Prevents the runaway of the learned scale: each block multiplies by ``1 + scale``, nothing in a
    diffusion transformer holds it, and its product over the depth overflows. Give ``max_scale`` to
    bound it. ``largest_scale`` remembers, on the device, the largest one that was asked for since
    it was last set to zero, bounded or not; reading it on the host waits for the device.

    ```python
    normed, gate = adaln(x, condition)
    x = x + gate * attention(normed)
    ```

    Args:
        width: The size of the rows of ``x``.
        condition_width: The size of the condition.
        max_scale: The bound on the absolute value of the scale; none by default.
        cap_kind: ``"hard"`` (equal to no bound inside it) or ``"soft"`` (keeps a gradient).
        eps: Added to the variance; must be positive.
    """

    largest_scale: Tensor

    def __init__(
        self,
        width: int,
        condition_width: int,
        *,
        max_scale: float | None = None,
        cap_kind: CapKind = "hard",
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        _check_eps(eps)
        if max_scale is not None:
            check_limit(max_scale, "AdaLNZero")
        self.width = width
        self.max_scale = max_scale
        self.cap_kind: CapKind = cap_kind
        self.eps = eps
        self.project = nn.Linear(condition_width, 3 * width)
        nn.init.zeros_(self.project.weight)
        nn.init.zeros_(self.project.bias)
        self.register_buffer("largest_scale", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the modulated input, and the gate for the branch that follows.

        Args:
            x: Of shape (batch, ..., width).
            condition: Of shape (batch, condition_width).
        """
        shape = (x.shape[0], *(1 for _ in range(x.dim() - 2)), self.width)
        made = self.project(functional.silu(condition))
        shift, scale, gate = made.chunk(3, dim=-1)
        gate = gate.reshape(shape)
        normed = functional.layer_norm(x, (self.width,), eps=self.eps)
        largest = self.largest_scale
        hard = normed.dtype == made.dtype and self.cap_kind == "hard"
        if hard and made.dim() == 2 and ready(normed, made, largest):
            settings = (self.max_scale, largest if self.training else None)
            return apply(_Modulate, normed, shift, scale, *settings), gate
        if self.training:
            self._watch(scale.detach())
        shift, scale = shift.reshape(shape), scale.reshape(shape)
        return modulate(normed, shift, scale, max_scale=self.max_scale, kind=self.cap_kind), gate

    def _watch(self, scale: Tensor) -> None:
        largest = scale.abs().amax().to(self.largest_scale.dtype)
        torch.maximum(self.largest_scale, largest, out=self.largest_scale)

    def extra_repr(self) -> str:
        """Returns the settings."""
        return f"{self.width}, max_scale={self.max_scale}, cap_kind={self.cap_kind!r}"


class _Modulate(torch.autograd.Function):
    """One kernel each way, where torch sums over the tokens twice for the gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shift: Tensor, scale: Tensor, bound: float | None,
        largest: Tensor | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, shift, scale)
        ctx.bound = bound
        return cast("Tensor", _fused_modulate(x, shift, scale, bound, largest))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, shift, scale = ctx.saved_tensors
        if not once(grad):

            def plain(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
                shape = (x.shape[0], *(1 for _ in range(x.dim() - 2)), x.shape[-1])
                return modulate(x, shift.reshape(shape), scale.reshape(shape), max_scale=ctx.bound)

            found = again(plain, (x, shift, scale), grad, ctx.needs_input_grad[:3])
            return *found, None, None
        return *_fused_modulate_slope(grad, x, scale, ctx.bound), None, None


_fused_modulate = kernel(
    "modulate(Tensor x, Tensor shift, Tensor scale, float? bound, Tensor(a!)? largest) -> Tensor"
)
_fused_modulate_slope = kernel(
    "modulate_slope(Tensor grad, Tensor x, Tensor scale, float? bound) -> (Tensor, Tensor, Tensor)"
)


def modulate(
    x: Tensor,
    shift: Tensor,
    scale: Tensor,
    *,
    max_scale: float | None = None,
    kind: CapKind = "hard",
) -> Tensor:
    """Returns ``x * (1 + scale) + shift``, the scale bounded where asked.

    Args:
        x: Normalised values.
        shift: What is added.
        scale: What ``x`` is multiplied by, less 1.
        max_scale: The bound on the absolute value of the scale; none by default.
        kind: How it is bounded, ``"hard"`` or ``"soft"``.
    """
    if max_scale is not None:
        scale = cap(scale, max_scale, kind)
    return torch.addcmul(shift.to(x.dtype), x, (1 + scale).to(x.dtype))
