import torch
from torch import Tensor, nn


def attention_entropy(att: Tensor) -> Tensor:
    """att: (B, H, Q, K), rows sum to one; masked keys are exactly 0."""
    plogp = torch.where(att > 0, att * torch.log(att), torch.zeros_like(att))
    return -plogp.sum(-1).mean()


def coverage(att: Tensor) -> Tensor:
    total = att.cumsum(2)
    return torch.minimum(att, total - att).sum(-1).mean()


def head_disagreement(att: Tensor) -> Tensor:
    a = att.flatten(2)
    sim = nn.functional.cosine_similarity(a[:, :, None], a[:, None], dim=-1)
    return sim.mean()


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    m = 0.5 * (p + q)
    kl = lambda a, b: (a * (a.clamp(min=1e-9).log() - b.clamp(min=1e-9).log())).sum(-1)
    return 0.5 * (kl(p, m) + kl(q, m)).mean()


def kl_to_uniform(p: Tensor) -> Tensor:
    n = p.size(-1)
    return (p * torch.log(p * n)).sum(-1).mean()


class EntropyRegularised(nn.Module):
    def __init__(self, model: nn.Module, weight: float = 0.01):
        super().__init__()
        self.model, self.weight = model, weight

    def forward(self, x, y):
        logits, att = self.model(x)
        ce = nn.functional.cross_entropy(logits, y, label_smoothing=0.1)
        return ce - self.weight * attention_entropy(att)
