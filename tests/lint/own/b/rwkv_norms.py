import torch
from torch import nn
import torch.nn.functional as F


class RMSNormGated(nn.Module):
    def __init__(self, d: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x, gate):
        x = x * F.silu(gate)
        inv = torch.rsqrt(x.square().mean(-1, keepdim=True)) + self.eps
        return x * inv * self.weight


class HeadNorm(nn.Module):
    def __init__(self, heads: int, d: int, eps: float = 64e-5):
        super().__init__()
        self.heads, self.eps = heads, eps
        self.g, self.b = nn.Parameter(torch.ones(d)), nn.Parameter(torch.zeros(d))

    def forward(self, x):
        b, t, d = x.shape
        return F.group_norm(x.reshape(b * t, d), self.heads, self.g, self.b, self.eps).view(b, t, d)


class TimeMix(nn.Module):
    def __init__(self, d: int, heads: int):
        super().__init__()
        self.mix_k = nn.Parameter(torch.empty(1, 1, d))
        self.mix_v = nn.Parameter(torch.empty(1, 1, d))
        self.decay = nn.Parameter(torch.empty(d))
        self.k, self.v, self.g = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.norm, self.ln = RMSNormGated(d), HeadNorm(heads, d)
        nn.init.constant_(self.mix_k, 0.5)
        nn.init.constant_(self.mix_v, 0.5)

    def forward(self, x):
        prev = F.pad(x, (0, 0, 1, -1))
        k = torch.sigmoid(self.k(torch.lerp(x, prev, self.mix_k)))
        v = self.v(torch.lerp(x, prev, self.mix_v))
        w = torch.sigmoid(self.decay)
        state, out = torch.zeros_like(v[:, 0]), []
        for t in range(x.size(1)):
            state = w * state + k[:, t] * v[:, t]
            out.append(state)
        return self.norm(self.ln(torch.stack(out, 1)), self.g(x))
