import torch
from torch import Tensor, nn
import torch.nn.functional as F


def sample_categorical(probs: Tensor) -> Tensor:
    u = torch.rand(probs.shape, device=probs.device)
    noise = u.log().neg().log().neg()
    return (probs.clamp(min=1e-20).log() + noise).argmax(-1)


class LogLinear(nn.Module):
    def __init__(self, eps: float = 1e-3):
        super().__init__()
        self.eps = eps

    def total(self, t: Tensor) -> Tensor:
        return -torch.log1p(-(1 - self.eps) * t)

    def rate(self, t: Tensor) -> Tensor:
        return (1 - self.eps) / (1 - (1 - self.eps) * t)


def corrupt(x: Tensor, sigma: Tensor, mask_id: int) -> Tensor:
    move = torch.rand(x.shape, device=x.device) < (1 - torch.exp(-sigma))[:, None]
    return torch.where(move, mask_id, x)


def mdlm_loss(model: nn.Module, noise: LogLinear, x: Tensor, mask_id: int) -> Tensor:
    t = torch.rand(x.size(0), device=x.device).clamp(min=1e-3)
    xt = corrupt(x, noise.total(t), mask_id)
    p = F.softmax(model(xt, t), dim=-1)
    logp = p.gather(-1, x.unsqueeze(-1)).squeeze(-1).log()
    w = noise.rate(t)[:, None]
    return -(w * logp * (xt == mask_id)).sum() / x.numel()
