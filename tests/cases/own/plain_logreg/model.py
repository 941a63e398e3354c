import torch


def predict(x, w, b):
    return torch.sigmoid(x @ w + b)


def cross_entropy(p, y):
    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()
