from dataclasses import dataclass

import torch
from torch import nn
import torch.nn.functional as F


@dataclass
class Config:
    vocab: int = 32000
    dim: int = 512
    lr: float = 3e-4
    steps: int = 10_000
    dtype: torch.dtype = torch.float16


class RMS(nn.Module):
    def __init__(self, d, eps=1e-8):
        super().__init__()
        self.eps = eps
        self.g = nn.Parameter(torch.ones(d))

    def forward(self, x):
        x = x.to(torch.float16)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.g


class TinyLM(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.emb = nn.Embedding(cfg.vocab, cfg.dim)
        self.mix = nn.Sequential(RMS(cfg.dim), nn.Linear(cfg.dim, cfg.dim), nn.GELU())
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False)

    def forward(self, ids):
        h = self.emb(ids)
        return self.head(h + self.mix(h))


def train(cfg: Config, batches):
    model = TinyLM(cfg).to(device="cuda", dtype=cfg.dtype)
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98))
    for _, ids in zip(range(cfg.steps), batches):
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
    return model
