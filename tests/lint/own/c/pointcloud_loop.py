import torch
import torch.nn as nn
import torch.nn.functional as F


class PointNet(nn.Module):
    def __init__(self, k=40):
        super().__init__()
        self.mlp = nn.Sequential(nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 1024, 1), nn.BatchNorm1d(1024), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(1024, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, k))

    def forward(self, pts):
        return self.head(self.mlp(pts).amax(-1))


def unit_sphere(pts):
    pts = pts - pts.mean(-1, keepdim=True)
    r = pts.norm(dim=1).amax(-1)
    return pts / r[:, None, None]


def fit(net, loader, optimizer, writer, epochs=200):
    it = 0
    for _ in range(epochs):
        for pts, cls in loader:
            loss = F.cross_entropy(net(unit_sphere(pts.cuda())), cls.cuda())
            optimizer.zero_grad()
            loss.backward()
            for name, w in net.named_parameters():
                if w.grad is None:
                    continue
                bad = ~torch.isfinite(w.grad)
                if bad.any():
                    print("bad grad in", name)
                    w.grad[bad] = 0.0
            optimizer.step()
            writer.add_scalar("loss", loss.item(), it)
            it += 1
