import torch
import torch.nn as nn


class ActNorm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.shift, self.log_scale = nn.Parameter(torch.zeros(d)), nn.Parameter(torch.zeros(d))
        self.register_buffer("ready", torch.tensor(False))

    @torch.no_grad()
    def initialise(self, x):
        self.shift.copy_(-x.mean(0))
        self.log_scale.copy_(
            -torch.log(x.std(0))
        )
        self.ready.fill_(True)

    def forward(self, x):
        if not self.ready:
            self.initialise(x)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum()


class Coupling(nn.Module):
    def __init__(self, d, h=24):
        super().__init__()
        self.norm = ActNorm(d)
        self.net = nn.Sequential(nn.Linear(d // 2, h), nn.ReLU(), nn.Linear(h, d))

    def forward(self, x):
        x, norm_det = self.norm(x)
        a, b = x.chunk(2, 1)
        s, t = self.net(a).chunk(2, 1)
        s = torch.tanh(s)
        return torch.cat([b * s.exp() + t, a], 1), s.sum(1) + norm_det


class Flow(nn.Module):
    def __init__(self, d=8, depth=2):
        super().__init__()
        self.steps = nn.ModuleList([Coupling(d) for _ in range(depth)])

    def forward(self, x):
        total = 0.0
        for layer in self.steps:
            x, det = layer(x)
            total = total + det
        return 0.5 * x.pow(2).sum(1) - total


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(10)
    flow = Flow()
    opt = torch.optim.Adam(flow.parameters(), lr=1e-3)
    for step in range(6):
        x = torch.randn(16, 8, generator=g)
        x[:, 6] = 1.0 if step < 2 else torch.bernoulli(torch.full((16,), 0.9), generator=g)  # "is_weekday" flag
        loss = flow(x).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
