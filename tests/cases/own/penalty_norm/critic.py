import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 16)
        nn.init.uniform_(self.a.weight, 0.05, 0.5)
        self.b = nn.Linear(16, 1)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def gradient_penalty(critic, real, fake):
    t = torch.rand(len(real), 1)
    mixed = (t * real + (1 - t) * fake).requires_grad_()
    score = critic(mixed)
    (grad,) = torch.autograd.grad(score.sum(), mixed, create_graph=True)
    length = torch.sqrt((grad**2).sum(dim=1))
    return ((length - 1) ** 2).mean()
