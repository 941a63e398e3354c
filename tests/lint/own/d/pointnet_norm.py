import torch
from torch import nn
import torch.nn.functional as F


def unit_sphere(pts: torch.Tensor) -> torch.Tensor:
    """pts: (B, N, 3)"""
    pts = pts - pts.mean(dim=1, keepdim=True)
    radius = pts.norm(dim=-1).amax(dim=1)
    return pts / radius[:, None, None]


def jitter(pts, sigma=0.01, clip=0.05):
    return pts + (torch.randn_like(pts) * sigma).clamp(-clip, clip)


class PointNet(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 1024, 1))
        self.head = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, classes))

    def forward(self, pts):
        h = self.mlp(unit_sphere(pts).transpose(1, 2))
        return self.head(h.amax(-1))


def fit(net, loader, epochs=200):
    opt = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-4)
    sched = torch.optim.lr_scheduler.StepLR(opt, 20, 0.5)
    torch.autograd.set_detect_anomaly(True)
    for ep in range(epochs):
        for pts, y in loader:
            loss = F.cross_entropy(net(jitter(pts.cuda())), y.cuda(), label_smoothing=0.2)
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        print(ep, loss.item())
