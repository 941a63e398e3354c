import numpy as np
import torch
from torch import nn
import torch.nn.functional as F


class DCN(nn.Module):
    def __init__(self, d: int, layers: int = 3):
        super().__init__()
        self.cross = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))
        self.gate = nn.Parameter(torch.zeros(layers))
        self.out = nn.Sequential(nn.Linear(d, 1), nn.Sigmoid())

    def forward(self, x0):
        x = x0
        for g, layer in zip(self.gate, self.cross):
            x = x0 * layer(x) * (1 + g) + x
        return self.out(x).squeeze(-1)


def fit(model, batches, lr=1e-3):
    opt = torch.optim.Adagrad(model.parameters(), lr=lr)
    losses = []
    for dense, y in batches:
        pred = model(torch.log1p(dense.clamp(min=0)))
        loss = F.binary_cross_entropy(pred, y.float())
        if np.isnan(loss.item()):
            raise FloatingPointError("loss is nan")
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return np.mean(losses)
