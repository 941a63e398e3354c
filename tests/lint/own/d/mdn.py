import math
import torch
from torch import nn
import torch.nn.functional as F


class MDN(nn.Module):
    """Mixture density head over k Gaussians."""

    def __init__(self, d_in: int, d_out: int, k: int = 5):
        super().__init__()
        self.k, self.d = k, d_out
        self.pi = nn.Linear(d_in, k)
        self.mu = nn.Linear(d_in, k * d_out)
        self.log_sigma = nn.Linear(d_in, k * d_out)

    def forward(self, h):
        pi = F.softmax(self.pi(h), dim=-1)
        mu = self.mu(h).view(-1, self.k, self.d)
        sigma = torch.exp(self.log_sigma(h)).view(-1, self.k, self.d)
        return pi, mu, sigma


def mdn_nll(pi, mu, sigma, y):
    z = (y.unsqueeze(1) - mu) / sigma
    comp = -0.5 * z.pow(2).sum(-1) - sigma.log().sum(-1) - 0.5 * mu.size(-1) * math.log(2 * math.pi)
    mix = torch.logsumexp(torch.log(pi.clamp(min=1e-8)) + comp, dim=-1)
    return -mix.mean()


def fit(net, head, loader, opt):
    for x, y in loader:
        loss = mdn_nll(*head(net(x)), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([*net.parameters(), *head.parameters()], 1.0)
        opt.step()
