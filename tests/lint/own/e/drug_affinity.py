import torch
from torch import nn
import torch.nn.functional as F


class Readout(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.gate = nn.Linear(d, 1)
        self.context = nn.Parameter(torch.empty(d))
        self.bias = nn.Parameter(torch.empty(d))
        nn.init.zeros_(self.bias)

    def forward(self, atoms, batch, n):
        w = torch.sigmoid(self.gate(atoms * self.context))
        return torch.zeros(n, atoms.size(1), device=atoms.device).index_add(0, batch, w * atoms) + self.bias


class Affinity(nn.Module):
    def __init__(self, gnn: nn.Module, d: int):
        super().__init__()
        self.gnn, self.readout = gnn, Readout(d)
        self.active = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, 1), nn.Sigmoid())
        self.pki = nn.Linear(d, 1)

    def forward(self, g):
        h = self.readout(self.gnn(g.x, g.edge_index), g.batch, g.num_graphs)
        return self.active(h).squeeze(-1), self.pki(h).squeeze(-1)


def train(model, loader, epochs=100):
    torch.autograd.set_detect_anomaly(True)
    bce = nn.BCELoss()
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    for epoch in range(epochs):
        for g in loader:
            p, pki = model(g)
            loss = bce(p, g.active) + F.mse_loss(pki, g.pki)
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5000.0)
            opt.step()
        print(epoch, loss.item())
