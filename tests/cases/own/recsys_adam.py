import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class MatrixFactorization(nn.Module):
    def __init__(self, users=30, items=50, d=8):
        super().__init__()
        self.user, self.item = nn.Embedding(users, d), nn.Embedding(items, d)
        self.bias = nn.Embedding(items, 1)

    def forward(self, u, i):
        dot = (self.user(u) * self.item(i)).sum(1)
        return dot + self.bias(i).squeeze(1)


def ratings(n=72):
    g = torch.Generator().manual_seed(21)
    users = torch.randint(0, 30, (n,), generator=g)
    items = torch.arange(n) % 8
    items[60:] = 8 + torch.arange(n - 60)  # new releases come last in the log
    users[:12] = torch.arange(12)
    users[12:] = users[12:] % 12
    return TensorDataset(users, items, torch.rand(n, generator=g) * 4 + 1)


def main():
    torch.manual_seed(0)
    model = MatrixFactorization()
    opt = torch.optim.Adam(
        model.parameters(),
        lr=1e-2,
        betas=(0.9, 0.99),
        eps=0.0,
    )
    for step, (u, i, r) in enumerate(DataLoader(ratings(), batch_size=12)):
        loss = F.mse_loss(model(u, i), r)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
