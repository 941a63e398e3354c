import torch
from torch import nn
import torch.nn.functional as F
from torch.distributions import Normal, kl_divergence


class RSSM(nn.Module):
    def __init__(self, obs: int, act: int, h: int = 200, z: int = 30, min_std: float = 0.1):
        super().__init__()
        self.cell = nn.GRUCell(z + act, h)
        self.prior = nn.Linear(h, 2 * z)
        self.post = nn.Linear(h + obs, 2 * z)
        self.dec = nn.Linear(h + z, obs)
        self.min_std, self.h, self.z = min_std, h, z

    def dist(self, stats):
        mean, raw = stats.chunk(2, -1)
        return Normal(mean, F.softplus(raw) + self.min_std)

    def forward(self, obs, act):
        b, t, _ = obs.shape
        h, z = obs.new_zeros(b, self.h), obs.new_zeros(b, self.z)
        rec, kl = 0.0, 0.0
        for i in range(t):
            h = self.cell(torch.cat([z, act[:, i]], -1), h)
            prior = self.dist(self.prior(h))
            post = self.dist(self.post(torch.cat([h, obs[:, i]], -1)))
            z = post.rsample()
            rec = rec + F.mse_loss(self.dec(torch.cat([h, z], -1)), obs[:, i])
            kl = kl + kl_divergence(post, prior).sum(-1).mean().clamp(min=3.0)
        return (rec + kl) / t


def train(model, replay, steps=100_000, grad_clip=100.0):
    opt = torch.optim.Adam(model.parameters(), lr=6e-4, eps=1e-4)
    for step in range(steps):
        loss = model(*replay.sample(50, 50))
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        opt.step()
        if step % 500 == 0:
            print(f"{step}: loss {loss.item():.3f} |g| {norm.item():.2f}")
