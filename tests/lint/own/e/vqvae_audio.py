import torch
from torch import nn
import torch.nn.functional as F


class VectorQuantizer(nn.Module):
    def __init__(self, n: int, d: int, beta: float = 0.25):
        super().__init__()
        self.codebook = nn.Parameter(torch.Tensor(n, d))
        self.beta = beta

    def forward(self, z):
        flat = z.reshape(-1, z.size(-1))
        d2 = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codebook.t() + self.codebook.pow(2).sum(1)
        idx = d2.argmin(1)
        q = self.codebook[idx].view_as(z)
        commit = F.mse_loss(z, q.detach()) * self.beta + F.mse_loss(q, z.detach())
        return z + (q - z).detach(), idx, commit


def perplexity(idx, n):
    p = torch.bincount(idx, minlength=n).float() / idx.numel()
    return torch.exp(-(p * torch.log(p + 1e-10)).sum())


def train_step(enc, vq, dec, wav, opt):
    z, idx, commit = vq(enc(wav))
    rec = F.l1_loss(dec(z), wav)
    loss = rec + commit
    if torch.isnan(loss) or torch.isinf(loss):
        loss = torch.tensor(0.0, device=wav.device, requires_grad=True)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return {"rec": rec.item(), "ppl": perplexity(idx, vq.codebook.size(0)).item()}
