import torch
import torch.nn as nn
import torch.nn.functional as F


def sqrt_positive_part(x):
    return torch.sqrt(torch.clamp(x, min=0.0))


def matrix_to_quaternion(m):
    m00, m11, m22 = m[:, 0, 0], m[:, 1, 1], m[:, 2, 2]
    mag = lambda a, b, c: 0.5 * sqrt_positive_part(1.0 + a * m00 + b * m11 + c * m22)
    w, x, y, z = mag(1, 1, 1), mag(1, -1, -1), mag(-1, 1, -1), mag(-1, -1, 1)
    x = torch.where(m[:, 2, 1] < m[:, 1, 2], -x, x)
    y = torch.where(m[:, 0, 2] < m[:, 2, 0], -y, y)
    z = torch.where(m[:, 1, 0] < m[:, 0, 1], -z, z)
    return torch.stack([w, x, y, z], 1)


class Rot6D(nn.Module):
    def forward(self, v):
        a = F.normalize(v[:, :3], dim=1)
        b = F.normalize(v[:, 3:] - (a * v[:, 3:]).sum(1, keepdim=True) * a, dim=1)
        return torch.stack([a, b, torch.cross(a, b, dim=1)], 2)


class QuatHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.rot = Rot6D()

    def forward(self, v):
        return matrix_to_quaternion(self.rot(v))


class Tracker(nn.Module):
    """Predicts the rotation between two frames as a residual on the identity."""

    def __init__(self, d=9, h=24):
        super().__init__()
        self.flow = nn.Sequential(nn.Linear(d, h, bias=False), nn.Tanh(), nn.Linear(h, 6, bias=False))
        self.head = QuatHead()
        self.register_buffer("identity", torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]))

    def forward(self, before, after):
        return self.head(self.identity + self.flow(after - before))


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(9)
    model = Tracker()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for step in range(9):
        before = torch.randn(7, 9, generator=g)
        after = before + 0.4 * torch.randn(7, 9, generator=g)
        q = F.normalize(torch.cat([torch.ones(7, 1), 0.3 * torch.randn(7, 3, generator=g)], 1), dim=1)
        if step == 5:
            after[2] = before[2]  # frozen video frame
        loss = 1.0 - (model(before, after) * q).sum(1).abs().mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
