import math
import os

import torch
from torch import nn
import torch.nn.functional as F


class BadStep(RuntimeError):
    pass


class Watch:
    def __init__(self, patience: int = 5):
        self.bad, self.patience = 0, patience

    def __call__(self, value: float) -> bool:
        if math.isfinite(value):
            self.bad = 0
            return True
        self.bad += 1
        if self.bad >= self.patience:
            raise BadStep(f"{self.bad} bad losses in a row")
        return False


def save(path, **state):
    tmp = f"{path}.tmp"
    torch.save(state, tmp)
    os.replace(tmp, path)


def train(model, loader, opt, steps, path="last.pt"):
    watch, start = Watch(), 0
    torch.autograd.set_detect_anomaly(bool(os.environ.get("DEBUG_NAN")))
    if os.path.exists(path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        opt.load_state_dict(state["opt"])
        start = state["step"]
    for step, (x, y, group) in zip(range(start, steps), loader):
        terms = {"ce": F.cross_entropy(model(x), y), "l2": 1e-5 * sum(p.pow(2).sum() for p in model.parameters())}
        loss = sum(terms.values())
        if not watch(loss.item()):
            print(step, {k: v.item() for k, v in terms.items()}, "groups", group.unique().tolist())
            continue
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False)
        if not norm.isfinite():
            bad = [n for n, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
            print(step, "bad gradients in", bad[:5])
            opt.zero_grad(set_to_none=True)
            continue
        opt.step()
        if step % 1000 == 0:
            save(path, model=model.state_dict(), opt=opt.state_dict(), step=step + 1)
