import argparse
import torch
from torch import nn
import torch.nn.functional as F


class LoadForecaster(nn.Module):
    def __init__(self, n_feat: int, hidden: int = 128, horizon: int = 24):
        super().__init__()
        self.lstm = nn.LSTM(n_feat, hidden, num_layers=2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(hidden, horizon)

    def forward(self, x):
        h, _ = self.lstm(x)
        return self.out(h[:, -1])


def pinball(pred, y, q=0.5):
    e = y - pred
    return torch.max(q * e, (q - 1) * e).mean()


def scale(x: torch.Tensor):
    mean, std = x.mean(0), x.std(0)
    return (x - mean) / std.clamp(min=1e-6), mean, std


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--clip", type=float, default=0.5)
    args = ap.parse_args()
    blob = torch.load("load.pt", weights_only=True)
    x, _, _ = scale(blob["x"])
    windows = x.unfold(0, 168, 24).transpose(1, 2)
    y = blob["y"].unfold(0, 24, 24)[7:7 + len(windows)]
    net = LoadForecaster(x.size(1))
    opt = torch.optim.Adam(net.parameters(), lr=args.lr)
    for epoch in range(60):
        for i in torch.randperm(len(windows)).split(64):
            loss = pinball(net(windows[i]), y[i])
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(net.parameters(), args.clip)
            opt.step()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
