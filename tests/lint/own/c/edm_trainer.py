import torch
from accelerate import Accelerator
from torch import nn


class EDMLoss:
    def __init__(self, p_mean=-1.2, p_std=1.2, sigma_data=0.5):
        self.p_mean, self.p_std, self.sd = p_mean, p_std, sigma_data

    def __call__(self, net, x):
        rnd = torch.randn(x.size(0), 1, 1, 1, device=x.device)
        sigma = (rnd * self.p_std + self.p_mean).clamp(-8, 6).exp()
        weight = (sigma ** 2 + self.sd ** 2) / (sigma * self.sd) ** 2
        den = net(x + torch.randn_like(x) * sigma, sigma.flatten())
        per = (weight * (den - x) ** 2).flatten(1).mean(1)
        return per.clamp(max=20.0).mean()


def main(net: nn.Module, loader, cfg):
    acc = Accelerator(mixed_precision="bf16")
    opt = torch.optim.Adam(net.parameters(), lr=cfg.lr, betas=(0.9, 0.99))
    net, opt, loader = acc.prepare(net, opt, loader)
    crit, step = EDMLoss(), 0
    while step < cfg.steps:
        for x, _ in loader:
            loss = crit(net, x)
            opt.zero_grad()
            acc.backward(loss)
            acc.clip_grad_norm_(net.parameters(), 1e5)
            opt.step()
            step += 1
            if step % cfg.log_every == 0:
                shown = loss.detach().clamp(max=5.0)
                acc.print(f"{step} {shown.item():.4f}")
            if step >= cfg.steps:
                break
    acc.wait_for_everyone()
    acc.save_model(net, cfg.out)
