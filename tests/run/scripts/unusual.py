"""Things that healthy scripts do, and that a guard could take for a fault."""

import random

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)
random.seed(0)
INF = float("inf")


def show(name, *parameters):
    print(name, [round(float(p.detach().abs().sum()), 6) for p in parameters], random.random())


def reentrant_checkpoint():
    layer, head = nn.Linear(3, 3), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], lr=0.1)
    mask = torch.tensor([False, False, True])
    for _ in range(3):
        x = torch.randn(4, 3, requires_grad=True)
        scores = checkpoint(lambda x: layer(x).masked_fill(mask, -INF), x, use_reentrant=True)
        loss = head(scores.softmax(-1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    show("checkpoint", layer.weight, head.weight)


def skips_by_itself():
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    for step in range(5):
        loss = layer(torch.ones(1, 2)).sum() * (float("nan") if step == 2 else 1.0)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        if torch.isfinite(norm):
            optimizer.step()
        optimizer.zero_grad()
    show("skips", layer.weight)


def infinities_that_are_meant():
    layer = nn.Linear(2, 2)
    layer.frozen = nn.Parameter(torch.full((2,), -INF), requires_grad=False)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(70):
        if step == 30:
            layer.register_buffer("mask", torch.tensor([0.0, -INF]))
        optimizer.zero_grad()
        layer(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
    show("infinities", layer.weight)


def calls():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([{"params": [weight]}, {"params": []}], lr=0.1)
    losses = [weight.sum(), (2 * weight).sum()]
    torch.autograd.backward(loss for loss in losses)
    optimizer.step()
    complex_weight = nn.Parameter(torch.tensor(1.0 + 1.0j))
    (complex_weight * complex_weight.conj()).backward(torch.tensor(1.0 + 0.0j))
    show("calls", weight, complex_weight.grad)


def closure():
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)

    def evaluate():
        optimizer.zero_grad()
        loss = layer(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    returned = [optimizer.step(evaluate) for _ in range(3)]
    show("closure", layer.weight, *returned)


def scaler():
    layer = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    scaling = torch.amp.GradScaler("cpu", init_scale=2.0**120)
    for _ in range(6):
        optimizer.zero_grad()
        scaling.scale(layer(torch.full((1, 2), 1e6)).sum() * 1e-9).backward()
        scaling.step(optimizer)
        scaling.update()
    show("scaler", layer.weight)


if __name__ == "__main__":
    reentrant_checkpoint()
    skips_by_itself()
    infinities_that_are_meant()
    calls()
    closure()
    scaler()
