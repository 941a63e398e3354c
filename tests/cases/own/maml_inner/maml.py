import torch
from torch import nn


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(1, 20) * 0.5)
        self.b1 = nn.Parameter(torch.zeros(20))
        self.w2 = nn.Parameter(torch.randn(20, 1) * 0.2)

    def run(self, x, weights):
        w1, b1, w2 = weights
        return torch.tanh(x @ w1 + b1) @ w2


def adapt(learner, x, y, temperature, rate=0.01):
    weights = [learner.w1, learner.b1, learner.w2]
    for _ in range(2):
        loss = ((learner.run(x, weights) - y) ** 2).mean() / temperature
        grads = torch.autograd.grad(loss, weights, create_graph=True)
        weights = [w - rate * g for w, g in zip(weights, grads)]
    return weights
