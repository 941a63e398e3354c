import torch
import torch.nn as nn


class PowerLaw(torch.autograd.Function):
    @staticmethod
    def forward(ctx, base, exponent):
        out = base.pow(exponent)
        ctx.save_for_backward(base, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        base, out = ctx.saved_tensors
        return None, grad * out * torch.log(base)


class ShearProfile(nn.Module):
    def __init__(self, hub=80.0, mast=10.0):
        super().__init__()
        self.hub, self.mast = hub, mast

    def forward(self, speed, canopy, alpha):
        displacement = 0.67 * canopy
        ratio = (self.hub - displacement) / (self.mast - displacement)
        return speed * PowerLaw.apply(ratio, alpha)


class HubWind(nn.Module):
    def __init__(self, d=6, hidden=20):
        super().__init__()
        self.stability = nn.Sequential(nn.Linear(d, hidden), nn.SiLU(), nn.Linear(hidden, 1))
        self.profile = ShearProfile()

    def forward(self, weather, speed, canopy):
        alpha = 0.4 * torch.sigmoid(self.stability(weather)).squeeze(1)
        return self.profile(speed, canopy, alpha)


def site_hours(g, step, n=10):
    weather = torch.randn(n, 6, generator=g)
    speed = 3 + 6 * torch.rand(n, generator=g)
    canopy = 8 * torch.rand(n, generator=g)
    if step == 6:
        canopy[4] = 21.0
    return weather, speed, canopy, speed * 8 ** (0.14 + 0.04 * torch.tanh(weather[:, 0]))


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(10)
    model = HubWind()
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for step in range(9):
        weather, speed, canopy, hub_speed = site_hours(g, step)
        loss = nn.functional.mse_loss(model(weather, speed, canopy), hub_speed)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
