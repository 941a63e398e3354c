import os

import torch
from torch import nn
from torchdiffeq import odeint_adjoint as odeint

if os.environ.get("ODE_DEBUG") == "1":
    torch.autograd.set_detect_anomaly(True)


class Dynamics(nn.Module):
    def __init__(self, d: int, hidden: int = 64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, d))
        self.log_rate = nn.Parameter(torch.zeros(d))
        for m in self.net:
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=0.1)
                nn.init.zeros_(m.bias)

    def forward(self, t, y):
        decay = torch.exp(-nn.functional.softplus(self.log_rate))
        return self.net(y) - decay * y


def kernel(x, y, sigma=1.0):
    return torch.exp(-torch.cdist(x, y).pow(2) / (2 * sigma ** 2))


def mmd(x, y):
    return kernel(x, x).mean() + kernel(y, y).mean() - 2 * kernel(x, y).mean()


def train(func, batches, t, iters=2000):
    opt = torch.optim.RMSprop(func.parameters(), lr=1e-3)
    ema = None
    for it in range(iters):
        y0, y = next(batches)
        pred = odeint(func, y0, t, rtol=1e-5, atol=1e-7)
        loss = (pred - y).abs().mean() + 0.1 * mmd(pred[-1], y[-1])
        if not torch.isfinite(loss):
            raise FloatingPointError(f"iteration {it}: loss {loss.item()}")
        opt.zero_grad()
        loss.backward()
        opt.step()
        ema = loss.item() if ema is None else 0.97 * ema + 0.03 * loss.item()
        if it % 20 == 0:
            print(f"iter {it:04d} | loss {ema:.6f}")
