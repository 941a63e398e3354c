import torch
import torch.nn as nn
import torch.nn.functional as F


class Generator(nn.Module):
    def __init__(self, z=4, d=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(z, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, d))

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self, d=6):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))

    def forward(self, x):
        return 60.0 * self.net(x).squeeze(1)  # very confident logits


class Monitor:
    """Numbers for the log only."""

    @torch.no_grad()
    def __call__(self, real, fake):
        p, q = torch.sigmoid(real), torch.sigmoid(fake)
        js = 0.5 * (torch.log(p).mean() + torch.log(1.0 - q).mean())
        hits = (p > 0.5) & (q > 0.5)
        gap = (real[hits] - fake[hits]).mean()
        odds = torch.exp(real).max()
        return js.item(), gap.item(), odds.item()


def main():
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(120)
    gen, critic, monitor = Generator(), Critic(), Monitor()
    opt_g = torch.optim.Adam(gen.parameters(), lr=2e-3, betas=(0.5, 0.99))
    opt_d = torch.optim.Adam(critic.parameters(), lr=5e-3, betas=(0.5, 0.99))
    best = float("inf")
    for step in range(12):
        real = 3.0 + torch.randn(12, 6, generator=g)
        z = torch.randn(12, 4, generator=g)
        r, f = critic(real), critic(gen(z).detach())
        loss_d = F.softplus(-r).mean() + F.softplus(f).mean()
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
        loss_g = F.softplus(-critic(gen(z))).mean()
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        js, gap, odds = monitor(r, f)
        loss = loss_d.item() + loss_g.item()
        best = min(best, loss)
        print(f"step {step} loss {loss:.4f} js {js:.3g} gap {gap:.3g} odds {odds:.3g} best {best:.3f}")


if __name__ == "__main__":
    main()
