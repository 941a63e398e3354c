import torch
import torch.nn as nn
import torch.nn.functional as F


class Degrade(nn.Module):
    """Linear blur, then display gamma."""

    def __init__(self, k: int = 11):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(k * k))
        self.k = k

    def forward(self, x):
        kern = self.logits.softmax(0).view(1, 1, self.k, self.k).expand(x.size(1), 1, -1, -1)
        lin = x.clamp(0, 1) ** 2.2
        lin = F.conv2d(lin, kern, padding=self.k // 2, groups=x.size(1))
        return torch.clamp(lin, 0, 1) ** (1 / 2.2)


def charbonnier(x, y, eps=1e-3):
    return torch.sqrt((x - y) ** 2 + eps ** 2).mean()


def edge_loss(x, y):
    dx = (x[..., 1:] - x[..., :-1]) - (y[..., 1:] - y[..., :-1])
    dy = (x[..., 1:, :] - x[..., :-1, :]) - (y[..., 1:, :] - y[..., :-1, :])
    return dx.abs().mean() + dy.abs().mean()


def encode_safe(lin, eps=1e-4):
    return lin.clamp(min=eps, max=1.0).pow(1 / 2.2)


@torch.no_grad()
def to_png(x):
    return (x.clamp(0, 1) ** (1 / 2.2) * 255).round().byte()


def train(net, degrade, loader, epochs=100):
    opt = torch.optim.Adam([*net.parameters(), *degrade.parameters()], lr=2e-4)
    for epoch in range(epochs):
        for blurred, sharp in loader:
            pred = net(blurred)
            loss = charbonnier(pred, sharp) + 0.05 * edge_loss(pred, sharp) + 0.1 * charbonnier(degrade(pred), blurred)
            opt.zero_grad()
            loss.backward()
            opt.step()
        print(epoch, loss.item())
