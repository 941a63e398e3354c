import copy

import torch
import torch.nn.functional as F
from torch import nn


class Dueling(nn.Module):
    def __init__(self, obs: int, n_act: int, hid: int = 128):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs, hid), nn.ReLU(), nn.Linear(hid, hid), nn.ReLU())
        self.v, self.a = nn.Linear(hid, 1), nn.Linear(hid, n_act)

    def forward(self, o):
        h = self.body(o)
        a = self.a(h)
        return self.v(h) + a - a.mean(1, keepdim=True)


class Agent:
    def __init__(self, obs, n_act, lr=6.25e-5, gamma=0.99):
        self.q = Dueling(obs, n_act)
        self.target = copy.deepcopy(self.q).requires_grad_(False)
        self.opt = torch.optim.Adam(self.q.parameters(), lr=lr, eps=1.5e-4)
        self.gamma = gamma

    def learn(self, o, a, r, o2, done, w):
        r = r.clamp(-1, 1)
        with torch.no_grad():
            a2 = self.q(o2).argmax(1, keepdim=True)
            y = r + self.gamma * (1 - done) * self.target(o2).gather(1, a2).squeeze(1)
        q = self.q(o).gather(1, a.unsqueeze(1)).squeeze(1)
        td = (q - y).detach().abs().clamp(min=1e-5)
        loss = (w * F.mse_loss(q, y, reduction="none")).mean()
        loss = loss.clamp(max=1.0)
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.q.parameters(), 10.0)
        self.opt.step()
        return td

    def sync(self):
        self.target.load_state_dict(self.q.state_dict())
