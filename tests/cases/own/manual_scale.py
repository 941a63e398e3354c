import torch
import torch.nn as nn
import torch.nn.functional as F


class HalfRegressor(nn.Module):
    def __init__(self, d=10, h=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


class LossScaler:
    """Hand-written dynamic loss scaling, fp32 master copy, overflowing steps are dropped."""

    def __init__(self, model, lr, scale=2.0 ** 23):
        self.model, self.scale, self.good = model, scale, 0
        self.master = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
        self.opt = torch.optim.Adam(self.master, lr=lr)

    def step(self, loss):
        self.model.zero_grad()
        (loss * self.scale).backward()
        grads = [p.grad.float() for p in self.model.parameters()]
        if not all(bool(torch.isfinite(g).all()) for g in grads):
            self.scale, self.good = self.scale / 8, 0
            return False
        for m, g in zip(self.master, grads):
            m.grad = g / self.scale
        self.opt.step()
        with torch.no_grad():
            for p, m in zip(self.model.parameters(), self.master):
                p.copy_(m)
        self.good += 1
        return True


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(110)
    model = HalfRegressor().half()
    scaler = LossScaler(model, lr=5e-3)
    for step in range(12):
        x = torch.randn(16, 10, generator=g)
        y = 4 * x[:, 0] - 2 * x[:, 1]
        loss = F.smooth_l1_loss(model(x.half()).float(), y)
        done = scaler.step(loss)
        print(f"step {step} loss {loss.item():.4f} scale {scaler.scale:.0f} {'ok' if done else 'skipped'}")


if __name__ == "__main__":
    main()
