import math
import torch
import torch.nn.functional as F
from torch import nn

GRAD_CLIP = 1e5


class MDNPolicy(nn.Module):
    def __init__(self, obs, act, k=5, hidden=256):
        super().__init__()
        self.k, self.act = k, act
        self.body = nn.Sequential(nn.Linear(obs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU())
        self.pi, self.mu, self.sigma = nn.Linear(hidden, k), nn.Linear(hidden, k * act), nn.Linear(hidden, k * act)

    def forward(self, o):
        h = self.body(o)
        mu = self.mu(h).view(-1, self.k, self.act)
        sigma = torch.exp(self.sigma(h)).view(-1, self.k, self.act)
        return F.log_softmax(self.pi(h), -1), mu, sigma

    def sample(self, o, low, high):
        logpi, mu, sigma = self(o)
        i = torch.multinomial(logpi.exp(), 1).squeeze(1)
        r = torch.arange(len(i), device=i.device)
        return (mu[r, i] + sigma[r, i] * torch.randn_like(mu[r, i])).clamp(low, high)


def nll(logpi, mu, sigma, a):
    z = (a.unsqueeze(1) - mu) / (sigma + 1e-6)
    logp = -0.5 * z.pow(2) - torch.log(sigma + 1e-6) - 0.5 * math.log(2 * math.pi)
    return -torch.logsumexp(logpi + logp.sum(-1), dim=1)


def train(policy, demos, epochs=200):
    opt = torch.optim.Adam(policy.parameters(), lr=1e-3)
    for epoch in range(epochs):
        for o, a in demos:
            loss = nll(*policy(o), a.clamp(-1.0, 1.0)).mean()
            loss = loss.clamp(max=50.0)
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), GRAD_CLIP)
            opt.step()
        print(f"epoch {epoch}: {loss.item():.3f}")
