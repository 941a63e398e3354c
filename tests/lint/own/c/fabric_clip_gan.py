import torch
from lightning.fabric import Fabric
from torch import nn
from torchvision.utils import save_image


def hinge_d(real, fake):
    return torch.relu(1 - real).mean() + torch.relu(1 + fake).mean()


def total_norm(params) -> float:
    grads = [p.grad for p in params if p.grad is not None]
    return torch.stack([g.norm() for g in grads]).norm().item()


def train(G: nn.Module, D: nn.Module, loader, steps: int, nz: int = 256, clip_d: bool = False):
    fabric = Fabric(accelerator="gpu", devices=1, precision="32-true")
    fabric.launch()
    G, opt_g = fabric.setup(G, torch.optim.Adam(G.parameters(), 5e-5, (0.0, 0.999)))
    D, opt_d = fabric.setup(D, torch.optim.Adam(D.parameters(), 2e-4, (0.0, 0.999)))
    loader = fabric.setup_dataloaders(loader)
    it = iter(loader)
    for step in range(steps):
        try:
            real, _ = next(it)
        except StopIteration:
            it = iter(loader)
            real, _ = next(it)
        z = torch.randn(real.size(0), nz, device=fabric.device)
        loss_d = hinge_d(D(real), D(G(z).detach()))
        opt_d.zero_grad()
        fabric.backward(loss_d)
        fabric.clip_gradients(D, opt_d, max_norm=1.0 if clip_d else 10.0)
        opt_d.step()
        loss_g = -D(G(z)).mean()
        opt_g.zero_grad()
        fabric.backward(loss_g)
        fabric.clip_gradients(G, opt_g, max_norm=100000.0)
        opt_g.step()
        if step % 1000 == 0:
            fabric.print(step, loss_d.item(), loss_g.item(), total_norm(G.parameters()))
            save_image(G(z[:16]).detach(), f"s_{step:06d}.png", normalize=True)
