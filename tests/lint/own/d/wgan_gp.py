import torch
from torch import nn, autograd


class Critic(nn.Module):
    def __init__(self, ch=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, ch, 4, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(ch, ch * 2, 4, 2, 1), nn.InstanceNorm2d(ch * 2), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.LazyLinear(1),
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)


def gradient_penalty(critic, real, fake, lam=10.0):
    alpha = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mix = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    out = critic(mix)
    g = autograd.grad(out.sum(), mix, create_graph=True)[0].flatten(1)
    norm = torch.sqrt(torch.sum(g ** 2, dim=1))
    return lam * (norm - 1).pow(2).mean()


def critic_step(critic, gen, real, opt, z_dim=128):
    z = torch.randn(real.size(0), z_dim, device=real.device)
    with torch.no_grad():
        fake = gen(z)
    loss = critic(fake).mean() - critic(real).mean() + gradient_penalty(critic, real, fake)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    return loss.item()
