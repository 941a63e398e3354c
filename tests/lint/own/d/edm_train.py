import torch
from torch import nn
import torch.nn.functional as F


class Denoiser(nn.Module):
    def __init__(self, d=128):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d + 1, 512), nn.SiLU(), nn.Linear(512, d))

    def forward(self, x, sigma):
        return self.net(torch.cat([x, sigma.log().unsqueeze(-1) / 4], -1))


def sample_sigma(n, device, p_mean=-1.2, p_std=1.2):
    return (torch.randn(n, device=device) * p_std + p_mean).clamp(-6.2, 4.4).exp()


def edm_step(net, x, opt, sigma_data=0.5):
    sigma = sample_sigma(x.size(0), x.device)
    noisy = x + sigma.unsqueeze(-1) * torch.randn_like(x)
    w = (sigma ** 2 + sigma_data ** 2) / (sigma * sigma_data) ** 2
    loss = (w.unsqueeze(-1) * (net(noisy, sigma) - x).pow(2)).mean()
    opt.zero_grad()
    loss.backward()
    for p in net.parameters():
        if p.grad is not None:
            torch.nan_to_num(p.grad, nan=0.0, posinf=1e5, neginf=-1e5, out=p.grad)
    opt.step()
    return loss.item()


def train(net, loader, iters, lr=1e-3):
    opt = torch.optim.Adam(net.parameters(), lr=lr)
    for i, x in zip(range(iters), loader):
        v = edm_step(net, x, opt)
        if i % 100 == 0:
            print(f"{i}: {v:.4f}")
