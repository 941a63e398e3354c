import torch
import torch.nn.functional as F
import torchvision
from torch import nn


class SimCLR(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.backbone = torchvision.models.resnet18(weights=None)
        d = self.backbone.fc.in_features
        self.backbone.fc = nn.Identity()
        self.head = nn.Sequential(nn.Linear(d, d), nn.ReLU(inplace=True), nn.Linear(d, dim))

    def forward(self, x):
        return F.normalize(self.head(self.backbone(x)), dim=1)


def nt_xent(z1, z2, tau=0.5):
    n = z1.size(0)
    z = torch.cat([z1, z2])
    sim = z @ z.t() / tau
    # a sample is not its own positive
    sim.fill_diagonal_(float("-inf"))
    target = torch.arange(2 * n, device=z.device).roll(n)
    return F.cross_entropy(sim, target)


@torch.no_grad()
def knn_accuracy(feats, labels, k=20):
    s = feats @ feats.t()
    s.fill_diagonal_(-1.0)
    vote = labels[s.topk(k, dim=1).indices].mode(1).values
    return (vote == labels).float().mean().item()


def train(model, loader, epochs=200, lr=0.3):
    opt = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=1e-6)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs)
    for epoch in range(epochs):
        for (a, b), _ in loader:
            loss = nt_xent(model(a.cuda()), model(b.cuda()))
            opt.zero_grad()
            loss.backward()
            opt.step()
        sched.step()
        print(f"epoch {epoch}: {loss.item():.4f}")
