import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence


class RSSM(nn.Module):
    def __init__(self, act, embed, deter=200, stoch=30, min_std=0.1):
        super().__init__()
        self.min_std = min_std
        self.inp = nn.Linear(stoch + act, deter)
        self.cell = nn.GRUCell(deter, deter)
        self.prior = nn.Linear(deter, 2 * stoch)
        self.post = nn.Linear(deter + embed, 2 * stoch)

    def dist(self, h):
        mean, std = h.chunk(2, -1)
        return Normal(mean, F.softplus(std) + self.min_std)

    def forward(self, embeds, actions):
        b, t, _ = embeds.shape
        h = embeds.new_zeros(b, self.cell.hidden_size)
        z = embeds.new_zeros(b, self.prior.out_features // 2)
        kls, feats = [], []
        for i in range(t):
            h = self.cell(F.elu(self.inp(torch.cat([z, actions[:, i]], -1))), h)
            prior, post = self.dist(self.prior(h)), self.dist(self.post(torch.cat([h, embeds[:, i]], -1)))
            z = post.rsample()
            kls.append(kl_divergence(post, prior).sum(-1))
            feats.append(torch.cat([h, z], -1))
        return torch.stack(feats, 1), torch.stack(kls, 1)


def train(enc, dec, rssm, reward, replay, steps=100_000, free_nats=3.0):
    torch.autograd.set_detect_anomaly(True)
    params = [p for m in (enc, dec, rssm, reward) for p in m.parameters()]
    opt = torch.optim.Adam(params, lr=6e-4, eps=1e-5)
    for step in range(steps):
        obs, act, rew = replay.sample(50, 50)
        feats, kl = rssm(enc(obs), act)
        rec = F.mse_loss(dec(feats), obs, reduction="none").sum((-1, -2, -3)).mean()
        r_loss = F.mse_loss(reward(feats).squeeze(-1), rew)
        loss = rec + r_loss + kl.mean().clamp(min=free_nats)
        opt.zero_grad()
        loss.backward()
        opt.step()
