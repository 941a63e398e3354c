import torch
from torch import nn


class HazardNet(nn.Module):
    """Discrete-time survival model, one hazard per interval."""

    def __init__(self, d: int, intervals: int):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 64), nn.ReLU(), nn.Linear(64, intervals))

    def forward(self, x):
        return torch.sigmoid(self.net(x))


def nll(hazard, event_bin, censored):
    """event_bin: 0/1 matrix, survived: bins before the event."""
    survived = (event_bin.flip(1).cumsum(1).flip(1) - event_bin).clamp(min=0)
    event = event_bin * (1 - censored).unsqueeze(1) * torch.log(hazard + 1e-7)
    alive = survived * torch.log(1 - hazard)
    return -(event + alive).sum(1).mean()


def cox_loss(risk, time, event):
    order = time.argsort(descending=True)
    risk, event = risk[order], event[order]
    log_cum = torch.logcumsumexp(risk, 0)
    return -((risk - log_cum) * event).sum() / event.sum().clamp(min=1)


def fit(model, loader, epochs=100):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for x, event_bin, censored in loader:
            loss = nll(model(x), event_bin, censored)
            opt.zero_grad()
            loss.backward()
            opt.step()
