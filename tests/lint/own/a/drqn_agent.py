import random
from collections import deque

import torch as th
import torch.nn as nn
import torch.nn.functional as F


class DRQN(nn.Module):
    def __init__(self, n_obs, n_act, h=128):
        super().__init__()
        self.inp = nn.Linear(n_obs, h)
        self.core = nn.GRUCell(h, h)
        self.q = nn.Linear(h, n_act)

    def forward(self, obs_seq, h):
        qs = []
        for o in obs_seq.unbind(1):
            h = self.core(F.relu(self.inp(o)), h)
            qs.append(self.q(h))
        return th.stack(qs, 1), h


class Learner:
    def __init__(self, net, target, gamma=0.99, resume=None):
        self.net, self.target, self.gamma = net, target, gamma
        self.opt = th.optim.RMSprop(net.parameters(), lr=5e-4)
        self.memory = deque(maxlen=2000)
        if resume is not None:
            self.net.load_state_dict(th.load(resume, map_location=lambda s, loc: s)["net"])

    def learn(self, batch=32):
        obs, act, rew, nxt, done = (th.stack(t) for t in zip(*random.sample(self.memory, batch)))
        h0 = th.zeros(batch, self.net.core.hidden_size)
        q = self.net(obs, h0)[0].gather(-1, act.unsqueeze(-1)).squeeze(-1)
        with th.no_grad():
            nq = self.target(nxt, h0)[0].amax(-1)
            y = rew + self.gamma * (1 - done) * nq
        td = F.smooth_l1_loss(q, y, reduction="none")
        loss = th.clamp(td, 0.0, 1.0).mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.item()

    @th.no_grad()
    def act(self, obs, h, eps=0.05):
        q, h = self.net(obs[None, None], h)
        return (random.randrange(q.size(-1)) if random.random() < eps else int(q.argmax())), h
