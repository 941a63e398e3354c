import torch
import torch.nn as nn


class Hazard(nn.Module):
    """Accelerated failure time model with a Weibull shape."""

    def __init__(self, d=4):
        super().__init__()
        self.risk = nn.Linear(d, 1)
        self.shape = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return torch.nn.functional.softplus(self.risk(x)).squeeze(1) + 1e-3, self.shape


class WeibullNLL(nn.Module):
    def forward(self, t, scale, shape, observed):
        z = torch.log(t) - torch.log(scale)
        hazard = (
            torch.log(shape)
            - torch.log(scale)
            + (shape - 1.0) * z
        )
        return -(observed * hazard - torch.exp(shape * z)).mean()


def cohort(n=60):
    g = torch.Generator().manual_seed(23)
    x = torch.randn(n, 4, generator=g)
    t = 0.02 + 3.0 * torch.rand(n, generator=g) ** 3 * torch.exp(0.4 * x[:, 0])
    return x, t, (torch.rand(n, generator=g) < 0.8).float()


def main():
    torch.manual_seed(0)
    x, t, observed = cohort()
    model, nll = Hazard(), WeibullNLL()
    opt = torch.optim.LBFGS(model.parameters(), lr=2.2, max_iter=2, history_size=5)

    def closure():
        opt.zero_grad()
        scale, shape = model(x)
        loss = nll(t, scale, shape, observed)
        loss = loss + 1e-3 * model.risk.weight.pow(2).sum()
        loss.backward()
        return loss

    for step in range(8):
        loss = opt.step(closure)
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
