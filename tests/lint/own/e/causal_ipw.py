import torch
from torch import nn
import torch.nn.functional as F


class DragonNet(nn.Module):
    def __init__(self, d: int, width: int = 200):
        super().__init__()
        self.rep = nn.Sequential(nn.Linear(d, width), nn.ELU(), nn.Linear(width, width), nn.ELU())
        self.y0, self.y1, self.t = nn.Linear(width, 1), nn.Linear(width, 1), nn.Linear(width, 1)
        self.eps = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        h = self.rep(x)
        return self.y0(h).squeeze(-1), self.y1(h).squeeze(-1), self.t(h).squeeze(-1)


def targeted_loss(model, x, t, y, beta: float = 1.0):
    y0, y1, t_logit = model(x)
    g = torch.sigmoid(t_logit).clamp(0.01, 0.99)
    yt = torch.where(t.bool(), y1, y0)
    h = t / g - (1 - t) / (1 - g)
    factual = F.mse_loss(yt, y) + F.binary_cross_entropy_with_logits(t_logit, t)
    return factual + beta * (y - (yt + model.eps * h)).pow(2).mean()


@torch.no_grad()
def ate_ipw(model, x, t, y):
    g = torch.sigmoid(model(x)[2]).clamp(0.01, 0.99)
    w1, w0 = t / g, (1 - t) / (1 - g)
    return (w1 * y).sum() / w1.sum().clamp(min=1e-6) - (w0 * y).sum() / w0.sum().clamp(min=1e-6)


def fit(model, loader, epochs=100):
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-3)
    for _ in range(epochs):
        for x, t, y in loader:
            loss = targeted_loss(model, x, t.float(), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
