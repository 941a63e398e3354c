import numpy as np
import torch
from torch import nn


class RiskNet(nn.Module):
    def __init__(self, d: int, hidden=(64, 32), p: float = 0.3):
        super().__init__()
        dims = [d, *hidden]
        layers = []
        for a, b in zip(dims, dims[1:]):
            layers += [nn.Linear(a, b), nn.SELU(), nn.AlphaDropout(p)]
        self.net = nn.Sequential(*layers, nn.Linear(dims[-1], 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


def cox_loss(risk: torch.Tensor, time: torch.Tensor, event: torch.Tensor) -> torch.Tensor:
    order = time.argsort(descending=True)
    risk, event = risk[order], event[order].float()
    log_cum = torch.logcumsumexp(risk, 0)
    return -((risk - log_cum) * event).sum() / event.sum().clamp(min=1.0)


def discrete_nll(logits, bins, event):
    h = torch.nn.functional.logsigmoid(logits)
    s = torch.nn.functional.logsigmoid(-logits)
    idx = torch.arange(logits.size(1), device=logits.device)[None]
    before = (s * (idx < bins[:, None])).sum(1)
    at = h.gather(1, bins[:, None]).squeeze(1)
    return -(before + event * at + (1 - event) * s.gather(1, bins[:, None]).squeeze(1)).mean()


def impute(x: np.ndarray) -> np.ndarray:
    med = np.nanmedian(x, axis=0)
    x = np.where(np.isnan(x), med, x)
    lo, hi = np.percentile(x, [1, 99], axis=0)
    x = np.clip(x, lo, hi)
    return ((x - x.mean(0)) / (x.std(0) + 1e-6)).astype(np.float32)


def fit(x, time, event, epochs=200, lr=1e-3):
    x, time, event = torch.from_numpy(impute(x)), torch.as_tensor(time), torch.as_tensor(event)
    net = RiskNet(x.size(1))
    opt = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=1e-2)
    for _ in range(epochs):
        loss = cox_loss(net(x), time, event)
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if not torch.isfinite(norm):
            for p in net.parameters():
                p.grad.zero_()
            continue
        opt.step()
    return net
