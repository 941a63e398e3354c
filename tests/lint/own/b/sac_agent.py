import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal

LOG_STD_MIN, LOG_STD_MAX = -20, 2


class SquashedActor(nn.Module):
    def __init__(self, obs, act, hidden=256):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mu, self.log_std = nn.Linear(hidden, act), nn.Linear(hidden, act)

    def forward(self, o):
        h = self.body(o)
        log_std = torch.clamp(self.log_std(h), LOG_STD_MIN, LOG_STD_MAX)
        dist = Normal(self.mu(h), log_std.exp())
        u = dist.rsample()
        a = torch.tanh(u)
        logp = dist.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)
        return a, logp.sum(-1)


def critic_loss(q1, q2, target_q1, target_q2, actor, batch, alpha, gamma=0.99):
    o, a, r, o2, d = batch
    with torch.no_grad():
        a2, logp2 = actor(o2)
        v = torch.min(target_q1(o2, a2), target_q2(o2, a2)) - alpha * logp2
        y = r + gamma * (1 - d) * v
    return F.mse_loss(q1(o, a), y) + F.mse_loss(q2(o, a), y)


def actor_loss(q1, q2, actor, o, alpha):
    a, logp = actor(o)
    return (alpha * logp - torch.min(q1(o, a), q2(o, a))).mean()


@torch.no_grad()
def polyak(net, target, tau=0.005):
    for p, t in zip(net.parameters(), target.parameters()):
        t.mul_(1 - tau).add_(tau * p)
