import torch
from torch import nn


class CrossScorer(nn.Module):
    def __init__(self, d: int = 768, heads: int = 12):
        super().__init__()
        self.heads, self.hd = heads, d // heads
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.score = nn.Linear(d, 1)

    def forward(self, query, passage, passage_mask):
        b, n, d = query.shape
        q = self.q(query).view(b, n, self.heads, self.hd).transpose(1, 2)
        k = self.k(passage).view(b, -1, self.heads, self.hd).transpose(1, 2)
        v = self.v(passage).view(b, -1, self.heads, self.hd).transpose(1, 2)
        s = q @ k.transpose(-1, -2) * self.hd ** -0.5
        s = s + (1.0 - passage_mask[:, None, None, :].to(s.dtype)) * -1e9
        h = (s.softmax(-1) @ v).transpose(1, 2).reshape(b, n, d)
        return self.score(h[:, 0]).squeeze(-1)


def cosine(a, b):
    a, b = a.half(), b.half()
    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1) + 1e-8)


@torch.inference_mode()
def rank(model: CrossScorer, query, passages, masks, prior):
    model = model.half().cuda().eval()
    query, passages = query.half().cuda(), passages.half().cuda()
    s = model(query.expand(len(passages), -1, -1), passages, masks.cuda())
    s = s.float() + 0.1 * cosine(query[:, 0], passages[:, 0]).float() + prior.cuda()
    return s.argsort(descending=True)
