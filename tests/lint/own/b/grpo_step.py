import torch
from torch import Tensor


def group_normalise(scores: Tensor, group_size: int) -> Tensor:
    g = scores.view(-1, group_size)
    return ((g - g.mean(1, keepdim=True)) / (g.std(1, keepdim=True) + 1e-4)).flatten()


def token_logps(model, ids: Tensor, prompt_len: int) -> Tensor:
    logits = model(ids).logits[:, prompt_len - 1:-1].float()
    return torch.log_softmax(logits, -1).gather(-1, ids[:, prompt_len:, None]).squeeze(-1)


def kl_estimate(logp: Tensor, ref_logp: Tensor) -> Tensor:
    return torch.exp(ref_logp - logp) - (ref_logp - logp) - 1


def grpo_loss(logp: Tensor, old: Tensor, ref: Tensor, adv: Tensor, mask: Tensor, clip: float = 0.2, beta: float = 0.04):
    ratio = torch.exp((logp - old).clamp(-10, 10))
    surrogate = torch.min(ratio * adv[:, None], ratio.clamp(1 - clip, 1 + clip) * adv[:, None])
    per_token = -(surrogate - beta * kl_estimate(logp, ref))
    return (per_token * mask).sum() / mask.sum().clamp(min=1)


def update(model, ref, rollouts, opt, prompt_len, group_size=8):
    adv = group_normalise(rollouts["reward"], group_size)
    with torch.no_grad():
        ref_lp = token_logps(ref, rollouts["ids"], prompt_len)
    lp = token_logps(model, rollouts["ids"], prompt_len)
    loss = grpo_loss(lp, rollouts["logp"], ref_lp, adv, rollouts["mask"].float())
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
    opt.step()
    return loss.item()
