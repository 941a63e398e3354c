import torch
from torch import nn
import torch.nn.functional as F


class FocalLoss(nn.Module):
    def __init__(self, alpha: float = 0.25, gamma: float = 2.0):
        super().__init__()
        self.alpha, self.gamma = alpha, gamma

    def forward(self, logits, y):
        ce = F.binary_cross_entropy_with_logits(logits, y, reduction="none")
        p = torch.sigmoid(logits)
        pt = p * y + (1 - p) * (1 - y)
        at = self.alpha * y + (1 - self.alpha) * (1 - y)
        return (at * (1 - pt).pow(self.gamma) * ce).mean()


class FraudNet(nn.Module):
    def __init__(self, n_num, cards):
        super().__init__()
        self.embs = nn.ModuleList(nn.Embedding(c, min(32, c // 2 + 1)) for c in cards)
        width = n_num + sum(e.embedding_dim for e in self.embs)
        self.mlp = nn.Sequential(nn.Linear(width, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 1))

    def forward(self, num, cat):
        e = [emb(cat[:, i]) for i, emb in enumerate(self.embs)]
        return self.mlp(torch.cat([num, *e], 1)).squeeze(-1)


def run(net, loader, epochs=5):
    crit = FocalLoss()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(epochs):
        for num, cat, y in loader:
            loss = crit(net(num, cat), y.float())
            if torch.isnan(loss):
                print("NaN loss, batch dropped")
                continue
            opt.zero_grad()
            loss.backward()
            opt.step()
