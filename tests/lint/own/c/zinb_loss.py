import torch
import torch.nn as nn
import torch.nn.functional as F


class CountDecoder(nn.Module):
    def __init__(self, z: int, genes: int, hidden: int = 128):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(z, hidden), nn.BatchNorm1d(hidden), nn.ReLU())
        self.mean, self.disp, self.pi = nn.Linear(hidden, genes), nn.Linear(hidden, genes), nn.Linear(hidden, genes)

    def forward(self, z, size_factor):
        h = self.body(z)
        mu = torch.exp(self.mean(h)) * size_factor
        theta = F.softplus(self.disp(h)).clamp(1e-4, 1e4)
        pi = torch.sigmoid(self.pi(h))
        return mu, theta, pi


def zinb_nll(x, mu, theta, pi, eps=1e-8):
    log_theta_mu = torch.log(theta + mu + eps)
    nb = (
        theta * (torch.log(theta + eps) - log_theta_mu)
        + x * (torch.log(mu + eps) - log_theta_mu)
        + torch.lgamma(x + theta) - torch.lgamma(theta) - torch.lgamma(x + 1)
    )
    zero = torch.log(pi + (1 - pi) * torch.pow(theta / (theta + mu + eps), theta) + eps)
    nonzero = torch.log(1 - pi) + nb
    return -torch.where(x < 1e-8, zero, nonzero).sum(-1).mean()


def log_normalise(counts, target=1e4):
    total = counts.sum(1, keepdim=True).clamp(min=1.0)
    return torch.log1p(counts / total * target)


def train(enc, dec, loader, opt):
    for counts in loader:
        z = enc(log_normalise(counts))
        sf = counts.sum(1, keepdim=True) / 1e4
        loss = zinb_nll(counts, *dec(z, sf))
        opt.zero_grad()
        loss.backward()
        opt.step()
