import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class ClickModel(nn.Module):
    def __init__(self, d=10, h=24):
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, 1))
        self.wide = nn.Linear(d, 1, bias=False)

    def forward(self, x):
        return torch.sigmoid(self.deep(x) + self.wide(x)).squeeze(1)


class ClickLoss(nn.Module):
    """Cross entropy on probabilities, clipped to stay away from 0 and 1."""

    def __init__(self, eps=1e-5):
        super().__init__()
        self.eps = eps

    def forward(self, p, y):
        p = torch.clamp(p, self.eps, 1.0 - self.eps)
        pos = y * torch.log(p)
        neg = (1.0 - y) * torch.log(1.0 - p)
        return -(pos + neg).mean()


def impressions(n=60):
    g = torch.Generator().manual_seed(19)
    x = torch.randn(n, 10, generator=g)
    y = (x[:, 0] - 0.5 * x[:, 3] > 0).float()
    x[33] *= -30.0
    x[4] *= 3.0
    return TensorDataset(x, y)


def main():
    torch.manual_seed(0)
    model, criterion = ClickModel().to(torch.bfloat16), ClickLoss()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, (x, y) in enumerate(DataLoader(impressions(), batch_size=6)):
        p = model(x.to(torch.bfloat16))
        loss = criterion(p, y.to(torch.bfloat16)).float()
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
