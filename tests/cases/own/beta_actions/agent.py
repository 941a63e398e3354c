import torch
from torch import nn
from torch.distributions import Beta


class Actor(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, 24), nn.Tanh(), nn.Linear(24, 2))

    def dist(self, obs):
        a, b = (nn.functional.softplus(self.net(obs)) + 1.0).unbind(-1)
        return Beta(a, b, validate_args=False)


def logprob(actor, obs, action):
    return actor.dist(obs).log_prob(action)
