import math
import torch
from torch import nn
import torch.nn.functional as F


class Pointer(nn.Module):
    """Picks the next city among those left."""

    def __init__(self, d: int, clip: float = 10.0):
        super().__init__()
        self.q, self.k = nn.Linear(d, d), nn.Linear(d, d)
        self.v = nn.Parameter(torch.empty(d).uniform_(-1 / math.sqrt(d), 1 / math.sqrt(d)))
        self.clip = clip

    def forward(self, query, ref, dead):
        u = torch.tanh(self.q(query).unsqueeze(1) + self.k(ref)) @ self.v
        u = self.clip * torch.tanh(u)
        u[dead] = float("-inf")
        return F.softmax(u, dim=-1)


class Decoder(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.cell = nn.LSTMCell(d, d)
        self.ptr = Pointer(d)

    def forward(self, emb, pad):
        b, n, d = emb.shape
        h = c = emb.new_zeros(b, d)
        x = emb.mean(1)
        visited = pad.clone()
        tour, logps = [], []
        for _ in range(n):
            h, c = self.cell(x, (h, c))
            p = self.ptr(h, emb, visited.clone())
            idx = torch.multinomial(p, 1).squeeze(1)
            logps.append(p.gather(1, idx[:, None]).squeeze(1).clamp(min=1e-9).log())
            visited = visited.scatter(1, idx[:, None], True)
            x = emb[torch.arange(b), idx]
            tour.append(idx)
        return torch.stack(tour, 1), torch.stack(logps, 1).sum(1)


def reinforce(dec, emb, pad, length_of, baseline, opt):
    tour, logp = dec(emb, pad)
    loss = ((length_of(tour) - baseline) * logp).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
