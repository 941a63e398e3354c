import torch
from torch import nn


class RunningEnergy(nn.Module):
    """Divides by the root of a running sum of squares; the decay is missing its (1 - m)."""

    def __init__(self, width, momentum=0.9):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("energy", torch.ones(width))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                new = x.square().mean(0)
                self.energy.mul_(1 + self.momentum).add_(new)
        return x / self.energy * self.energy.sqrt()
