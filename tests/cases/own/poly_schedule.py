import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class SegNet(nn.Module):
    def __init__(self, c=8, classes=3):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(2, c, 3, padding=1), nn.BatchNorm2d(c), nn.ReLU())
        self.dec = nn.Conv2d(c, classes, 1)

    def forward(self, x):
        return self.dec(self.enc(x))


class PolyLR:
    """lr = base * (1 - it / total) ** power"""

    def __init__(self, opt, total, power=0.9):
        self.opt, self.total, self.power = opt, total, power
        self.base = [np.float64(group["lr"]) for group in opt.param_groups]
        self.it = 0

    def step(self):
        self.it += 1
        with np.errstate(invalid="ignore"):
            factor = np.power(1.0 - self.it / self.total, self.power)
        for group, base in zip(self.opt.param_groups, self.base):
            group["lr"] = float(base * factor)


def tiles(n=60):
    g = torch.Generator().manual_seed(13)
    x = torch.randn(n, 2, 8, 8, generator=g)
    return TensorDataset(x, (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long())


def main():
    torch.manual_seed(0)
    model = SegNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sched = PolyLR(opt, total=6)
    for step, (x, y) in enumerate(DataLoader(tiles(), batch_size=6)):
        loss = F.cross_entropy(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
