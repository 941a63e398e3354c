import pandas as pd
import torch
from torch import nn

torch.autograd.set_detect_anomaly(True)


class DeepSurv(nn.Module):
    def __init__(self, d: int, hidden: int = 64, p: float = 0.2):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, hidden), nn.SELU(), nn.AlphaDropout(p), nn.Linear(hidden, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def cox_nll(risk: torch.Tensor, time: torch.Tensor, event: torch.Tensor) -> torch.Tensor:
    order = time.argsort(descending=True)
    risk, event = risk[order], event[order]
    log_cum = torch.log(torch.cumsum(torch.exp(risk), 0))
    return -((risk - log_cum) * event).sum() / event.sum()


@torch.no_grad()
def concordance(risk, time, event):
    earlier = (time[:, None] < time[None]) & event[:, None].bool()
    right = (risk[:, None] > risk[None]) & earlier
    return right.sum().item() / max(earlier.sum().item(), 1)


def main(path: str):
    df = pd.read_csv(path)
    t = torch.tensor(df.pop("months").values, dtype=torch.float32)
    e = torch.tensor(df.pop("died").values, dtype=torch.float32)
    x = torch.tensor(df.values, dtype=torch.float32)
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    net = DeepSurv(x.size(1))
    opt = torch.optim.Adam(net.parameters(), lr=1e-3, weight_decay=1e-4)
    for epoch in range(200):
        for idx in torch.randperm(len(x)).split(64):
            loss = cox_nll(net(x[idx]), t[idx], e[idx])
            opt.zero_grad()
            loss.backward()
            opt.step()
        if epoch % 20 == 0:
            print(f"{epoch:4d} c-index {concordance(net(x), t, e):.3f}")
