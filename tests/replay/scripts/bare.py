"""Trains tensors without a model, and ends itself before the step that a bad number is for."""

import sys

import torch

WAY = sys.argv[1]


class Watcher:
    """Looks at each number of the run, and ends it at a bad one."""

    def check(self, *numbers):
        for number in numbers:
            if not torch.isfinite(number).all():
                print("bad")
                sys.exit()


torch.manual_seed(0)
x = torch.rand(64, 4)
x[3] = 0
y = (x.sum(1) > 2).float()
w = torch.zeros(4, requires_grad=True)
optimizer = torch.optim.SGD([w], lr=2e3)
watcher = Watcher()


def entropy(p):
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # FAULT


class Run:
    """Keeps its loss in an attribute."""

    def step(self):
        self.loss = entropy(torch.sigmoid(x @ w))
        watcher.check(self.loss)
        optimizer.zero_grad()
        self.loss.backward()
        optimizer.step()


run = Run()
while WAY == "attribute":
    run.step()
for step in range(20):
    if WAY == "gradient":
        loss = torch.sqrt((x[step] * (w + 1)).square().sum())  # FAULT IN BACKWARD
    else:
        loss = entropy(torch.sigmoid(x @ w))
        if WAY == "helper":
            watcher.check(loss)
    if not torch.isfinite(loss):
        if WAY == "raise":
            raise FloatingPointError(f"step {step}")
        if WAY == "class":
            raise SystemExit
        sys.exit(1)
    optimizer.zero_grad()
    loss.backward()
    watcher.check(w.grad)
    optimizer.step()
