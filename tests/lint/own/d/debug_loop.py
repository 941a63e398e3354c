import logging
import os
import torch
from torch import nn

log = logging.getLogger(__name__)


def check_batch(x: torch.Tensor, y: torch.Tensor, classes: int):
    if torch.isnan(x).any() or torch.isinf(x).any():
        raise ValueError("bad input")
    if y.min() < 0 or y.max() >= classes:
        raise ValueError(f"label outside 0..{classes - 1}")


def name_bad_grads(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]


def train(model, loader, classes, epochs=10, lr=1e-3):
    if os.environ.get("DEBUG_NAN") == "1":
        torch.autograd.set_detect_anomaly(True)
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    crit = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        running, n = 0.0, 0
        for x, y in loader:
            check_batch(x, y, classes)
            loss = crit(model(x), y)
            if not torch.isfinite(loss):
                log.error("loss %s in epoch %d", loss.item(), epoch)
                continue
            opt.zero_grad()
            loss.backward()
            if bad := name_bad_grads(model):
                log.error("bad gradients: %s", bad)
                opt.zero_grad()
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            running += min(loss.item(), 100.0)
            n += 1
        log.info("epoch %d loss %.4f", epoch, running / max(n, 1))
