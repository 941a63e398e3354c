import math
import torch
import torch.nn.functional as F
from torch import nn


def cosine_betas(T: int, s: float = 0.008) -> torch.Tensor:
    t = torch.linspace(0, T, T + 1) / T
    ac = torch.cos((t + s) / (1 + s) * math.pi / 2) ** 2
    ac = ac / ac[0]
    return (1 - ac[1:] / ac[:-1]).clamp(max=0.999)


class SinusoidalTime(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.register_buffer("freq", torch.exp(-math.log(10_000) * torch.arange(d // 2) / (d // 2)))

    def forward(self, t):
        a = t[:, None].float() * self.freq
        return torch.cat([a.sin(), a.cos()], -1)


class DiffusionPolicy(nn.Module):
    def __init__(self, net, act_dim, horizon=16, T=100):
        super().__init__()
        ac = torch.cumprod(1 - cosine_betas(T), 0)
        self.register_buffer("ac", ac)
        self.net, self.T, self.shape = net, T, (horizon, act_dim)

    def loss(self, obs, act, pad):
        t = torch.randint(0, self.T, (len(act),), device=act.device)
        ac = self.ac[t].view(-1, 1, 1)
        eps = torch.randn_like(act)
        pred = self.net(ac.sqrt() * act + (1 - ac).sqrt() * eps, t, obs)
        per = F.mse_loss(pred, eps, reduction="none").mean(-1)
        keep = (~pad).float()
        return (per * keep).sum() / keep.sum().clamp(min=1.0)

    @torch.no_grad()
    def act(self, obs, steps=10):
        x = torch.randn(len(obs), *self.shape, device=obs.device)
        ts = torch.linspace(self.T - 1, 0, steps).long().tolist()
        for i, t in enumerate(ts):
            ac = self.ac[t].clamp(min=1e-4)
            e = self.net(x, torch.full((len(x),), t, device=x.device), obs)
            x0 = ((x - (1 - ac).sqrt() * e) / ac.sqrt()).clamp(-1, 1)
            prev = self.ac[ts[i + 1]] if i + 1 < len(ts) else torch.ones_like(ac)
            x = prev.sqrt() * x0 + (1 - prev).sqrt() * e
        return x
