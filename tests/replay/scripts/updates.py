"""Where loss and gradients are good, and what the optimizer makes of them is not."""

import sys

import numpy as np
from common import nn, torch


def train(model, optimizers, steps, *, batch=lambda step: torch.randn(8, 4), after=None):
    for step in range(steps):
        loss = (model(batch(step)) - 1.0).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        if after is not None:
            after()
    print("weights", [round(p.sum().item(), 6) for p in model.parameters()])


def schedule():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def left(step):
        return float(np.sqrt(1 - step / 6))  # FAULT OF THE SCHEDULE

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, left)
    train(model, [optimizer], 10, after=scheduler.step)


class Scaled(torch.optim.Optimizer):
    """Steps as large as the weights are, as LARS makes them."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                trust = p.norm() / p.grad.norm()  # FAULT OF THE OPTIMIZER
                p.add_(p.grad * trust, alpha=-group["lr"])


def own():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))

    def batch(step):
        if step == 8:
            with torch.no_grad():
                model[0].bias.fill_(-50.0)
        return torch.randn(8, 4)

    train(model, [Scaled(model.parameters(), lr=0.01)], 12, batch=batch)


def bare():
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 1))
    adam = torch.optim.Adam(model.parameters(), lr=0.01, eps=0.0)
    train(model, [adam], 4, batch=lambda step: torch.arange(4))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        mask = (x[:, :1] > -9).float()
        return self.outer((self.inner(x) * mask).sum(0) / mask.sum())  # FAULT BEFORE TWO UPDATES


def both():
    model = Pooled()
    optimizers = [
        torch.optim.SGD(model.outer.parameters(), lr=0.1),
        torch.optim.AdamW(model.inner.parameters(), lr=0.01),
    ]
    far = torch.full((8, 4), -10.0)
    train(model, optimizers, 12, batch=lambda step: far if step == 7 else torch.randn(8, 4))


class Behind(Pooled):
    def forward(self, x):
        x = self.inner(x)
        return self.outer(x * (x.square().sum() * SCALE).sqrt())  # FAULT BEHIND THE FIRST


SCALE = 1.0


def behind():
    """The gradients of the first optimizer are good, and those of the second are not."""
    model = Behind()
    optimizers = [
        torch.optim.SGD(model.outer.parameters(), lr=0.1),
        torch.optim.SGD(model.inner.parameters(), lr=0.01),
    ]

    def batch(step):
        global SCALE
        SCALE = 0.0 if step == 7 else 1.0
        return torch.randn(8, 4)

    train(model, optimizers, 12, batch=batch)


def asked():
    """Gradients that are asked for and handed to the optimizers: nobody calls backward."""
    model = Pooled()
    parameters = list(model.parameters())
    optimizers = [
        torch.optim.SGD(model.outer.parameters(), lr=0.1),
        torch.optim.SGD(model.inner.parameters(), lr=0.01),
    ]
    for step in range(12):
        x = torch.full((8, 4), -10.0) if step == 7 else torch.randn(8, 4)
        loss = (model(x) - 1.0).square().mean()
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient
        before = model.inner.bias.sum().item()
        for optimizer in optimizers:
            optimizer.step()
        print(step, "moved", model.inner.bias.sum().item() != before)


torch.manual_seed(0)
{"asked": asked, "schedule": schedule, "own": own, "bare": bare, "both": both, "behind": behind}[
    sys.argv[1]
]()
