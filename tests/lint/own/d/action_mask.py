import torch
from torch import nn
from torch.distributions import Categorical


class MaskedPolicy(nn.Module):
    def __init__(self, obs: int, n_actions: int):
        super().__init__()
        self.pi = nn.Sequential(nn.Linear(obs, 128), nn.Tanh(), nn.Linear(128, n_actions))
        self.v = nn.Sequential(nn.Linear(obs, 128), nn.Tanh(), nn.Linear(128, 1))

    def dist(self, obs, legal):
        return Categorical(logits=self.pi(obs).masked_fill(~legal, -1e8))

    def forward(self, obs, legal):
        d = self.dist(obs, legal)
        a = d.sample()
        return a, d.log_prob(a), self.v(obs).squeeze(-1)


def gae(r, v, done, gamma=0.99, lam=0.95):
    adv, last = torch.zeros_like(r), 0.0
    for t in reversed(range(len(r) - 1)):
        delta = r[t] + gamma * v[t + 1] * (1 - done[t]) - v[t]
        adv[t] = last = delta + gamma * lam * (1 - done[t]) * last
    return adv


def a2c(net, opt, obs, legal, act, ret, adv, ent=0.01):
    d = net.dist(obs, legal)
    adv = (adv - adv.mean()) / adv.std(unbiased=False).clamp(min=1e-6)
    pg = -(d.log_prob(act) * adv).mean()
    vf = nn.functional.smooth_l1_loss(net.v(obs).squeeze(-1), ret)
    loss = pg + 0.5 * vf - ent * d.entropy().mean()
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.5)
    opt.step()
    return loss.item()


@torch.no_grad()
def greedy(net, obs, legal):
    return net.pi(obs).masked_fill(~legal, -torch.inf).argmax(-1)
