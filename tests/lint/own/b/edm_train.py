import copy
import pickle

import torch
from torch import nn


class EDMLoss:
    def __init__(self, p_mean=-1.2, p_std=1.2, sigma_data=0.5):
        self.p_mean, self.p_std, self.sd = p_mean, p_std, sigma_data

    def __call__(self, net, x, labels=None):
        rnd = torch.randn([x.shape[0], 1, 1, 1], device=x.device)
        sigma = (rnd * self.p_std + self.p_mean).exp()
        weight = (sigma ** 2 + self.sd ** 2) / (sigma * self.sd) ** 2
        c_in = 1 / (sigma ** 2 + self.sd ** 2).sqrt()
        noisy = x + torch.randn_like(x) * sigma
        d = net(c_in * noisy, sigma.log().flatten() / 4, labels)
        return weight * (d - x) ** 2


def load_snapshot(path):
    with open(path, "rb") as f:
        data = pickle.load(f)
    return data["ema"]


def training_loop(net: nn.Module, data, resume=None, lr=1e-3, total_kimg=200_000, ema_half=500, batch=512):
    ema = copy.deepcopy(net).eval().requires_grad_(False)
    if resume:
        src = load_snapshot(resume)
        net.load_state_dict(src.state_dict())
        ema.load_state_dict(src.state_dict())
    opt = torch.optim.Adam(net.parameters(), lr=lr, betas=(0.9, 0.999), eps=1e-8)
    loss_fn, nimg = EDMLoss(), 0
    while nimg < total_kimg * 1000:
        x, y = next(data)
        opt.zero_grad(set_to_none=True)
        loss = loss_fn(net, x, y).sum() / batch
        loss.backward()
        for p in net.parameters():
            if p.grad is not None:
                torch.nan_to_num(p.grad, nan=0, posinf=1e5, neginf=-1e5, out=p.grad)
        opt.step()
        beta = 0.5 ** (batch / (ema_half * 1000))
        with torch.no_grad():
            for pe, p in zip(ema.parameters(), net.parameters()):
                pe.copy_(p.lerp(pe, beta))
        nimg += batch
