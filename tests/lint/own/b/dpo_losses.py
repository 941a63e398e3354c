import torch
import torch.nn.functional as F
from torch import Tensor


def sequence_logps(logits: Tensor, labels: Tensor, average: bool = False) -> Tensor:
    labels = labels[:, 1:].clone()
    mask = labels != -100
    labels[~mask] = 0
    per_token = logits[:, :-1].log_softmax(-1).gather(2, labels.unsqueeze(2)).squeeze(2)
    if average:
        return (per_token * mask).sum(-1) / mask.sum(-1)
    return (per_token * mask).sum(-1)


def dpo_loss(pi_w: Tensor, pi_l: Tensor, ref_w: Tensor, ref_l: Tensor, beta: float = 0.1, smoothing: float = 0.0):
    h = beta * ((pi_w - pi_l) - (ref_w - ref_l))
    loss = -F.logsigmoid(h) * (1 - smoothing) - F.logsigmoid(-h) * smoothing
    return loss.mean(), (h > 0).float().mean()


def ranking_loss(chosen: Tensor, rejected: Tensor, margin: float = 0.0) -> Tensor:
    """Bradley-Terry loss of the reward model."""
    return -torch.log(torch.sigmoid(chosen - rejected - margin)).mean()


def train_step(policy, ref, batch, opt, beta=0.1):
    ids, labels = batch["input_ids"], batch["labels"]
    n = ids.size(0) // 2
    lp = sequence_logps(policy(ids).logits.float(), labels)
    with torch.no_grad():
        lr = sequence_logps(ref(ids).logits.float(), labels)
    loss, acc = dpo_loss(lp[:n], lp[n:], lr[:n], lr[n:], beta)
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    opt.step()
    return {"loss": loss.item(), "acc": acc.item()}
