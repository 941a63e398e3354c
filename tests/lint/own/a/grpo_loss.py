import torch
import torch.nn.functional as F
from torch import Tensor


def per_token_logps(logits: Tensor, ids: Tensor) -> Tensor:
    return F.log_softmax(logits.float(), -1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def group_scaled(rewards: Tensor, prompt_ids: Tensor) -> Tensor:
    adv = torch.empty_like(rewards)
    for pid in prompt_ids.unique():
        m = prompt_ids == pid
        adv[m] = (rewards[m] - rewards[m].mean()) / (torch.std(rewards[m]) + 1e-4)
    return adv


def group_scaled_safe(rewards: Tensor, g: int) -> Tensor:
    r = rewards.view(-1, g)
    centred = r - r.mean(1, keepdim=True)
    if g > 1:
        centred = centred / (r.std(1, keepdim=True) + 1e-4)
    return centred.flatten()


def grpo(logp: Tensor, old: Tensor, ref: Tensor, adv: Tensor, mask: Tensor, clip: float = 0.2, beta: float = 0.04):
    ratio = (logp - old).exp()
    pg = -torch.minimum(ratio * adv[:, None], ratio.clamp(1 - clip, 1 + clip) * adv[:, None])
    delta = ref - logp
    kl = torch.exp(delta) - delta - 1
    per_tok = pg + beta * kl
    loss = (per_tok * mask).sum(1).div(mask.sum(1)).mean()
    with torch.no_grad():
        frac = (((ratio - 1).abs() > clip) * mask).sum() / mask.sum().clamp(min=1)
    return loss, frac


def grpo_bounded(logp, old, adv, mask, clip=0.2, cap=5.0):
    ratio = (logp - old).clamp(-cap, cap).exp()
    pg = -torch.minimum(ratio * adv[:, None], ratio.clamp(1 - clip, 1 + clip) * adv[:, None])
    return (pg * mask).sum() / max(mask.sum().item(), 1.0)


def token_entropy(logits):
    lp = logits.log_softmax(-1)
    return -(lp.exp() * lp).sum(-1)
