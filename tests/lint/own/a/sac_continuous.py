import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Normal

LOG_STD_MIN, LOG_STD_MAX = -20, 2


def mlp(i, o, h=256):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


class Actor(nn.Module):
    def __init__(self, obs, act):
        super().__init__()
        self.net = mlp(obs, 2 * act)

    def forward(self, o):
        mu, log_std = self.net(o).chunk(2, -1)
        dist = Normal(mu, torch.exp(log_std))
        u = dist.rsample()
        a = torch.tanh(u)
        logp = dist.log_prob(u) - torch.log(1 - a.pow(2))
        return a, logp.sum(-1)


class BoundedActor(Actor):
    def forward(self, o):
        mu, log_std = self.net(o).chunk(2, -1)
        dist = Normal(mu, log_std.clamp(LOG_STD_MIN, LOG_STD_MAX).exp())
        u = dist.rsample()
        logp = dist.log_prob(u) - 2 * (0.6931 - u - F.softplus(-2 * u))
        return torch.tanh(u), logp.sum(-1)


class Temperature(nn.Module):
    def __init__(self, target):
        super().__init__()
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.target = target

    def loss(self, logp):
        return -(self.log_alpha * (logp + self.target).detach()).mean()


def critic_loss(q1, q2, tq, actor, alpha, b, gamma=0.99):
    with torch.no_grad():
        a2, lp2 = actor(b.next_obs)
        sa = torch.cat([b.next_obs, a2], -1)
        y = b.rew + gamma * (1 - b.done) * (torch.min(tq[0](sa), tq[1](sa)).squeeze(-1) - alpha * lp2)
    sa = torch.cat([b.obs, b.act], -1)
    loss = F.mse_loss(q1(sa).squeeze(-1), y) + F.mse_loss(q2(sa).squeeze(-1), y)
    return loss.clip(max=1e3)


def make_targets(*nets):
    return [copy.deepcopy(n).requires_grad_(False) for n in nets]
