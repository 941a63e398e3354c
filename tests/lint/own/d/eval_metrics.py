import numpy as np
import torch
from torch import Tensor


@torch.no_grad()
def ece(probs: Tensor, labels: Tensor, bins: int = 15) -> float:
    conf, pred = probs.max(-1)
    edges = torch.linspace(0, 1, bins + 1)
    out = 0.0
    for lo, hi in zip(edges[:-1], edges[1:]):
        sel = (conf > lo) & (conf <= hi)
        if sel.any():
            gap = (pred[sel] == labels[sel]).float().mean() - conf[sel].mean()
            out += gap.abs().item() * sel.float().mean().item()
    return out


@torch.no_grad()
def iou_per_class(pred: Tensor, gt: Tensor, classes: int, ignore: int = 255) -> list[float]:
    keep = gt != ignore
    hist = torch.bincount(gt[keep] * classes + pred[keep], minlength=classes ** 2).view(classes, classes)
    inter = hist.diagonal()
    union = hist.sum(0) + hist.sum(1) - inter
    return (inter / union.clamp(min=1)).tolist()


def rmse(pred: np.ndarray, y: np.ndarray) -> float:
    ok = ~np.isnan(y)
    return float(np.sqrt(np.mean((pred[ok] - y[ok]) ** 2)))


def perplexity(nll_sum: float, tokens: int) -> float:
    return float(np.exp(min(nll_sum / max(tokens, 1), 20.0)))


@torch.no_grad()
def rotation_error_deg(R1: Tensor, R2: Tensor) -> Tensor:
    cos = ((R1.transpose(-1, -2) @ R2).diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2
    return torch.rad2deg(torch.acos(cos.clamp(-1, 1)))


def summary(values: list[float]) -> str:
    a = np.asarray(values)
    return f"{np.nanmean(a):.4f} ± {np.nanstd(a):.4f} ({np.isnan(a).sum()} missing)"
