import torch
import torch.nn as nn
import torch.nn.functional as F

torch.use_deterministic_algorithms(True)


class PillarMax(nn.Module):
    """Max over the points of every pillar; empty pillars become zero."""

    def __init__(self, d_in, d, pillars):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(d_in, d), nn.LayerNorm(d), nn.ReLU())
        self.pillars = pillars

    def forward(self, points, index):
        h = self.point(points)
        out = h.new_full((self.pillars, h.shape[1]), float("-inf"))
        rows = [h[index == p].amax(0) if (index == p).any() else out[p] for p in range(self.pillars)]
        pooled = torch.stack(rows)
        return torch.where(torch.isinf(pooled), torch.zeros_like(pooled), pooled)


class PillarNet(nn.Module):
    def __init__(self, d=12, pillars=9, classes=3):
        super().__init__()
        self.pool = PillarMax(4, d, pillars)
        self.head = nn.Linear(d, classes)

    def forward(self, points, index):
        return self.head(self.pool(points, index))


def sweep(g, n=40, pillars=9):
    points = torch.empty(n, 4)
    points[:, :3] = torch.randn(n, 3, generator=g)
    points[:, 3] = torch.rand(n, generator=g)
    index = torch.randint(0, pillars - 2, (n,), generator=g)
    labels = torch.randint(0, 3, (pillars,), generator=g)
    return points, index, labels


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(30)
    model = PillarNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(8):
        points, index, labels = sweep(g)
        loss = F.cross_entropy(model(points, index), labels)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
