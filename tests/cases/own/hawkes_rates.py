import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class PositiveRate(nn.Module):
    """Keeps the event rate positive."""

    def forward(self, x):
        return torch.log(1.0 + torch.exp(x))


class EventModel(nn.Module):
    def __init__(self, d=5, hidden=16):
        super().__init__()
        self.rnn = nn.GRU(d, hidden, batch_first=True)
        self.excite = nn.Linear(d, 1)
        self.intensity = nn.ModuleDict({"proj": nn.Linear(hidden, 1), "act": PositiveRate()})

    def forward(self, x):
        h, _ = self.rnn(x)
        raw = self.intensity["proj"](h) + self.excite(x)
        return self.intensity["act"](raw).squeeze(-1)


def poisson_nll(rate, count):
    return (rate - count * torch.log(rate + 1e-6)).mean()


def make_events(n=60, t=8):
    g = torch.Generator().manual_seed(40)
    x = torch.rand(n, t, 5, generator=g)
    count = torch.poisson(1.0 + 2.0 * x[..., 0], generator=g)
    x[44, 3, 4] = 1.2e3  # seconds since last event: the stream was paused
    return TensorDataset(x, count)


def main():
    torch.manual_seed(1)
    model = EventModel()
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    accumulate, step, running = 3, 0, 0.0
    opt.zero_grad()
    for i, (x, count) in enumerate(DataLoader(make_events(), batch_size=3)):
        loss = poisson_nll(model(x), count) / accumulate
        loss.backward()
        running += loss.item()
        if (i + 1) % accumulate == 0:
            opt.step()
            opt.zero_grad()
            print(f"step {step} loss {running:.4f}")
            step, running = step + 1, 0.0


if __name__ == "__main__":
    main()
