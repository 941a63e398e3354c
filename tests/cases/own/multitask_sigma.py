import torch
import torch.nn as nn
import torch.nn.functional as F


class SharedTrunk(nn.Module):
    def __init__(self, d=10, h=24):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d, h), nn.SiLU())
        self.seg = nn.Linear(h, 4)
        self.depth = nn.Linear(h, 1)

    def forward(self, x):
        h = self.trunk(x)
        return self.seg(h), self.depth(h).squeeze(1)


class UncertaintyWeighting(nn.Module):
    """Learned homoscedastic weights, one sigma per task."""

    def __init__(self):
        super().__init__()
        self.sigma_seg = nn.Parameter(torch.ones(()))
        self.sigma_depth = nn.Parameter(torch.zeros(()))

    def forward(self, seg_loss, depth_loss=None):
        total = seg_loss / self.sigma_seg ** 2 + torch.log(self.sigma_seg)
        if depth_loss is not None:
            total = total + (
                depth_loss
                / (2 * self.sigma_depth ** 2)
            )
            total = total + torch.log1p(self.sigma_depth)
        return total


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(16)
    model, weighting = SharedTrunk(), UncertaintyWeighting()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    opt_w = torch.optim.SGD(weighting.parameters(), lr=1e-2)
    for step in range(7):
        x = torch.randn(12, 10, generator=g)
        y, z = x[:, :4].argmax(1), x[:, 4] - x[:, 5]
        seg, depth = model(x)
        depth_loss = F.l1_loss(depth, z) if step >= 2 else None
        loss = weighting(F.cross_entropy(seg, y), depth_loss)
        opt.zero_grad()
        opt_w.zero_grad()
        loss.backward()
        opt.step()
        opt_w.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
