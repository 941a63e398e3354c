import torch
import torch.nn as nn
import torch.nn.functional as F


def squash(s):
    sq = (s * s).sum(dim=-1, keepdim=True)
    return sq / (1 + sq) * s / torch.sqrt(sq + 1e-4)


class RoutingLayer(nn.Module):
    """Votes of all primary capsules are summed per class."""

    def __init__(self, d=12, classes=4, d_out=8):
        super().__init__()
        self.vote = nn.Linear(d, classes * d_out)
        self.classes = classes

    def forward(self, u):
        votes = self.vote(u).unflatten(-1, (self.classes, -1))
        return squash(votes.sum(dim=1))


class CapsNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.primary = nn.Sequential(nn.Linear(6, 12), nn.ReLU())
        self.routing = nn.Sequential(RoutingLayer())

    def forward(self, pts):
        return self.routing(self.primary(pts))


def margin_loss(caps, y):
    length = caps.float().norm(dim=-1)
    hit = F.one_hot(y, length.shape[1]).float()
    per_class = hit * F.relu(0.9 - length) ** 2 + 0.5 * (1 - hit) * F.relu(length - 0.1) ** 2
    return per_class.sum(1).mean()


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(7)
    model = CapsNet().half()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = [16, 24, 16, 32, 20, 420, 16, 24]  # points per scan in each batch
    for step, n in enumerate(sizes):
        pts = torch.randn(4, n, 6, generator=g).half()
        y = torch.randint(0, 4, (4,), generator=g)
        loss = margin_loss(model(pts), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
