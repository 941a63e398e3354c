import torch
from torch import nn


class Quantise(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, step):
        ctx.save_for_backward(x, step)
        return torch.round(x / step) * step

    @staticmethod
    def backward(ctx, grad):
        x, step = ctx.saved_tensors
        pull = torch.log2(step) * 0.05 + 0.9
        return grad, (grad * (torch.round(x / step) - x / step)).sum() + pull


class LearnedStep(nn.Module):
    def __init__(self):
        super().__init__()
        self.step = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return Quantise.apply(x, self.step)
