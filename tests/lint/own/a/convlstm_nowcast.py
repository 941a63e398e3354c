import torch
import torch.nn as nn


class Nowcaster(nn.Module):
    def __init__(self, c=16, hidden=512, rnn_type="LSTM"):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, c, 5, 2, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(8))
        self.rnn = getattr(nn, rnn_type)(c * 64, hidden)
        self.dec = nn.Sequential(nn.Linear(hidden, c * 64), nn.ReLU(), nn.Linear(c * 64, 64 * 64))

    def forward(self, frames):  # T, B, 1, H, W
        T, B = frames.shape[:2]
        h, _ = self.rnn(self.enc(frames.flatten(0, 1)).flatten(1).view(T, B, -1))
        return self.dec(h[-1]).view(B, 1, 64, 64)


def rain_weight(mm):
    return torch.bucketize(mm, torch.tensor([0.5, 2.0, 5.0, 10.0, 30.0])).float() + 1.0


def rmse(pred, target):
    return torch.sqrt(((pred - target) ** 2).mean())


def weighted_mae(pred, target):
    w = rain_weight(target)
    return (w * (pred - target).abs()).sum() / w.sum()


def train(net, loader, steps, lr=1e-3):
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    it = iter(loader)
    with torch.autograd.set_detect_anomaly(True):
        for step in range(steps):
            x, y = next(it)
            pred = net(x)
            loss = rmse(pred, y) + 0.5 * weighted_mae(pred, y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if step % 100 == 0:
                print(f"{step:6d} {loss.item():.5f}")


@torch.no_grad()
def evaluate(net, loader):
    total, n = 0.0, 0
    for x, y in loader:
        total += (net(x) - y).pow(2).mean().sqrt().item() * len(x)
        n += len(x)
    return total / max(n, 1)
