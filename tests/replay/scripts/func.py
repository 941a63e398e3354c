"""Trains with gradients of torch.func: no optimizer, no backward, and tensors in a dictionary."""

import sys

import torch
from torch.func import functional_call, grad, grad_and_value, hessian, vmap

WAY, BAD = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
params = {name: value.detach().clone() for name, value in net.named_parameters()}
weight = torch.zeros(4)


def entropy(logits, y):
    p = torch.sigmoid(logits)
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()  # FAULT


def loss_of(params, x, y):
    return entropy(functional_call(net, params, (x,)).squeeze(-1), y)


def distance(params, x, y):
    out = functional_call(net, params, (x,))
    return torch.sqrt((out * x.sum()).square().sum())  # FAULT IN BACKWARD


def spread(params, x, y):
    size = (params["weight"] * x).square().sum()
    return size - torch.log(size)  # FAULT IN LOG


def of_weight(weight, x, y):
    return entropy(x @ weight, y)


def turn(weight, x, y):
    slopes = grad(of_weight)(weight, x, y)
    return weight - 0.5 * slopes


LOSSES = {"gradient": distance, "log": spread}
if WAY == "slope":
    for point in torch.linspace(0, 1, 5):
        print(point.item(), grad(torch.sqrt)(point).item())
    sys.exit()
for step in range(12):
    x = torch.rand(16, 4)
    y = (x.sum(1) > 2).float()
    if step == BAD:
        x[3] = 1e4
        x = x * (WAY not in ("gradient", "log"))
    slope = grad(torch.sin)(x.mean())
    if WAY == "each sample":
        found = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
        slopes = {name: value.mean(0) for name, value in found.items()}
        params = {name: value - 0.5 * slopes[name] for name, value in params.items()}
    elif WAY == "one tensor":
        weight = turn(weight, x, y)
    elif WAY == "newton":
        slopes = grad(of_weight)(weight, x, y)
        bend = hessian(of_weight)(weight, x, y) + torch.eye(4)
        weight = weight - 0.1 * torch.linalg.solve(bend, slopes)
    else:
        slopes, loss = grad_and_value(LOSSES.get(WAY, loss_of))(params, x, y)
        params = {name: value - 0.01 * slopes[name] for name, value in params.items()}
    trained = [weight, *params.values()]
    print(step, sum(value.double().sum().item() for value in trained))
