import torch
import torch.nn as nn
import torch.nn.functional as F


class SeverityNet(nn.Module):
    def __init__(self, regions=8, d=5, hidden=20):
        super().__init__()
        self.region = nn.Embedding(regions, 4)
        self.body = nn.ModuleDict({
            "inner": nn.Sequential(nn.Linear(d + 4, hidden), nn.ReLU()),
            "outer": nn.Linear(hidden, 1),
        })

    def forward(self, region, x):
        h = self.body["inner"](torch.cat([self.region(region), x], dim=1))
        return F.softplus(self.body["outer"](h)).squeeze(1) + 1e-3


class PoissonDeviance(nn.Module):
    def forward(self, mu, claims, exposure):
        deviance = 2.0 * (
            torch.xlogy(claims, claims / mu)
            - (claims - mu)
        )
        return (exposure * deviance).sum() / exposure.sum()


def policies(g, step, n=12):
    region = torch.randint(0, 8, (n,), generator=g)
    x = torch.randn(n, 5, generator=g)
    exposure = torch.rand(n, generator=g) + 0.1
    claims = 1 + torch.poisson(torch.exp(0.4 + 0.3 * x[:, 0]), generator=g)
    if step == 6:
        claims[7] = -2.0
    return region, x, claims, exposure


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(23)
    model, criterion = SeverityNet(), PoissonDeviance()
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3)
    for step in range(9):
        region, x, claims, exposure = policies(g, step)
        loss = criterion(model(region, x), claims, exposure)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
