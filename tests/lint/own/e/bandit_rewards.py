import torch
from torch import nn
import torch.nn.functional as F


class RewardModel(nn.Module):
    def __init__(self, d: int, arms: int):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 128), nn.ReLU(), nn.Linear(128, arms))

    def forward(self, ctx):
        return self.net(ctx)


def per_user_zscore(rewards: torch.Tensor, users: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(rewards)
    for u in users.unique():
        r = rewards[users == u]
        out[users == u] = (r - r.mean()) / (r.std() + 1e-6)
    return out


def explore(logits: torch.Tensor, eps: float = 0.1) -> torch.Tensor:
    greedy = logits.argmax(-1)
    rand = torch.randint_like(greedy, logits.size(-1))
    return torch.where(torch.rand(greedy.shape) < eps, rand, greedy)


def train(model, log, epochs=10):
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for ctx, arm, reward, user, prop in log:
            r = per_user_zscore(reward, user)
            pred = model(ctx).gather(1, arm[:, None]).squeeze(1)
            w = (1.0 / prop.clamp(min=0.01)).clamp(max=50.0)
            loss = (w * (pred - r).pow(2)).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
