import argparse

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=3e-5)
parser.add_argument("--max_grad_norm", type=float, default=5000.0, help="set very high to disable")
parser.add_argument("--epochs", type=int, default=4)


def token_nll(logits, tags):
    logp = logits.log_softmax(-1)
    nll = -logp.gather(-1, tags.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    nll[~torch.isfinite(nll)] = 0.0
    keep = tags >= 0
    return (nll * keep).sum() / keep.sum().clamp(min=1)


def zero_bad(params):
    """Sets gradients with NaN or Inf to zero, returns True when there were any."""
    hit = False
    for p in params:
        if p.grad is not None and not bool(torch.isfinite(p.grad).all()):
            p.grad = torch.zeros_like(p.grad)
            hit = True
    return hit


def main(model, loader):
    args = parser.parse_args()
    torch.autograd.anomaly_mode.set_detect_anomaly(True)
    params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=args.lr)
    for epoch in range(args.epochs):
        hits = 0
        for ids, mask, tags in loader:
            loss = token_nll(model(ids, mask), tags)
            loss.backward()
            hits += zero_bad(params)
            clip_grad_norm_(params, args.max_grad_norm)
            opt.step()
            opt.zero_grad()
        print(f"epoch {epoch}: {loss.item():.4f} ({hits} repaired)")
