from typing import Dict

import torch
from torch import Tensor, nn


def hide(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill(mask=mask, value=-torch.inf)


class HierPool(nn.Module):
    """Words to sentences, sentences to documents."""

    def __init__(self, d: int):
        super().__init__()
        self.word_q = nn.Linear(d, 1)
        self.sent_q = nn.Linear(d, 1)

    def forward(self, x: Tensor, word_pad: Tensor) -> Tensor:
        # x: docs, sentences, words, d; a padded sentence has no words at all
        w = hide(self.word_q(x).squeeze(-1), word_pad).softmax(-1)
        sents = (w.unsqueeze(-1) * x).sum(2)
        sent_pad = word_pad.all(-1)
        sent_pad[:, 0] = False
        s = self.sent_q(sents).squeeze(-1).masked_fill(sent_pad, -torch.inf).softmax(-1)
        return (s.unsqueeze(-1) * sents).sum(1)


def user_zscores(by_user: Dict[int, Tensor]) -> Dict[int, Tensor]:
    return {u: (r - r.mean()) / (r.var().sqrt() + 1e-6) for u, r in by_user.items()}


def ndcg(rel: Tensor, order: Tensor) -> Tensor:
    disc = torch.log2(torch.arange(2, rel.size(-1) + 2, device=rel.device).float())
    gain = (2.0 ** rel - 1).gather(-1, order) / disc
    ideal = (2.0 ** rel.sort(-1, descending=True).values - 1) / disc
    return gain.sum(-1) / ideal.sum(-1).clamp(min=1e-9)


def idf(df: Tensor, n_docs: int) -> Tensor:
    return torch.log((n_docs + 1.0) / (df + 1.0)) + 1.0


def pmi(joint: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (joint / (a[:, None] * b[None])).log()


def listnet(scores: Tensor, rel: Tensor) -> Tensor:
    return -(rel.softmax(-1) * scores.log_softmax(-1)).sum(-1).mean()
