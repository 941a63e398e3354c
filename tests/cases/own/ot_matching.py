import torch
import torch.nn as nn
import torch.nn.functional as F


class PointEncoder(nn.Module):
    def __init__(self, d=3, h=24, out=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, h), nn.ReLU(), nn.Linear(h, out))

    def forward(self, x):
        return self.net(x)


@torch.no_grad()
def transport_plan(cost, reg=0.1, iters=8):
    """Sinkhorn-Knopp in the primal domain; the plan is treated as a constant."""
    n, m = cost.shape
    a, b = torch.full((n,), 1.0 / n), torch.full((m,), 1.0 / m)
    kernel = torch.exp(-cost / reg)
    u, v = torch.ones(n), torch.ones(m)
    for _ in range(iters):
        u = a / (kernel @ v)
        v = b / (kernel.t() @ u)
    return u[:, None] * kernel * v[None, :]


def entropy(plan):
    return -(plan * torch.log(plan + 1e-12)).sum()


class OTLoss(nn.Module):
    def __init__(self, reg):
        super().__init__()
        self.reg = reg

    def forward(self, source, target):
        cost = torch.cdist(source, target).pow(2)
        plan = transport_plan(cost.detach(), self.reg)
        return (plan * cost).sum() - 0.01 * entropy(plan)


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(8)
    model = PointEncoder()
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    criterion = OTLoss(reg=0.1)
    for step in range(8):
        cloud = torch.randn(12, 3, generator=g)
        partner = cloud + 0.05 * torch.randn(12, 3, generator=g)
        if step == 5:
            cloud[9] = 30.0  # spurious return
        source, target = model(cloud), model(partner)
        loss = criterion(source, target) + 0.1 * F.mse_loss(source.std(0), torch.ones(6))
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
