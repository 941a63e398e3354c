import torch
from torch import Tensor, nn
import torch.nn.functional as F


def extended_mask(attention_mask: Tensor) -> Tensor:
    m = attention_mask[:, None, None, :].to(dtype=torch.half)
    return (1.0 - m) * -1e10


def extended_mask_safe(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    m = attention_mask[:, None, None, :].to(dtype=dtype)
    return (1.0 - m) * torch.finfo(dtype).min


class SpanHead(nn.Module):
    """Start/end scores; padded positions can never be picked."""

    def __init__(self, hidden: int):
        super().__init__()
        self.qa = nn.Linear(hidden, 2)

    def forward(self, h: Tensor, pad: Tensor):
        start, end = self.qa(h).half().unbind(-1)
        start[pad] = -1e30
        end = end.float().masked_fill(pad, -1e30)
        return start, end


def pool(h16: Tensor, keep: Tensor) -> Tensor:
    h16 = h16.half()
    w = keep.half().unsqueeze(-1)
    return (h16 * w).sum(1) / (w.sum(1) + 1e-9)


def cosine16(a: Tensor, b: Tensor) -> Tensor:
    a = F.normalize(a.half(), dim=-1, eps=1e-12)
    b = F.normalize(b.float(), dim=-1, eps=1e-12).half()
    return a @ b.T


def span_loss(start, end, gold):
    s = F.cross_entropy(start.float(), gold[:, 0], ignore_index=-1)
    return 0.5 * (s + F.cross_entropy(end, gold[:, 1], ignore_index=-1))
