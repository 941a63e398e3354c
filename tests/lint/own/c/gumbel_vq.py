import torch
import torch.nn as nn
import torch.nn.functional as F


class GumbelQuantizer(nn.Module):
    def __init__(self, d, n_codes=320, groups=2, tau=2.0):
        super().__init__()
        self.proj = nn.Linear(d, n_codes * groups)
        self.codes = nn.Parameter(torch.empty(1, n_codes * groups, d // groups).uniform_(-0.1, 0.1))
        self.n, self.g, self.tau = n_codes, groups, tau

    def noise(self, like):
        return -(-torch.rand_like(like).log()).log()

    def forward(self, x):
        b, t, d = x.shape
        logits = self.proj(x).view(b * t * self.g, -1)
        if self.training:
            soft = F.softmax((logits + self.noise(logits)) / self.tau, dim=-1)
            hard = F.one_hot(soft.argmax(-1), self.n).to(soft.dtype)
            q = hard + soft - soft.detach()
        else:
            q = F.one_hot(logits.argmax(-1), self.n).to(x.dtype)
        q = q.view(b * t, -1, 1) * self.codes
        return q.view(b * t, self.g, self.n, -1).sum(2).view(b, t, d), logits


def diversity(logits, groups=2):
    p = logits.view(-1, groups, logits.size(-1)).softmax(-1).mean(0)
    ppl = torch.exp(-(p * torch.log(p + 1e-7)).sum(-1)).sum()
    return 1 - ppl / p.numel()


def commitment(logits, target):
    logp = F.softmax(logits, dim=-1).log()
    return F.nll_loss(logp, target)


def anneal(q: GumbelQuantizer, step, start=2.0, floor=0.5, decay=0.999995):
    q.tau = max(start * decay ** step, floor)
