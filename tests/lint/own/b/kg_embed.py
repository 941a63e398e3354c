import torch
from torch import nn
import torch.nn.functional as F


class TransE(nn.Module):
    def __init__(self, n_ent, n_rel, dim=200, margin=9.0):
        super().__init__()
        self.ent = nn.Embedding(n_ent, dim)
        self.rel = nn.Parameter(torch.Tensor(n_rel, dim))
        self.margin = margin
        nn.init.xavier_uniform_(self.ent.weight)

    def forward(self, h, r, t):
        diff = F.normalize(self.ent(h), dim=-1) + self.rel[r] - F.normalize(self.ent(t), dim=-1)
        return self.margin - (diff ** 2).sum(-1) ** 0.5


class DistMult(nn.Module):
    def __init__(self, n_ent, n_rel, dim=200):
        super().__init__()
        self.ent = nn.Parameter(torch.empty(n_ent, dim))
        self.rel = nn.Parameter(torch.empty(n_rel, dim))
        self.reset_parameters()

    def reset_parameters(self):
        for p in self.parameters():
            nn.init.xavier_normal_(p)

    def forward(self, h, r, t):
        return (self.ent[h] * self.rel[r] * self.ent[t]).sum(-1)


def self_adversarial(pos, neg, temp=1.0):
    w = F.softmax(neg * temp, dim=-1).detach()
    return -F.logsigmoid(pos).mean() - (w * F.logsigmoid(-neg)).sum(-1).mean()


def run(model, triples, n_ent, steps=100_000, k=64):
    opt = torch.optim.Adagrad(model.parameters(), lr=0.1)
    for step in range(steps):
        h, r, t = triples[torch.randint(len(triples), (512,))].unbind(1)
        bad = torch.randint(n_ent, (512, k))
        loss = self_adversarial(model(h, r, t), model(h[:, None], r[:, None], bad))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 1000 == 0:
            print(step, round(loss.item(), 4))
