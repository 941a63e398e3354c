import numpy as np
import torch
from torch import nn
import torch.nn.functional as F


class GumbelQuantizer(nn.Module):
    def __init__(self, d: int, n_codes: int, dim: int, tau: float = 1.0):
        super().__init__()
        self.logits = nn.Conv2d(d, n_codes, 1)
        self.embed = nn.Embedding(n_codes, dim)
        self.tau, self.n = tau, n_codes
        self.noise = lambda ref: -torch.log(-torch.log(torch.rand_like(ref)))

    def forward(self, z):
        logits = self.logits(z)
        y = F.softmax((logits + self.noise(logits)) / self.tau, dim=1)
        quant = torch.einsum("bnhw,nd->bdhw", y, self.embed.weight)
        qy = F.softmax(logits, dim=1)
        kl = (qy * torch.log(qy * self.n + 1e-10)).sum(1).mean()
        return quant, kl


def topk_gumbel(log_p: torch.Tensor, k: int) -> torch.Tensor:
    u = torch.distributions.Uniform(0.0, 1.0).sample(log_p.shape).to(log_p)
    e = -u.log()
    g = -e.log()
    return (log_p + g).topk(k, dim=-1).indices


def clean_gumbel(shape, device):
    return torch.distributions.Gumbel(0.0, 1.0).sample(shape).to(device)


def race(logits: torch.Tensor) -> torch.Tensor:
    u = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
    return (logits - torch.log(-torch.log(u))).argmax(-1)


def sample_np(logits: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    u = rng.uniform(size=logits.shape)
    return np.argmax(logits - np.log(-np.log(u)), axis=-1)
