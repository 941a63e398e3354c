import torch
import torch.nn.functional as F
from torch import Tensor


def gather_logps(logits: Tensor, ids: Tensor) -> Tensor:
    probs = torch.softmax(logits[:, :-1], dim=-1)
    picked = probs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.log(picked)


def gather_logps_stable(logits: Tensor, ids: Tensor) -> Tensor:
    lp = F.log_softmax(logits[:, :-1].float(), dim=-1)
    return lp.gather(-1, ids[:, 1:, None]).squeeze(-1)


def group_norm_rewards(rewards: Tensor, n_samples: int) -> Tensor:
    r = rewards.view(-1, n_samples)
    adv = (r - r.mean(-1, keepdim=True)) / (r.std(-1, keepdim=True) + 1e-4)
    return adv.flatten()


def k3_kl(logp: Tensor, ref: Tensor) -> Tensor:
    d = (ref - logp).clamp(-20.0, 20.0)
    return d.exp() - d - 1


def policy_loss(logp: Tensor, old: Tensor, ref: Tensor, adv: Tensor, mask: Tensor, eps=0.2, beta=0.04) -> Tensor:
    ratio = torch.exp(logp - old)
    surr = torch.min(ratio * adv[:, None], ratio.clamp(1 - eps, 1 + eps) * adv[:, None])
    per = -surr + beta * k3_kl(logp, ref)
    return ((per * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    n = mask.sum().clamp(min=1)
    mean = (x * mask).sum() / n
    var = ((x - mean).square() * mask).sum() / n
    return (x - mean) * torch.rsqrt(var + 1e-8)
