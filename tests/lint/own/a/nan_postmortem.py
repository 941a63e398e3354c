"""Looks at a run after the fact; never trains."""
import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open


def bad_tensors(path: Path) -> dict:
    report = {}
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as f:
            items = [(k, f.get_tensor(k)) for k in f.keys()]
    else:
        items = torch.load(path, map_location="cpu", weights_only=True).items()
    for name, t in items:
        if t.is_floating_point():
            n_nan, n_inf = int(torch.isnan(t).sum()), int(torch.isinf(t).sum())
            if n_nan or n_inf:
                report[name] = {"nan": n_nan, "inf": n_inf, "of": t.numel()}
    return report


def loss_curve(log: Path):
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
    loss = np.array([r.get("loss", math.nan) for r in rows], dtype=np.float64)
    finite = np.isfinite(loss)
    first_bad = int(np.argmin(finite)) if not finite.all() else None
    return loss, first_bad


def plot(loss: np.ndarray, out: Path, smooth: float = 0.98):
    import matplotlib.pyplot as plt
    shown = np.nan_to_num(loss, nan=0.0, posinf=0.0)
    ema, acc = [], shown[0]
    for v in shown:
        acc = smooth * acc + (1 - smooth) * v
        ema.append(acc)
    plt.semilogy(np.maximum(shown, 1e-8), alpha=0.3)
    plt.semilogy(np.maximum(ema, 1e-8))
    plt.savefig(out)


def replay(model, lossf, batch):
    """Runs one step again with anomaly mode, to name the operation."""
    with torch.autograd.set_detect_anomaly(True):
        loss = lossf(model(batch["x"]), batch["y"])
        if not torch.isfinite(loss):
            print("loss is", loss.item())
        loss.backward()
