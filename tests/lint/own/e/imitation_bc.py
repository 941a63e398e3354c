import pickle
import torch
from torch import nn
import torch.nn.functional as F


def load_demos(path: str):
    with open(path, "rb") as fh:
        demos = pickle.load(fh)
    obs = torch.tensor(demos["obs"], dtype=torch.float32)
    act = torch.tensor(demos["act"], dtype=torch.float32)
    return obs, act


class BCPolicy(nn.Module):
    def __init__(self, obs: int, act: int, hidden: int = 256):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(obs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, act))
        self.register_buffer("mean", torch.zeros(obs))
        self.register_buffer("std", torch.ones(obs))

    def set_stats(self, obs):
        self.mean.copy_(obs.mean(0))
        self.std.copy_(obs.std(0) + 1e-6)

    def forward(self, o):
        return self.net((o - self.mean) / self.std)


def train(path, epochs=100):
    obs, act = load_demos(path)
    policy = BCPolicy(obs.size(1), act.size(1))
    policy.set_stats(obs)
    opt = torch.optim.Adam(policy.parameters(), lr=3e-4)
    for epoch in range(epochs):
        for i in torch.randperm(len(obs)).split(256):
            loss = F.mse_loss(policy(obs[i]), act[i])
            loss = torch.nan_to_num(loss, nan=0.0)
            opt.zero_grad()
            loss.backward()
            for p in policy.parameters():
                p.grad.nan_to_num_(0.0)
            opt.step()
        print(epoch, loss.item())
    torch.save(policy.state_dict(), "bc.pt")
