import math

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class GaussianMixture(nn.Module):
    """Density of y under the predicted mixture."""

    def forward(self, pi, mu, sigma, y):
        z = (y.unsqueeze(1) - mu) / sigma
        density = torch.exp(-0.5 * z ** 2) / (sigma * math.sqrt(2 * math.pi))
        return torch.log(
            (pi * density).sum(dim=1)
        )


class MDN(nn.Module):
    def __init__(self, d=6, h=24, k=3):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d, h), nn.Tanh())
        self.pi, self.mu, self.log_sigma = nn.Linear(h, k), nn.Linear(h, k), nn.Linear(h, k)
        self.density = GaussianMixture()

    def parameters_of(self, x):
        h = self.trunk(x)
        pi = torch.softmax(self.pi(h), dim=1)
        entropy = -(pi * torch.log(pi)).sum(1)
        return pi, self.mu(h), torch.exp(self.log_sigma(h)), entropy

    def training_step(self, x, y):
        pi, mu, sigma, entropy = self.parameters_of(x)
        nll = -self.density(pi, mu, sigma, y).mean()
        return nll - 0.01 * entropy.mean() + 1e-3 * (1.0 / sigma).mean()


def wells(n=56):
    g = torch.Generator().manual_seed(20)
    x = torch.randn(n, 6, generator=g)
    y = x[:, 0] * torch.sign(x[:, 1]) + 0.1 * torch.randn(n, generator=g)
    y[15] = 8.0    # far, still representable
    y[45] = -38.0
    return TensorDataset(x, y)


def main():
    torch.manual_seed(0)
    model = MDN()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step, (x, y) in enumerate(DataLoader(wells(), batch_size=8)):
        loss = model.training_step(x, y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
