import torch
from torch import nn
import torch.nn.functional as F
from torch.distributions import Normal


class GaussianPolicy(nn.Module):
    def __init__(self, obs: int, act: int, hidden: int = 256):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, act)
        self.log_std = nn.Linear(hidden, act)

    def sample(self, obs):
        h = self.body(obs)
        std = self.log_std(h).exp()
        dist = Normal(self.mean(h), std)
        x = dist.rsample()
        a = torch.tanh(x)
        logp = dist.log_prob(x) - torch.log(1 - a.pow(2))
        return a, logp.sum(-1)


def critic_loss(q1, q2, q_target, policy, batch, alpha, gamma=0.99):
    with torch.no_grad():
        a2, logp = policy.sample(batch["next_obs"])
        target = batch["rew"] + gamma * (1 - batch["done"]) * (q_target(batch["next_obs"], a2) - alpha * logp)
    return F.mse_loss(q1(batch["obs"], batch["act"]), target) + F.mse_loss(q2(batch["obs"], batch["act"]), target)


def soft_update(net, target, tau=0.005):
    with torch.no_grad():
        for p, pt in zip(net.parameters(), target.parameters()):
            pt.lerp_(p, tau)
