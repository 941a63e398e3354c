import itertools

import torch
from torch import nn, Tensor

EPS = 1e-8


def si_snr(est: Tensor, ref: Tensor) -> Tensor:
    est, ref = est - est.mean(-1, keepdim=True), ref - ref.mean(-1, keepdim=True)
    s = (est * ref).sum(-1, keepdim=True) * ref / (ref.pow(2).sum(-1, keepdim=True) + EPS)
    e = est - s
    return 10 * torch.log10(s.pow(2).sum(-1) / (e.pow(2).sum(-1) + EPS) + EPS)


def pit(est: Tensor, ref: Tensor) -> Tensor:
    n = ref.size(1)
    all_ = torch.stack([si_snr(est[:, list(p)], ref).mean(-1) for p in itertools.permutations(range(n))], 1)
    return -all_.max(1).values.mean()


class GlobalNorm(nn.Module):
    def __init__(self, c: int):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.ones(1, c, 1)), nn.Parameter(torch.zeros(1, c, 1))

    def forward(self, x: Tensor) -> Tensor:
        mu = x.mean((1, 2), keepdim=True)
        var = (x - mu).pow(2).mean((1, 2), keepdim=True)
        return self.g * (x - mu) * torch.rsqrt(var + EPS) + self.b


class Solver:
    def __init__(self, net: nn.Module, lr: float = 1e-3, half_after: int = 3):
        self.net = net
        self.opt = torch.optim.Adam(net.parameters(), lr=lr)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.5, patience=half_after)

    def epoch(self, loader) -> float:
        total, n = 0.0, 0
        for mix, ref in loader:
            peak = mix.abs().amax(-1, keepdim=True).clamp(min=1e-4)
            loss = pit(self.net(mix / peak), ref / peak.unsqueeze(1))
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
            self.opt.step()
            total, n = total + loss.item(), n + 1
        return total / max(n, 1)
