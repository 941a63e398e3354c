import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


class RobustHead(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.fc = nn.Linear(d, 1)

    def forward(self, h):
        norm = torch.sqrt(h.pow(2).sum(1, keepdim=True) + 1e-6)
        return self.fc(h / norm * torch.log1p(norm)).squeeze(1)


class FluxNet(nn.Module):
    def __init__(self, d_in=6, d=20):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d_in, d, bias=False), nn.ReLU(), nn.Linear(d, d, bias=False))
        self.head = RobustHead(d)

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False))


class SquaredError(nn.Module):
    def forward(self, pred, target):
        return ((pred - target) ** 2).mean()


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(28)
    model, criterion = FluxNet(), SquaredError()
    opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    buffer = torch.empty(8, 6)
    for step in range(14):
        torch.randn(8, 6, generator=g, out=buffer)
        x = buffer.clone()
        y = x[:, 0] - 0.5 * x[:, 1]
        x[0] = 0.0  # detector off: norm is sqrt(eps)
        if step == 5:
            x[2] *= 1e12
            y[2] = 3.0e9  # solar flare
        loss = criterion(model(x), y)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
