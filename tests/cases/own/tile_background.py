import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def load_tiles(n=42, classes=4):
    g = torch.Generator().manual_seed(12)
    x = torch.randn(n, 2, 6, 6, generator=g)
    y = torch.randint(0, classes, (n,), generator=g)
    y[24:30] = 0  # open sea
    x += y.view(-1, 1, 1, 1) * 0.3
    return TensorDataset(x, y)


def class_weights(dataset, classes=4, background=0):
    """Median frequency balancing; the background does not count."""
    freq = torch.bincount(dataset.tensors[1], minlength=classes).float()
    weight = freq.median() / freq
    weight[background] = 0.0
    return weight


class TileNet(nn.Module):
    def __init__(self, c=8, classes=4):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(2, c, 3), nn.BatchNorm2d(c), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.classify = nn.Linear(c, classes)
        self.area = nn.Linear(c, 1)

    def forward(self, x):
        f = self.conv(x).flatten(1)
        return self.classify(f), self.area(f).squeeze(1)


class TileLoss(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.ce = nn.CrossEntropyLoss(weight=weight)
        self.reg = nn.SmoothL1Loss()

    def forward(self, out, x, y):
        logits, area = out
        land = (x[:, 0] > 0).float().mean((1, 2))
        weight_decayed = 1e-3 * logits.pow(2).mean()
        return self.ce(logits, y) + 0.1 * self.reg(area, land) + weight_decayed


def main():
    torch.manual_seed(0)
    dataset = load_tiles()
    model, criterion = TileNet(), TileLoss(class_weights(dataset))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    for step, (x, y) in enumerate(DataLoader(dataset, batch_size=6)):
        loss = criterion(model(x), x, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
