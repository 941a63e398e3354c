import torch
import torch.nn.functional as F
from torch import nn


class TopKRouter(nn.Module):
    def __init__(self, d: int, n_exp: int, k: int = 2, noise: float = 1e-2):
        super().__init__()
        self.gate = nn.Linear(d, n_exp, bias=False)
        self.k, self.n_exp, self.noise = k, n_exp, noise

    def forward(self, x):
        logits = self.gate(x.float())
        if self.training:
            logits = logits * (1 + self.noise * (2 * torch.rand_like(logits) - 1))
        top, idx = logits.topk(self.k, dim=-1)
        w = top.softmax(-1)
        probs = logits.softmax(-1)
        load = F.one_hot(idx, self.n_exp).float().sum(1).mean(0)
        aux = self.n_exp * (load * probs.mean(0)).sum()
        z = torch.logsumexp(logits, -1).square().mean()
        return w.to(x.dtype), idx, aux + 1e-3 * z


class MoE(nn.Module):
    def __init__(self, d: int, n_exp: int = 8, k: int = 2, mult: int = 4):
        super().__init__()
        self.router = TopKRouter(d, n_exp, k)
        self.w1 = nn.Parameter(torch.empty(n_exp, d, mult * d))
        self.w2 = nn.Parameter(torch.empty(n_exp, mult * d, d))
        self._reset()

    def _reset(self):
        with torch.no_grad():
            for w in (self.w1, self.w2):
                bound = w.size(1) ** -0.5
                w.uniform_(-bound, bound)

    def forward(self, x):
        b, t, d = x.shape
        flat = x.reshape(-1, d)
        w, idx, aux = self.router(flat)
        out = torch.zeros_like(flat)
        for e in range(self.w1.size(0)):
            tok, slot = (idx == e).nonzero(as_tuple=True)
            if tok.numel() == 0:
                continue
            h = F.gelu(flat[tok] @ self.w1[e]) @ self.w2[e]
            out.index_add_(0, tok, h * w[tok, slot, None])
        return out.view(b, t, d), aux
