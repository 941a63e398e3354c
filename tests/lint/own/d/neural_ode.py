import torch
from torch import nn, Tensor


class Field(nn.Module):
    def __init__(self, d: int, h: int = 64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d + 1, h), nn.Softplus(), nn.Linear(h, d))

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        return self.net(torch.cat([x, t.expand(x.size(0), 1)], -1))


def rk4(f, x: Tensor, t0: float, t1: float, n: int = 20) -> Tensor:
    h = (t1 - t0) / n
    t = x.new_full((1, 1), t0)
    for _ in range(n):
        k1 = f(t, x)
        k2 = f(t + h / 2, x + h / 2 * k1)
        k3 = f(t + h / 2, x + h / 2 * k2)
        k4 = f(t + h, x + h * k3)
        x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        t = t + h
    return x


def error_ratio(err: Tensor, y: Tensor, rtol: float = 1e-3, atol: float = 1e-6) -> Tensor:
    return (err / (atol + rtol * y.abs())).pow(2).mean(-1)


@torch.no_grad()
def next_step(h: float, ratio: Tensor, order: int = 5) -> float:
    return h * min(5.0, max(0.2, 0.9 * ratio.max().clamp(min=1e-10).item() ** (-1 / (2 * order))))


def kinetic(f, t: Tensor, x: Tensor) -> Tensor:
    return f(t, x).pow(2).mean()


def fit(f: Field, x0: Tensor, xT: Tensor, steps: int = 500, lam: float = 0.01):
    opt = torch.optim.AdamW(f.parameters(), lr=1e-3)
    for step in range(steps):
        loss = nn.functional.mse_loss(rk4(f, x0, 0.0, 1.0), xT) + lam * kinetic(f, x0.new_zeros(1, 1), x0)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"loss {loss.item()} at step {step}")
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(f.parameters(), 10.0)
        opt.step()
