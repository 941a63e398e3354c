import torch
import torch.nn.functional as F
from torch import nn, Tensor


class Expert(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.up, self.down = nn.Linear(d, h), nn.Linear(h, d)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class MoE(nn.Module):
    def __init__(self, d: int, h: int, n_experts: int = 8, k: int = 2, noise: float = 1.0):
        super().__init__()
        self.gate = nn.Linear(d, n_experts, bias=False)
        self.experts = nn.ModuleList(Expert(d, h) for _ in range(n_experts))
        self.k, self.noise = k, noise

    def route(self, x: Tensor):
        logits = self.gate(x).float()
        if self.training:
            u = torch.rand_like(logits)
            logits = logits + self.noise * -torch.log(-torch.log(u))
        p = logits.softmax(-1)
        w, idx = p.topk(self.k, dim=-1)
        return w / w.sum(-1, keepdim=True), idx, p

    def forward(self, x: Tensor):
        flat = x.reshape(-1, x.size(-1))
        w, idx, p = self.route(flat)
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            tok, slot = (idx == e).nonzero(as_tuple=True)
            if len(tok):
                out.index_add_(0, tok, expert(flat[tok]) * w[tok, slot, None].to(flat.dtype))
        load = F.one_hot(idx, len(self.experts)).float().mean((0, 1))
        aux = len(self.experts) * (load * p.mean(0)).sum()
        return out.view_as(x), aux


def z_loss(logits: Tensor) -> Tensor:
    return torch.logsumexp(logits, -1).pow(2).mean()
