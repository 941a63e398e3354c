"""Gradient penalty with create_graph and zero gradients, an eps under the root."""
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
opt = torch.optim.Adam(net.parameters(), 1e-3)
for step in range(60):
    x = torch.randn(12, 3, requires_grad=True)
    (g,) = torch.autograd.grad(net(x * 0).sum() * 0 + net(x).sum() * (step % 7 > 0), x, create_graph=True)
    loss = ((torch.sqrt((g ** 2).sum(1) + 1e-12) - 1) ** 2).mean() + net(x).mean() ** 2
    opt.zero_grad(); loss.backward(); opt.step()
    print(f"step {step} loss {loss.item():.4f}")
