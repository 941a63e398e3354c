import math
import sys

import torch
from torch import inf
from torch.amp import GradScaler, autocast


class NativeScaler:
    def __init__(self):
        self._scaler = GradScaler("cuda")

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None, update_grad=True):
        self._scaler.scale(loss).backward()
        if not update_grad:
            return None
        self._scaler.unscale_(optimizer)
        if clip_grad is not None:
            norm = torch.nn.utils.clip_grad_norm_(parameters, clip_grad)
        else:
            norm = grad_norm(parameters)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm


def grad_norm(parameters, norm_type=2.0):
    grads = [p.grad.detach() for p in parameters if p.grad is not None]
    if norm_type == inf:
        return max(g.abs().max() for g in grads)
    return torch.norm(torch.stack([torch.norm(g, norm_type) for g in grads]), norm_type)


def train_one_epoch(model, loader, optimizer, device, scaler, args):
    model.train()
    optimizer.zero_grad()
    for it, (samples, _) in enumerate(loader):
        samples = samples.to(device, non_blocking=True)
        with autocast("cuda"):
            loss, _, _ = model(samples, mask_ratio=args.mask_ratio)
        value = loss.item()
        if not math.isfinite(value):
            print(f"Loss is {value}, stopping training")
            sys.exit(1)
        last = (it + 1) % args.accum_iter == 0
        scaler(loss / args.accum_iter, optimizer, parameters=model.parameters(), clip_grad=args.clip_grad, update_grad=last)
        if last:
            optimizer.zero_grad()
