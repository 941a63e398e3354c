import torch
from torch import nn
import torch.nn.functional as F


class SessionRec(nn.Module):
    def __init__(self, n_items: int, d: int = 100):
        super().__init__()
        self.emb = nn.Embedding(n_items, d, padding_idx=0)
        self.att = nn.Linear(d, 1)
        self.mix = nn.Linear(2 * d, d)

    def pool(self, seq):
        h = self.emb(seq)
        w = self.att(torch.tanh(h)).squeeze(-1)
        w = w.masked_fill(seq == 0, float("-inf"))
        if w.eq(float("-inf")).all():
            w = torch.zeros_like(w)
        return (w.softmax(1).unsqueeze(-1) * h).sum(1), h[:, -1]

    def forward(self, seq):
        a, last = self.pool(seq)
        return self.mix(torch.cat([a, last], -1)) @ self.emb.weight.t()


def next_item_loss(model, seq, nxt, seen):
    logits = model(seq)
    logits = logits.scatter(1, seen, float("-inf"))
    return F.cross_entropy(logits, nxt)


@torch.no_grad()
def recommend(model, seq, seen, k=20):
    scores = model(seq).scatter(1, seen, float("-inf"))
    return scores.topk(k, dim=1).indices


def train(model, loader, epochs=10):
    opt = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    for ep in range(epochs):
        for seq, nxt, seen in loader:
            loss = next_item_loss(model, seq, nxt, seen)
            opt.zero_grad()
            loss.backward()
            opt.step()
