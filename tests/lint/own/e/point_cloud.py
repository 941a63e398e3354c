import torch
from torch import nn, Tensor


def unit_sphere(p: Tensor) -> Tensor:
    p = p - p.mean(1, keepdim=True)
    radius = p.norm(dim=-1).amax(1, keepdim=True).unsqueeze(-1)
    return p / radius.clamp(min=1e-6)


def repulsion(p: Tensor, h: float = 0.03) -> Tensor:
    d2 = (p.unsqueeze(2) - p.unsqueeze(1)).square().sum(-1)
    near = d2.topk(6, dim=-1, largest=False).values[..., 1:]
    return (torch.exp(-near / h ** 2) * (h - torch.sqrt(near + 1e-12))).mean()


class PointNet(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Conv1d(3, 64, 1), nn.BatchNorm1d(64), nn.ReLU(), nn.Conv1d(64, 256, 1))
        self.head = nn.Linear(256, classes)

    def forward(self, p: Tensor) -> Tensor:
        return self.head(self.mlp(unit_sphere(p).transpose(1, 2)).amax(-1))


def train(net, loader, epochs=200):
    opt = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs)
    for _ in range(epochs):
        for p, y in loader:
            loss = nn.functional.cross_entropy(net(p), y, label_smoothing=0.2)
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
