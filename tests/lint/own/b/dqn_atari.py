import math
import random
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F

EPS_START, EPS_END, EPS_DECAY = 1.0, 0.05, 250_000


class DQN(nn.Module):
    def __init__(self, n_actions):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten()
        )
        self.value, self.adv = nn.Linear(3136, 1), nn.Linear(3136, n_actions)

    def forward(self, x):
        h = self.features(x / 255.0)
        a = self.adv(h)
        return self.value(h) + a - a.mean(1, keepdim=True)


def epsilon(step):
    return EPS_END + (EPS_START - EPS_END) * math.exp(-step / EPS_DECAY)


def act(net, obs, step, n_actions):
    if random.random() < epsilon(step):
        return random.randrange(n_actions)
    with torch.no_grad():
        return net(obs[None]).argmax(1).item()


def learn(policy, target, memory: deque, opt, batch=32, gamma=0.99):
    s, a, r, s2, done = map(torch.stack, zip(*random.sample(memory, batch)))
    with torch.no_grad():
        best = policy(s2).argmax(1, keepdim=True)
        y = r.clamp(-1, 1) + gamma * (1 - done) * target(s2).gather(1, best).squeeze(1)
    q = policy(s).gather(1, a[:, None]).squeeze(1)
    loss = F.smooth_l1_loss(q, y)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
    opt.step()
    return loss.item()


def restore(net, path):
    net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
