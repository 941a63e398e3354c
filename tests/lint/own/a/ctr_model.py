import torch
import torch.nn as nn
from torch.nn import functional as nnf


class DeepFM(nn.Module):
    def __init__(self, cards, k=16):
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(c, k) for c in cards)
        self.lin = nn.ModuleList(nn.Embedding(c, 1) for c in cards)
        self.mlp = nn.Sequential(nn.Linear(k * len(cards), 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, ids):
        e = torch.stack([m(i) for m, i in zip(self.emb, ids.unbind(1))], 1)
        first = sum(m(i) for m, i in zip(self.lin, ids.unbind(1)))
        fm = 0.5 * (e.sum(1).pow(2) - e.pow(2).sum(1)).sum(1, keepdim=True)
        return (first + fm + self.mlp(e.flatten(1))).squeeze(1)


def step(model, batch, opt, pos_weight: float):
    ids, click = batch
    ctr = torch.sigmoid(model(ids))
    w = torch.where(click > 0, pos_weight, 1.0)
    loss = nnf.binary_cross_entropy(input=ctr, target=click, weight=w)
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def calibration(ctr, click):
    return ctr.sum() / click.sum()


def normalised_entropy(logits, click):
    ll = nnf.binary_cross_entropy_with_logits(logits, click)
    p = click.mean().clamp(1e-6, 1 - 1e-6)
    return ll / -(p * p.log() + (1 - p) * (1 - p).log())


@torch.inference_mode()
def predict(model, ids):
    return torch.sigmoid(model(ids))


def hash_popularity(counts: torch.Tensor, alpha=0.5):
    w = counts.clamp(min=1).float() ** alpha
    return w / w.sum()
