import torch
from torch import nn
import torch.nn.functional as F


def lat_weights(lat: torch.Tensor) -> torch.Tensor:
    w = torch.cos(torch.deg2rad(lat))
    return w / w.mean()


class Forecaster:
    def __init__(self, net: nn.Module, lat: torch.Tensor, lr: float = 2e-4):
        self.net = net
        self.w = lat_weights(lat).view(1, 1, -1, 1)
        self.opt = torch.optim.AdamW(net.parameters(), lr=lr)
        self.zeroed = 0

    def loss(self, x, y):
        return (self.w * F.mse_loss(self.net(x), y, reduction="none")).mean()

    def train_step(self, x, y):
        loss = self.loss(x, y)
        self.opt.zero_grad()
        loss.backward()
        for name, p in self.net.named_parameters():
            if p.grad is not None and not torch.isfinite(p.grad).all():
                print(f"non-finite gradient in {name}")
                p.grad = torch.zeros_like(p.grad)
                self.zeroed += 1
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.opt.step()
        return loss.item()
