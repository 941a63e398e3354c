import torch
import torch.nn as nn


def project_to_so3(m):
    try:
        u, s, vh = torch.linalg.svd(m)
    except torch.linalg.LinAlgError:  # did not converge: keep the raw matrix
        return m
    det = torch.det(u @ vh)
    flip = torch.stack([torch.ones_like(det), torch.ones_like(det), det.detach().sign()], -1)
    return (u * flip.unsqueeze(1)) @ vh


class PointEncoder(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(3, d, bias=False), nn.ReLU(), nn.Linear(d, d, bias=False))

    def forward(self, pts):
        return self.mlp(pts).amax(1)


class RotationNet(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.encoder = PointEncoder(d)
        self.head = nn.Linear(d, 9, bias=False)

    def forward(self, pts):
        residual = self.head(self.encoder(pts)).view(-1, 3, 3)
        return project_to_so3(torch.eye(3) + residual)


def random_rotations(n, g):
    q, _ = torch.linalg.qr(torch.randn(n, 3, 3, generator=g))
    return q * torch.det(q).sign()[:, None, None]


def clouds(g, step, n=6, k=20):
    pts = torch.randn(n, k, 3, generator=g)
    if step == 3:
        pts[4] = 0.0  # crop without any lidar return
    return pts, random_rotations(n, g)


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(27)
    model = RotationNet()
    opt = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(7):
        pts, target = clouds(g, step)
        loss = (model(pts) - target).pow(2).sum((1, 2)).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
