import torch
from torch import nn
import torch.nn.functional as F


def per_speaker(emb: torch.Tensor, spk: torch.Tensor) -> torch.Tensor:
    out = emb.clone()
    for s in spk.unique():
        sel = spk == s
        mu = emb[sel].mean(dim=0)
        sigma = emb[sel].std(dim=0)
        out[sel] = (emb[sel] - mu) / sigma.clamp(min=1e-5)
    return out


class GE2E(nn.Module):
    def __init__(self, w=10.0, b=-5.0):
        super().__init__()
        self.w, self.b = nn.Parameter(torch.tensor(w)), nn.Parameter(torch.tensor(b))

    def forward(self, e):
        n, m, _ = e.shape
        c = F.normalize(e.mean(1), dim=-1)
        sim = torch.einsum("nmd,kd->nmk", F.normalize(e, dim=-1), c)
        sim = self.w.clamp(min=1e-6) * sim + self.b
        y = torch.arange(n, device=e.device).repeat_interleave(m)
        return F.cross_entropy(sim.flatten(0, 1), y)


class SpeakerNet(nn.Module):
    def __init__(self, n_mels=40, hid=768, d=256):
        super().__init__()
        self.lstm = nn.LSTM(n_mels, hid, 3, batch_first=True)
        self.proj = nn.Linear(hid, d)

    def forward(self, x):
        return self.proj(self.lstm(x)[0][:, -1])


def train(net, crit, loader, steps=100_000):
    opt = torch.optim.SGD([{"params": net.parameters()}, {"params": crit.parameters()}], lr=0.01)
    for _, mels in zip(range(steps), loader):
        n, m = mels.shape[:2]
        loss = crit(net(mels.flatten(0, 1)).view(n, m, -1))
        opt.zero_grad()
        loss.backward()
        opt.step()
