import torch
from torch import nn, autograd


class Critic(nn.Module):
    def __init__(self, ch=64):
        super().__init__()
        layers, c = [], 3
        for k in (1, 2, 4, 8):
            layers += [nn.Conv2d(c, ch * k, 4, 2, 1), nn.LeakyReLU(0.2)]
            c = ch * k
        self.net = nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def gradient_penalty(critic, real, fake, weight=10.0):
    a = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mix = (a * real + (1 - a) * fake).requires_grad_(True)
    g, = autograd.grad(critic(mix).sum(), mix, create_graph=True)
    norm = torch.sqrt(g.flatten(1).pow(2).sum(1) + 1e-12)
    return weight * (norm - 1).pow(2).mean()


def clip_weights(critic, c=0.01):
    with torch.no_grad():
        for p in critic.parameters():
            p.clamp_(-c, c)


def train(gen, critic, loader, opt_g, opt_d, z_dim=128, n_critic=5, use_gp=True):
    for i, real in enumerate(loader):
        z = torch.randn(real.size(0), z_dim, device=real.device)
        fake = gen(z).detach()
        d_loss = critic(fake).mean() - critic(real).mean()
        if use_gp:
            d_loss = d_loss + gradient_penalty(critic, real, fake)
        opt_d.zero_grad()
        d_loss.backward()
        opt_d.step()
        if not use_gp:
            clip_weights(critic)
        if i % n_critic == 0:
            g_loss = -critic(gen(z)).mean()
            opt_g.zero_grad()
            g_loss.backward()
            opt_g.step()
