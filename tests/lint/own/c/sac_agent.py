import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

LOG_STD_MIN, LOG_STD_MAX = -5.0, 2.0


class SquashedActor(nn.Module):
    def __init__(self, obs: int, act: int, hid: int = 256):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs, hid), nn.ReLU(), nn.Linear(hid, hid), nn.ReLU())
        self.mu, self.log_std = nn.Linear(hid, act), nn.Linear(hid, act)

    def forward(self, o):
        h = self.net(o)
        log_std = torch.tanh(self.log_std(h))
        log_std = LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (log_std + 1)
        dist = Normal(self.mu(h), log_std.exp())
        u = dist.rsample()
        a = torch.tanh(u)
        logp = dist.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)
        return a, logp.sum(-1)


def logp_exact(dist, u):
    """The same correction without the tanh: log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u))."""
    return (dist.log_prob(u) - 2 * (math.log(2) - u - F.softplus(-2 * u))).sum(-1)


def update(actor, q1, q2, q_opt, pi_opt, log_alpha, alpha_opt, batch, target, gamma=0.99):
    o, a, r, o2, d = batch
    alpha = log_alpha.detach().clamp(-10, 5).exp()
    with torch.no_grad():
        a2, lp2 = actor(o2)
        y = r + gamma * (1 - d) * (torch.min(*target(o2, a2)) - alpha * lp2)
    q_loss = F.mse_loss(q1(o, a), y) + F.mse_loss(q2(o, a), y)
    q_opt.zero_grad()
    q_loss.backward()
    q_opt.step()
    pi, lp = actor(o)
    pi_loss = (alpha * lp - torch.min(q1(o, pi), q2(o, pi))).mean()
    pi_opt.zero_grad()
    pi_loss.backward()
    pi_opt.step()
    alpha_loss = -(log_alpha * (lp.detach() - a.size(-1))).mean()
    alpha_opt.zero_grad()
    alpha_loss.backward()
    alpha_opt.step()
