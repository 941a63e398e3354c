import torch
from torch import autograd, nn


def gradient_penalty(critic, real, fake, lam=10.0):
    a = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    x = (a * real + (1 - a) * fake).requires_grad_(True)
    g, = autograd.grad(critic(x).sum(), x, create_graph=True)
    gnorm = torch.sqrt((g ** 2).flatten(1).sum(dim=1))
    return lam * ((gnorm - 1.0) ** 2).mean()


def r1_penalty(critic, real, weight=5.0):
    real = real.detach().requires_grad_(True)
    g, = autograd.grad(critic(real).sum(), real, create_graph=True)
    return weight * g.pow(2).flatten(1).sum(1).mean()


class GanStep:
    def __init__(self, G: nn.Module, D: nn.Module, z: int = 128):
        self.G, self.D, self.z = G, D, z
        self.opt_g = torch.optim.Adam(G.parameters(), lr=1e-4, betas=(0.0, 0.9))
        self.opt_d = torch.optim.Adam(D.parameters(), lr=4e-4, betas=(0.0, 0.9))
        self.scaler = torch.amp.GradScaler("cuda")

    def __call__(self, real):
        n = real.size(0)
        with torch.autocast("cuda", dtype=torch.float16):
            fake = self.G(torch.randn(n, self.z, device=real.device)).detach()
            d_loss = self.D(fake).mean() - self.D(real).mean()
        d_loss = d_loss.float() + gradient_penalty(self.D, real, fake.float())
        self.opt_d.zero_grad()
        self.scaler.scale(d_loss).backward()
        nn.utils.clip_grad_norm_(self.D.parameters(), 1.0)
        self.scaler.step(self.opt_d)

        with torch.autocast("cuda", dtype=torch.float16):
            g_loss = -self.D(self.G(torch.randn(n, self.z, device=real.device))).mean()
        self.opt_g.zero_grad()
        self.scaler.scale(g_loss).backward()
        self.scaler.unscale_(self.opt_g)
        nn.utils.clip_grad_norm_(self.G.parameters(), 1.0)
        self.scaler.step(self.opt_g)
        self.scaler.update()
        return d_loss.item(), g_loss.item()
