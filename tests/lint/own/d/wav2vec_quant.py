import torch
from torch import nn
import torch.nn.functional as F


class GumbelQuantizer(nn.Module):
    def __init__(self, d: int, groups: int = 2, codes: int = 320, dim: int = 256):
        super().__init__()
        self.groups, self.codes = groups, codes
        self.proj = nn.Linear(d, groups * codes)
        self.book = nn.Parameter(torch.FloatTensor(1, groups * codes, dim // groups))
        nn.init.uniform_(self.book)
        self.tau = 2.0

    def forward(self, x):
        b, t, _ = x.shape
        logits = self.proj(x).view(b * t * self.groups, -1)
        u = torch.rand(logits.size(), device=logits.device)
        e = -torch.log(u)
        g = -torch.log(e)
        y = F.softmax((logits + g) / self.tau, dim=-1)
        q = (y.view(b * t, -1, 1) * self.book).view(b * t, self.groups, self.codes, -1).sum(2)
        avg = y.view(b * t, self.groups, -1).mean(0)
        ppl = torch.exp(-(avg * torch.log(avg + 1e-7)).sum(-1)).sum()
        return q.view(b, t, -1), ppl


def contrastive(c, pos, neg, temp=0.1):
    cand = torch.cat([pos.unsqueeze(2), neg], 2)
    sim = F.cosine_similarity(c.unsqueeze(2), cand, dim=-1) / temp
    return F.cross_entropy(sim.flatten(0, 1), sim.new_zeros(sim.size(0) * sim.size(1), dtype=torch.long))


def training_step(model, batch, opt, step):
    loss, ppl = model(batch)
    loss = torch.where(torch.isfinite(loss), loss, torch.zeros_like(loss))
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 25.0)
    opt.step()
    print(step, loss.item(), ppl.item())
