import torch
from torch import nn


class DeepFM(nn.Module):
    def __init__(self, fields: list[int], d: int = 16):
        super().__init__()
        n = sum(fields)
        self.register_buffer("offsets", torch.tensor([0, *fields[:-1]]).cumsum(0))
        self.lin, self.emb = nn.Embedding(n, 1), nn.Embedding(n, d)
        self.mlp = nn.Sequential(nn.Linear(len(fields) * d, 400), nn.ReLU(), nn.Dropout(0.2), nn.Linear(400, 1))
        nn.init.xavier_uniform_(self.emb.weight)

    def forward(self, x):
        x = x + self.offsets
        e = self.emb(x)
        fm = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1, keepdim=True)
        return (self.lin(x).sum(1) + fm + self.mlp(e.flatten(1))).squeeze(1)


def calibrate(logit: torch.Tensor, rate: float) -> torch.Tensor:
    """Undo negative down-sampling."""
    p = logit.sigmoid()
    return p / (p + (1 - p) / rate)


def normalized_entropy(logloss: float, ctr: float) -> float:
    from math import log
    ctr = min(max(ctr, 1e-6), 1 - 1e-6)
    return logloss / -(ctr * log(ctr) + (1 - ctr) * log(1 - ctr))


def train(model, loader, device, epochs=1):
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    crit = nn.BCEWithLogitsLoss()
    for _ in range(epochs):
        for i, (x, y) in enumerate(loader):
            loss = crit(model(x.to(device)), y.float().to(device))
            model.zero_grad()
            loss.backward()
            opt.step()
            if i % 1000 == 0:
                print(i, loss.item())
