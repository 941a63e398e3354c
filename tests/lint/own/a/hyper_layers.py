import math

import torch
from torch import nn
from torch.nn.parameter import Parameter
import torch.nn.functional as F


class BilinearPool(nn.Module):
    def __init__(self, left: int, right: int, out: int):
        super().__init__()
        self.weight = Parameter(torch.empty(out, left, right))
        self.bias = Parameter(torch.empty(out))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1.0 / math.sqrt(self.weight.size(1))
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, a, b):
        return torch.einsum("bi,oij,bj->bo", a, self.weight, b) + self.bias


class PrototypeBank(nn.Module):
    def __init__(self, k: int, d: int):
        super().__init__()
        self.protos = nn.Parameter(torch.Tensor(k, d))
        self.temp = nn.Parameter(torch.full((), 0.1))

    def forward(self, x):
        x = F.normalize(x, dim=-1)
        return x @ F.normalize(self.protos, dim=-1).t() / self.temp.clamp(min=0.01)


class LowRankMixer(nn.Module):
    def __init__(self, d: int, ranks=(4, 8, 16)):
        super().__init__()
        self.down = nn.ParameterList([nn.Parameter(torch.empty(r, d)) for r in ranks])
        self.up = nn.ParameterList([nn.Parameter(torch.zeros(d, r)) for r in ranks])
        self.alpha = nn.Parameter(torch.empty(len(ranks)).normal_(std=0.02))
        for p in self.down:
            nn.init.kaiming_uniform_(p, a=math.sqrt(5))

    def forward(self, x):
        return x + sum(a * (x @ dn.t() @ up.t()) for a, dn, up in zip(self.alpha, self.down, self.up))
