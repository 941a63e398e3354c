import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class Forecaster(nn.Module):
    def __init__(self, d=10, h=32):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.net = nn.Sequential(nn.Linear(d, h), nn.GELU(), nn.Linear(h, h), nn.GELU())
        self.head = nn.Linear(h, 1)

    def forward(self, x):
        return self.head(self.net(self.norm(x))).squeeze(-1)


def load(n=96):
    g = torch.Generator().manual_seed(17)
    x = torch.randn(n, 10, generator=g)
    return TensorDataset(x, 25 * x[:, 0] - 12 * x[:, 3] + 5)


def main():
    torch.manual_seed(0)
    model = Forecaster()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 18, backoff_factor=0.25)
    best = float("inf")
    for step, (x, y) in enumerate(DataLoader(load(), batch_size=8)):
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(x)
        loss = F.mse_loss(pred.float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(opt)
        scaler.update()
        best = min(best, loss.item())
        print(f"step {step} loss {loss.item():.4f} best {best:.4f} scale {scaler.get_scale():.0f}")


if __name__ == "__main__":
    main()
