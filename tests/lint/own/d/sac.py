import torch
from torch import nn
import torch.nn.functional as F
from torch.distributions import Normal

LOG_STD_MIN, LOG_STD_MAX = -20, 2


class Actor(nn.Module):
    def __init__(self, obs, act, hid=256):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, hid), nn.ReLU(), nn.Linear(hid, hid), nn.ReLU())
        self.mu, self.log_std = nn.Linear(hid, act), nn.Linear(hid, act)

    def forward(self, o):
        h = self.body(o)
        std = self.log_std(h).clamp(LOG_STD_MIN, LOG_STD_MAX).exp()
        d = Normal(self.mu(h), std)
        u = d.rsample()
        a = torch.tanh(u)
        logp = d.log_prob(u) - torch.log(1 - a.pow(2) + 1e-6)
        return a, logp.sum(-1)


def soft_update(target, net, tau=0.005):
    with torch.no_grad():
        for pt, p in zip(target.parameters(), net.parameters()):
            pt.mul_(1 - tau).add_(tau * p)


def update(actor, q1, q2, targets, batch, opts, log_alpha, gamma=0.99):
    o, a, r, o2, done = batch
    alpha = log_alpha.detach().clamp(max=5.0).exp()
    with torch.no_grad():
        a2, logp2 = actor(o2)
        tq = torch.min(*(t(o2, a2) for t in targets)) - alpha * logp2
        y = r + gamma * (1 - done) * tq
    q_loss = F.mse_loss(q1(o, a), y) + F.mse_loss(q2(o, a), y)
    opts["q"].zero_grad()
    q_loss.backward()
    opts["q"].step()
    pa, logp = actor(o)
    pi_loss = (alpha * logp - torch.min(q1(o, pa), q2(o, pa))).mean()
    opts["pi"].zero_grad()
    pi_loss.backward()
    opts["pi"].step()
