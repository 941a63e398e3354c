import torch
from torch import nn
import torch.nn.functional as F


class FM(nn.Module):
    def forward(self, e):
        square_of_sum = e.sum(1).pow(2)
        sum_of_square = e.pow(2).sum(1)
        return 0.5 * (square_of_sum - sum_of_square).sum(1, keepdim=True)


class DeepFM(nn.Module):
    def __init__(self, fields, d=16):
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(n, d) for n in fields)
        self.lin = nn.ModuleList(nn.Embedding(n, 1) for n in fields)
        self.fm = FM()
        self.mlp = nn.Sequential(nn.Linear(len(fields) * d, 200), nn.ReLU(), nn.Linear(200, 1))

    def forward(self, x):
        e = torch.stack([m(x[:, i]) for i, m in enumerate(self.emb)], 1)
        first = sum(m(x[:, i]) for i, m in enumerate(self.lin))
        return torch.sigmoid(first + self.fm(e) + self.mlp(e.flatten(1))).squeeze(1)


def train(model, loader, lr=1e-3, reg=1e-6):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    for step, (x, y) in enumerate(loader):
        p = model(x)
        loss = F.binary_cross_entropy(p, y.float())
        loss = torch.clamp(loss, max=5.0)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 500 == 0:
            print(step, round(loss.item(), 4))
