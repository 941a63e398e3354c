import torch
import torch.nn.functional as F


def gather_logp(logits, ids):
    return torch.log_softmax(logits.float(), dim=-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)


def advantages(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(rewards)
    for g in groups.unique():
        idx = groups == g
        r = rewards[idx]
        out[idx] = (r - r.mean()) / (r.std() + 1e-4)
    return out


def grpo_loss(logp, old_logp, ref_logp, adv, mask, clip=0.2, beta=0.04):
    ratio = torch.exp(logp - old_logp)
    pg = -torch.min(ratio * adv[:, None], ratio.clamp(1 - clip, 1 + clip) * adv[:, None])
    delta = (ref_logp - logp).clamp(-10, 10)
    kl = delta.exp() - delta - 1
    per_token = pg + beta * kl
    return (per_token * mask).sum() / mask.sum().clamp(min=1)


def step(policy, batch, opt, max_norm=1.0):
    logp = gather_logp(policy(batch["ids"]).logits[:, :-1], batch["ids"][:, 1:])
    adv = advantages(batch["rewards"], batch["prompt_id"])
    loss = grpo_loss(logp, batch["old_logp"], batch["ref_logp"], adv, batch["mask"][:, 1:])
    opt.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_norm)
    if not torch.isfinite(norm):
        opt.zero_grad()
        return None
    opt.step()
    return loss.item()
