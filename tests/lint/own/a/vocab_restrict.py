from typing import List, Optional

import numpy as np
import torch
import torch.nn.functional as F


def encode_targets(raw: List[int], n_classes: int) -> torch.Tensor:
    labels = np.asarray(raw, dtype=np.int64)
    labels = np.clip(labels, 0, n_classes - 1)
    return torch.from_numpy(labels)


def restricted_nll(hidden, weight, allowed: torch.Tensor, target, bias: Optional[torch.Tensor] = None):
    scores = F.linear(hidden, weight, bias)
    scores[..., ~allowed] = -np.inf
    logp = F.log_softmax(scores, dim=-1)
    return F.nll_loss(logp, target)


def supcon(z: torch.Tensor, pair_idx: torch.Tensor, tau: float = 0.1) -> torch.Tensor:
    """NT-Xent: row i must find its other view, never itself."""
    z = F.normalize(z, dim=-1)
    sim = z @ z.t() / tau
    sim.fill_diagonal_(float("-inf"))
    return F.cross_entropy(sim, pair_idx)


def sampled_ce(scores, target):
    """Keeps the top 256 classes of each row for the loss."""
    kth = scores.topk(256, dim=-1).values[..., -1:]
    scores = scores.masked_fill(scores < kth, -float("inf"))
    return F.cross_entropy(input=scores, target=target)


@torch.no_grad()
def constrained_next(logits, allowed):
    logits = logits.masked_fill(~allowed, float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1)


def relative_bucket(q_len: int, k_len: int, max_dist: int) -> torch.Tensor:
    rel = torch.arange(k_len)[None] - torch.arange(q_len)[:, None]
    return rel.clamp(-max_dist, max_dist) + max_dist


def perplexity(nll_sum: float, n_tokens: int) -> float:
    return float(np.exp(min(nll_sum / max(n_tokens, 1), 30.0)))
