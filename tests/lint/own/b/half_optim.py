import copy

import torch
from torch import nn


def sgd_half(net: nn.Module, lr: float = 0.05):
    net = net.half().cuda()
    return net, torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)


def adam_bf16(net: nn.Module, lr: float = 3e-4):
    net = net.to("cuda", dtype=torch.bfloat16)
    return net, torch.optim.AdamW(net.parameters(), lr=lr)


def adam_half_large_eps(net: nn.Module, lr: float = 1e-4):
    net = net.half().cuda()
    return net, torch.optim.Adam(net.parameters(), lr=lr, eps=1e-4)


class MasterWeights:
    """fp16 model, fp32 copy for the optimizer."""

    def __init__(self, net: nn.Module, lr: float = 1e-4):
        self.master = copy.deepcopy(net).float()
        self.model = net.half()
        self.opt = torch.optim.AdamW(self.master.parameters(), lr=lr)

    def step(self, scale: float = 1024.0) -> bool:
        for m, p in zip(self.master.parameters(), self.model.parameters()):
            m.grad = None if p.grad is None else p.grad.float() / scale
        norm = nn.utils.clip_grad_norm_(self.master.parameters(), 1.0)
        ok = bool(torch.isfinite(norm))
        if ok:
            self.opt.step()
            with torch.no_grad():
                for m, p in zip(self.master.parameters(), self.model.parameters()):
                    p.copy_(m)
        self.model.zero_grad(set_to_none=True)
        return ok
