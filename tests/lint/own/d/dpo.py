import torch
import torch.nn.functional as F
from torch import Tensor


def sequence_logp(logits: Tensor, labels: Tensor, ignore: int = -100) -> Tensor:
    labels = labels[:, 1:]
    keep = labels != ignore
    lp = logits[:, :-1].log_softmax(-1)
    tok = lp.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    return (tok * keep).sum(-1)


def dpo_loss(pi_w: Tensor, pi_l: Tensor, ref_w: Tensor, ref_l: Tensor, beta: float = 0.1) -> Tensor:
    margin = beta * ((pi_w - ref_w) - (pi_l - ref_l))
    return -torch.log(torch.sigmoid(margin)).mean()


def ipo_loss(pi_w: Tensor, pi_l: Tensor, ref_w: Tensor, ref_l: Tensor, tau: float = 0.1) -> Tensor:
    return ((pi_w - ref_w) - (pi_l - ref_l) - 1 / (2 * tau)).pow(2).mean()


def cpo_loss(pi_w: Tensor, pi_l: Tensor, beta: float = 0.1) -> Tensor:
    return -F.logsigmoid(beta * (pi_w - pi_l)).mean()


def train(policy, ref, loader, opt, accum: int = 8):
    policy.train()
    for i, b in enumerate(loader):
        w = sequence_logp(policy(b["chosen"]).logits, b["chosen_labels"])
        l = sequence_logp(policy(b["rejected"]).logits, b["rejected_labels"])
        with torch.no_grad():
            rw = sequence_logp(ref(b["chosen"]).logits, b["chosen_labels"])
            rl = sequence_logp(ref(b["rejected"]).logits, b["rejected_labels"])
        loss = dpo_loss(w, l, rw, rl)
        (loss / accum).backward()
        if (i + 1) % accum == 0:
            for p in policy.parameters():
                if p.grad is not None:
                    p.grad[torch.isnan(p.grad)] = 0
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
