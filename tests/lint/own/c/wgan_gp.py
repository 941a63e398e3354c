import torch
from torch import autograd, nn


def gradient_penalty(D, real, fake, lam=10.0):
    a = torch.rand(real.size(0), 1, 1, 1, device=real.device)
    mix = (a * real + (1 - a) * fake).requires_grad_(True)
    out = D(mix)
    grads = autograd.grad(out.sum(), mix, create_graph=True)[0].flatten(1)
    norm = torch.sqrt((grads ** 2).sum(dim=1))
    return lam * ((norm - 1) ** 2).mean()


def has_nan_grads(net: nn.Module) -> bool:
    return any(p.grad is not None and torch.isnan(p.grad).any() for p in net.parameters())


def train(G, D, loader, nz=128, n_critic=5, lr=1e-4):
    og = torch.optim.Adam(G.parameters(), lr=lr, betas=(0.0, 0.9))
    od = torch.optim.Adam(D.parameters(), lr=lr, betas=(0.0, 0.9))
    for it, (real, _) in enumerate(loader):
        real = real.cuda()
        z = torch.randn(real.size(0), nz, device=real.device)
        fake = G(z).detach()
        loss_d = D(fake).mean() - D(real).mean() + gradient_penalty(D, real, fake)
        od.zero_grad()
        loss_d.backward()
        if has_nan_grads(D):
            print("nan critic gradient, iteration", it)
            continue
        od.step()
        if it % n_critic == 0:
            og.zero_grad()
            loss_g = -D(G(z)).mean()
            loss_g.backward()
            og.step()
    torch.save({"G": G.state_dict(), "D": D.state_dict()}, "wgan.pt")
