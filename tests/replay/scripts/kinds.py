"""A step with tensors whose values cannot be looked at: ragged ones, and quantised ones."""

import warnings

import torch
from torch import nn

warnings.simplefilter("ignore")
torch.manual_seed(0)
net = nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(8):
    loss = net(torch.rand(5, 4)).square().mean()
    ragged = torch.nested.nested_tensor([torch.rand(2, 4), torch.rand(3, 4)])
    quantised = torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.quint8)
    loss = loss + 0 * (ragged * 2).to_padded_tensor(0.0).sum() + 0 * quantised.dequantize().sum()
    if step == 5:
        loss = loss * 0 / (loss * 0)  # FAULT
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
