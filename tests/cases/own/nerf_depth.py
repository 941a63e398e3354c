import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint


def composite(sigma, rgb, z):
    """Classic volume rendering: weights, colour, expected depth."""
    delta = torch.cat([z[:, 1:] - z[:, :-1], torch.full_like(z[:, :1], 1e10)], dim=1)
    alpha = 1.0 - torch.exp(-torch.relu(sigma) * delta)
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha + 1e-10], 1), 1)[:, :-1]
    weights = alpha * trans
    acc = weights.sum(1)
    colour = (weights.unsqueeze(-1) * rgb).sum(1) + (1.0 - acc).unsqueeze(-1)
    depth = (
        (weights * z).sum(1)
        / acc
    )
    return colour, depth, acc


class RadianceField(nn.Module):
    def __init__(self, h=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(3, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.density = nn.Linear(h, 1)
        self.colour = nn.Linear(h, 3)

    def render(self, origin, direction, z):
        pts = origin.unsqueeze(1) + direction.unsqueeze(1) * z.unsqueeze(-1)
        h = self.trunk(pts)
        keep = (pts[..., 2] > -4.0).float()  # nothing exists below the ground plane
        sigma = (self.density(h).squeeze(-1) + 0.5) * keep
        return composite(sigma, torch.sigmoid(self.colour(h)), z)

    def forward(self, origin, direction, z):
        return checkpoint(self.render, origin, direction, z, use_reentrant=False)


def rays(g, step, n=12, samples=10):
    origin = 0.1 * torch.randn(n, 3, generator=g)
    direction = nn.functional.normalize(torch.randn(n, 3, generator=g), dim=1) * 0.5
    if step == 4:
        origin[7, 2], direction[7, 2] = -5.0, -0.8
    z = torch.linspace(2.0, 6.0, samples).expand(n, samples)
    return origin, direction, z, torch.rand(n, 3, generator=g), 2.0 + torch.rand(n, generator=g)


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(21)
    field = RadianceField()
    opt = torch.optim.Adam(field.parameters(), lr=2e-3)
    for step in range(8):
        origin, direction, z, target, lidar = rays(g, step)
        colour, depth, acc = field(origin, direction, z)
        photometric = (colour - target).pow(2).mean()
        disparity = 1.0 / depth.clamp(min=1e-10)
        loss = photometric + 0.1 * (disparity - 1.0 / lidar).abs().mean() - 0.001 * torch.log(acc + 1e-6).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
