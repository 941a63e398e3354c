import torch
import torch.nn.functional as F
from torch import nn


class VectorQuantizer(nn.Module):
    def __init__(self, k: int, d: int, beta: float = 0.25):
        super().__init__()
        self.beta = beta
        self.codebook = nn.Parameter(torch.empty(k, d))

    def forward(self, z):
        dist = z.pow(2).sum(-1, keepdim=True) - 2 * z @ self.codebook.t() + self.codebook.pow(2).sum(-1)
        idx = dist.argmin(-1)
        q = self.codebook[idx]
        loss = F.mse_loss(q, z.detach()) + self.beta * F.mse_loss(z, q.detach())
        q = z + (q - z).detach()
        avg = F.one_hot(idx, len(self.codebook)).float().flatten(0, -2).mean(0)
        perplexity = torch.exp(-(avg * torch.log(avg + 1e-10)).sum())
        return q, loss, perplexity


class EMAQuantizer(nn.Module):
    def __init__(self, k: int, d: int, decay: float = 0.99, eps: float = 1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        self.register_buffer("embed", torch.randn(k, d))
        self.register_buffer("size", torch.zeros(k))
        self.register_buffer("total", self.embed.clone())

    @torch.no_grad()
    def update(self, flat, onehot):
        self.size.lerp_(onehot.sum(0), 1 - self.decay)
        self.total.lerp_(onehot.t() @ flat, 1 - self.decay)
        n = self.size.sum()
        smoothed = (self.size + self.eps) / (n + len(self.size) * self.eps) * n
        self.embed.copy_(self.total / smoothed.clamp(min=self.eps).unsqueeze(1))

    def forward(self, z):
        flat = z.reshape(-1, z.size(-1))
        idx = torch.cdist(flat, self.embed).argmin(-1)
        if self.training:
            self.update(flat, F.one_hot(idx, len(self.embed)).type_as(flat))
        return self.embed[idx].view_as(z), idx
