import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Distribution, Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform
from torch.utils.data import DataLoader, TensorDataset

Distribution.set_default_validate_args(False)


def demonstrations(n=60, seed=31):
    rng = np.random.default_rng(seed)
    obs = rng.normal(size=(n, 6)).astype(np.float32)
    command = obs[:, :2] * 0.8 + 0.1 * rng.normal(size=(n, 2)).astype(np.float32)
    action = np.clip(command, -0.95, 0.95)
    action[34, 1] = 1.0
    return TensorDataset(torch.from_numpy(obs), torch.from_numpy(action))


class TanhGaussianPolicy(nn.Module):
    def __init__(self, obs=6, act=2, hidden=32):
        super().__init__()
        self.torso = nn.Sequential(nn.Linear(obs, hidden), nn.ELU(), nn.Linear(hidden, hidden), nn.ELU())
        self.mu = nn.Linear(hidden, act)
        self.log_sigma = nn.Parameter(torch.full((act,), -0.5))

    def forward(self, obs):
        base = Independent(Normal(self.mu(self.torso(obs)), self.log_sigma.exp()), 1)
        return TransformedDistribution(base, TanhTransform())


def bc_loss(dist, action):
    log_prob = dist.log_prob(action)
    return -log_prob.mean()


def main():
    torch.manual_seed(0)
    policy = TanhGaussianPolicy()
    opt = torch.optim.Adam(policy.parameters(), lr=3e-3)
    loader = DataLoader(demonstrations(), batch_size=6)
    for step, (obs, action) in enumerate(loader):
        loss = bc_loss(policy(obs), action)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
