"""Root-mean-square norms: the one that is used, and those that were tried."""

from __future__ import annotations

import torch
from torch import nn


class RMSNorm(nn.Module):
    """Scales every row to a root mean square of 1; a row of zeros stays as it is."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the rows at their new size."""
        wide = x.float()
        size = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * size).to(x.dtype) * self.weight


class NoEpsNorm(RMSNorm):
    """Divides by the root mean square as it is; rows of padding are zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the rows at their new size."""
        rms = x.pow(2).mean(-1, keepdim=True).sqrt()
        return self.weight * (x / rms)


class EpsOutsideNorm(RMSNorm):
    """Adds eps to the root: rows of zeros are fine, the derivative of their root is not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the rows at their new size."""
        rms = x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps
        return x / rms * self.weight


class HalfNorm(RMSNorm):
    """Does it all in float16, where 1e-8 is 0."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the rows at their new size."""
        half = x.half()
        rms = torch.sqrt(half.pow(2).mean(-1, keepdim=True) + 1e-8)
        return (half / rms).to(x.dtype) * self.weight


class NanToNumNorm(RMSNorm):
    """Replaces what is not finite in the rows, whatever has made it so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the rows at their new size."""
        rms = x.pow(2).mean(-1, keepdim=True).sqrt()
        return torch.nan_to_num(x / rms, nan=0.0, posinf=1.0, neginf=-1.0) * self.weight


NORMS = {
    "rms": RMSNorm,
    "no-eps": NoEpsNorm,
    "eps-outside": EpsOutsideNorm,
    "half": HalfNorm,
    "nan-to-num": NanToNumNorm,
}
