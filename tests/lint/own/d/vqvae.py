import torch
from torch import nn
import torch.nn.functional as F


class VectorQuantizerEMA(nn.Module):
    def __init__(self, k: int, d: int, decay: float = 0.99, eps: float = 1e-5):
        super().__init__()
        self.decay, self.eps, self.k = decay, eps, k
        self.register_buffer("codes", torch.randn(k, d))
        self.register_buffer("size", torch.zeros(k))
        self.register_buffer("total", torch.empty(k, d).normal_())

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.size(1))
        d2 = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes.t() + self.codes.pow(2).sum(1)
        idx = d2.argmin(1)
        hot = F.one_hot(idx, self.k).type_as(flat)
        if self.training:
            with torch.no_grad():
                self.size.mul_(self.decay).add_(hot.sum(0), alpha=1 - self.decay)
                self.total.mul_(self.decay).add_(hot.t() @ flat, alpha=1 - self.decay)
                n = self.size.sum()
                size = (self.size + self.eps) / (n + self.k * self.eps) * n
                self.codes.copy_(self.total / size.unsqueeze(1))
        q = F.embedding(idx, self.codes).view(z.size(0), z.size(2), z.size(3), -1).permute(0, 3, 1, 2)
        commit = F.mse_loss(z, q.detach())
        avg = hot.mean(0)
        perplexity = torch.exp(-(avg * torch.log(avg + 1e-10)).sum())
        return z + (q - z).detach(), commit, perplexity


def train_step(enc, vq, dec, x, opt, beta=0.25):
    z, commit, ppl = vq(enc(x))
    loss = F.mse_loss(dec(z), x) + beta * commit
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item(), ppl.item()
