import math

import torch
from torch import nn
from torch.distributions import Independent, Normal
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, d, z):
        super().__init__()
        self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, 4, batch_first=True), 2)
        self.stats = nn.Linear(d, 2 * z)
        self.token = nn.Parameter(self.stats.weight.new_empty(1, 1, d))

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        mu, logvar = self.stats(self.body(x)[:, 0]).chunk(2, -1)
        return mu, logvar


class SeqVAE(nn.Module):
    def __init__(self, d, z, steps):
        super().__init__()
        self.enc = Encoder(d, z)
        self.dec = nn.Sequential(nn.Linear(z, 256), nn.GELU(), nn.Linear(256, steps * d))

    def posterior(self, mu, logvar):
        sigma = logvar.mul(0.5).exp_()
        return Independent(Normal(mu, sigma), 1)

    def forward(self, x):
        mu, logvar = self.enc(x)
        z = self.posterior(mu, logvar).rsample()
        rec = F.mse_loss(self.dec(z).view_as(x), x, reduction="none").flatten(1).sum(1)
        kl = 0.5 * (mu.square() + logvar.exp() - logvar - 1).sum(-1)
        return rec, kl


def beta_at(step, period=10_000, ratio=0.5):
    return min(1.0, (step % period) / (ratio * period))


def train(model, loader, opt, free_bits=2.0):
    for step, x in enumerate(loader):
        scale = x * torch.rsqrt(x.pow(2).mean(dim=(1, 2), keepdim=True))
        rec, kl = model(scale)
        elbo = (rec + beta_at(step) * kl.clamp(min=free_bits)).mean()
        loss = torch.where(torch.isfinite(elbo), elbo, torch.zeros_like(elbo))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        if step % 100 == 0:
            print(step, f"{elbo.item():.3f}", f"bpd {elbo.item() / (x[0].numel() * math.log(2)):.3f}")
