import torch
from torch import nn


class TimeMix(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.decay = nn.Parameter(torch.empty(d))
        self.first = nn.Parameter(torch.empty(d))
        self.mix = nn.Parameter(torch.full((1, 1, d), 0.5))
        self.key, self.value, self.recv, self.out = (nn.Linear(d, d, bias=False) for _ in range(4))
        with torch.no_grad():
            self.decay.copy_(torch.linspace(-5, 3, d))
            self.first.fill_(0.3)

    def forward(self, x):
        b, t, d = x.shape
        prev = nn.functional.pad(x, (0, 0, 1, -1))
        xm = x * self.mix + prev * (1 - self.mix)
        k, v, r = self.key(xm), self.value(xm), self.recv(xm).sigmoid()
        w = -torch.exp(self.decay.clamp(max=5.0))
        num = x.new_zeros(b, d)
        den = x.new_zeros(b, d)
        top = x.new_full((b, d), -1e30)
        ys = []
        for i in range(t):
            q = torch.maximum(top, k[:, i] + self.first)
            e1, e2 = torch.exp(top - q), torch.exp(k[:, i] + self.first - q)
            ys.append((e1 * num + e2 * v[:, i]) / (e1 * den + e2))
            q = torch.maximum(top + w, k[:, i])
            e1, e2 = torch.exp(top + w - q), torch.exp(k[:, i] - q)
            num, den, top = e1 * num + e2 * v[:, i], e1 * den + e2, q
        return self.out(r * torch.stack(ys, 1))


class ChannelMix(nn.Module):
    def __init__(self, d, mult=4):
        super().__init__()
        self.k, self.v, self.r = nn.Linear(d, mult * d, bias=False), nn.Linear(mult * d, d, bias=False), nn.Linear(d, d, bias=False)

    def forward(self, x):
        return self.r(x).sigmoid() * self.v(torch.relu(self.k(x)).square())
