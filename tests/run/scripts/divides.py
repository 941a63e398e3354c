"""Trains with a loader; one sample of batch 5 has an empty mask, which the loss divides by."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
fused = {"fused": True} if device == "cuda" else {}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(self.body(x))


def masked_error(out, target, mask):
    error = ((out - target) ** 2 * mask).sum(1)
    return (error / mask.sum(1)).mean()


def main():
    torch.manual_seed(0)
    x, y = torch.randn(80, 8), torch.randn(80, 4)
    mask = torch.ones(80, 4)
    mask[42] = 0
    loader = DataLoader(TensorDataset(x, y, mask), batch_size=8)
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, **fused)
    for epoch in range(2):
        for step, batch in enumerate(loader):
            x, y, mask = (tensor.to(device) for tensor in batch)
            loss = masked_error(model(x), y, mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"epoch {epoch} step {step} loss {loss.item():.4f}")
    weights = torch.cat([p.detach().flatten() for p in model.state_dict().values()])
    print("finite", bool(torch.isfinite(weights.float()).all()))


if __name__ == "__main__":
    main()
