import torch
from torch import nn
import torch.nn.functional as F


def token_logps(model, ids):
    logits = model(ids[:, :-1]).float()
    return logits.log_softmax(-1).gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)


def advantages(rewards, group: int):
    r = rewards.view(-1, group)
    return ((r - r.mean(1, keepdim=True)) / (r.std(1, keepdim=True) + 1e-4)).flatten()


def kl_estimate(logp, ref):
    d = (ref - logp).clamp(-10, 10)
    return d.exp() - d - 1


def update(model, batch, opt, group=8, clip=0.2, beta=0.04):
    adv = advantages(batch["reward"], group).unsqueeze(1)
    mask = batch["mask"]
    logp = token_logps(model, batch["ids"])
    ratio = torch.exp((logp - batch["old_logp"]).clamp(-5.0, 5.0))
    pg = -torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
    per = pg + beta * kl_estimate(logp, batch["ref_logp"])
    loss = (per * mask).sum() / mask.sum().clamp(min=1)
    loss = loss.clamp(max=2.0)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    return loss.item()


def restore(model, opt, path):
    ckpt = torch.load(path, map_location="cuda")
    model.load_state_dict(ckpt["model"])
    opt.load_state_dict(ckpt["optimizer"])
    return ckpt["iteration"]
