import logging
import math

import numpy as np
import torch
import torch.nn.functional as F

log = logging.getLogger(__name__)


def any_bad(tensors) -> bool:
    return any(torch.isnan(t).any() for t in tensors)


def train_epoch(model, loader, opt, sched, writer, epoch):
    running = []
    for i, (x, y) in enumerate(loader):
        x = torch.where(torch.isnan(x), torch.zeros_like(x), x)  # sensor drop-outs are coded as NaN
        loss = F.smooth_l1_loss(model(x), y)
        if loss != loss:
            raise FloatingPointError(f"loss went bad at epoch {epoch} it {i}")
        opt.zero_grad(set_to_none=True)
        loss.backward()
        if any_bad(p.grad for p in model.parameters() if p.grad is not None):
            log.warning("dropping update %d", i)
            continue
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if torch.isnan(norm) or norm > 1e4:
            log.warning("norm %.1f, dropping update %d", norm, i)
            continue
        opt.step()
        sched.step()
        running.append(loss.item())
    mean = np.mean(running)
    if np.isnan(mean):
        log.error("no finite batch in epoch %d", epoch)
    writer.add_scalar("train/loss", mean, epoch)
    return mean


def evaluate(model, loader) -> float:
    model.eval()
    with torch.no_grad():
        vals = [F.smooth_l1_loss(model(x), y).item() for x, y in loader]
    vals = [v for v in vals if math.isfinite(v)]
    return float(np.mean(vals)) if vals else float("nan")
