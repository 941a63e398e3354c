import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class MeterNet(nn.Module):
    def __init__(self, d=8, h=24):
        super().__init__()
        self.lstm = nn.LSTM(1, h, batch_first=True)
        self.head = nn.Linear(h, 1)
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        h, _ = self.lstm(x.unsqueeze(-1))
        return self.head(h[:, -1]).squeeze(1), self.log_scale.exp()


class LogCosh(nn.Module):
    def forward(self, pred, target, scale):
        r = (pred - target) / scale
        return torch.mean(
            torch.log(
                torch.cosh(r)
            )
        )


class Quantile(nn.Module):
    def __init__(self, q=0.9):
        super().__init__()
        self.q = q

    def forward(self, pred, target):
        e = target - pred
        return torch.maximum(self.q * e, (self.q - 1) * e).mean()


def readings(n=56):
    g = torch.Generator().manual_seed(31)
    x = torch.rand(n, 8, generator=g)
    y = x.sum(1) + 0.1 * torch.randn(n, generator=g)
    y[10] = -40.0   # meter replaced
    y[38] = 131.5   # reported in Wh instead of kWh
    return TensorDataset(x, y)


def main():
    torch.manual_seed(0)
    model, logcosh, quantile = MeterNet(), LogCosh(), Quantile()
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    it = iter(DataLoader(readings(), batch_size=8))
    step = 0
    while step < 7:
        x, y = next(it)
        pred, scale = model(x)
        smooth = (x[:, 1:] - x[:, :-1]).abs().mean()
        loss = logcosh(pred, y, scale) + 0.1 * quantile(pred, y) + torch.log1p(scale) + 0.0 * smooth
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")
        step += 1


if __name__ == "__main__":
    main()
