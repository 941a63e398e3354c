import math
import torch
import torch.nn.functional as F
import xarray as xr


def lat_weights(lat: torch.Tensor) -> torch.Tensor:
    w = torch.cos(torch.deg2rad(lat)).clamp(min=0.0)
    return (w / w.mean()).view(1, 1, -1, 1)


def weighted_rmse(pred, y, w):
    return torch.sqrt((w * (pred - y) ** 2).mean(dim=(-2, -1))).mean()


@torch.no_grad()
def scores(net, loader, w, clim):
    rmse, acc, n = 0.0, 0.0, 0
    for x, y in loader:
        p = net(x)
        rmse += math.sqrt((w * (p - y) ** 2).mean().item())
        a, b = p - clim, y - clim
        acc += ((w * a * b).sum() / ((w * a * a).sum() * (w * b * b).sum() + 1e-12).sqrt()).item()
        n += 1
    return rmse / max(n, 1), acc / max(n, 1)


def load_stats(path):
    ds = xr.open_dataset(path)
    return torch.tensor(ds["mean"].values), torch.tensor(ds["std"].values).clamp(min=1e-5)


def train(net, loader, lat, epochs=50):
    w = lat_weights(lat)
    opt = torch.optim.AdamW(net.parameters(), lr=5e-4, weight_decay=1e-5)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, epochs)
    for epoch in range(epochs):
        for x, y in loader:
            loss = weighted_rmse(net(x), y, w) + 0.1 * F.l1_loss(net(x), y)
            if not torch.isfinite(loss):
                loss = torch.tensor(0.0, device=x.device, requires_grad=True)
            opt.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 32.0)
            opt.step()
        sched.step()
