import torch
from torch import nn, Tensor


class CoxNet(nn.Module):
    def __init__(self, d: int, hid: int = 64):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(d, hid), nn.SELU(), nn.AlphaDropout(0.2), nn.Linear(hid, 1, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x).squeeze(-1)


def cox_ph(risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    order = torch.argsort(time, descending=True)
    risk, event = risk[order], event[order]
    hazard = torch.exp(risk)
    log_cum = torch.log(torch.cumsum(hazard, 0))
    return -((risk - log_cum) * event).sum() / event.sum()


def cox_stable(risk: Tensor, time: Tensor, event: Tensor) -> Tensor:
    order = torch.argsort(time, descending=True)
    risk, event = risk[order], event[order]
    ll = (risk - torch.logcumsumexp(risk, 0)) * event
    return -ll.sum() / event.sum().clamp(min=1)


def discrete_nll(hazard_logits: Tensor, bin_idx: Tensor, event: Tensor) -> Tensor:
    log_h = nn.functional.logsigmoid(hazard_logits)
    log_s = nn.functional.logsigmoid(-hazard_logits).cumsum(1)
    at = bin_idx.unsqueeze(1)
    before = nn.functional.pad(log_s, (1, 0))[:, :-1].gather(1, at).squeeze(1)
    hit = log_h.gather(1, at).squeeze(1)
    return -(event * (hit + before) + (1 - event) * log_s.gather(1, at).squeeze(1)).mean()
